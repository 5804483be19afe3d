"""A shelf on disk as forecasts know it, planned or built: its memory, its disk, and the bytes of its files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from l2l_core.config import RelayConfig, parse_bytes
from l2l_core.eps.blocks import Block
from l2l_core.forecast.model_shapes import ModelShapes, Shape, slot_numel
from l2l_core.forecast.optimizer_state_size import OptimizerStateSize
from l2l_core.shelf import BlockSize, Disk, DiskBackend, MemorySizes, StateSizeTrial, round_to_pages
from l2l_core.simulator import SHELL, BlockFileSize, VirtualDiskBackend
from l2l_core.trace import Trace, format_bytes


@dataclass(frozen=True, kw_only=True)
class PlannedShelf:
    """A `FileShelf` that is not there yet.

    Args:
        memory_bytes: of its pool, as of a `FileShelf`; None for the smallest that works.
        disk: its figures.

    Raises:
        ValueError, TypeError: bytes that there cannot be, or no disk.
    """

    disk: Disk
    memory_bytes: int | str | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.disk, Disk):
            raise TypeError(
                f"disk={self.disk!r}: give its figures, Disk(read_bytes_per_s=2e9, write_bytes_per_s=1e9), or have them measured "
                "by Disk.of(folder)"
            )
        given = self.memory_bytes
        is_number = isinstance(given, int) and not isinstance(given, bool)
        if given is not None and (not (is_number or isinstance(given, str)) or self.nbytes <= 0):  # type: ignore[operator]
            raise ValueError(f'memory_bytes={given!r}: must be a positive number of bytes, text as "2 GB", or None')

    @property
    def nbytes(self) -> int | None:
        """`memory_bytes` as a number."""
        return (
            parse_bytes(self.memory_bytes, "memory_bytes") if isinstance(self.memory_bytes, str) else self.memory_bytes
        )


@dataclass(frozen=True, slots=True)
class ShelfForecast:
    """What a shelf on disk is in a forecast.

    Attributes:
        disk: its figures.
        memory_bytes: of the pool; a step may take less, never more.
        least_bytes: the smallest pool that works.
        ample_bytes: beyond which a larger pool is of no use.
        needs: what needs the least, in words.
        spare_bytes: of the pool, that this step does not take.
        disk_bytes: of all files after a few steps.
        needed_bytes: that must be free before the first one, for what a stash on the disk takes, too.
        read_bytes, written_bytes: of a step, over the lanes "disk read" and "disk write", with those of a stash there.
        scratch_bytes: of the disk, for a stash that is there.
    """

    disk: Disk
    memory_bytes: int
    min_bytes: int
    max_useful_bytes: int
    min_bytes_reason: str
    unused_bytes: int
    disk_bytes: int
    needed_bytes: int
    read_bytes: int
    written_bytes: int
    scratch_bytes: int = 0

    @property
    def exceeds_disk(self) -> bool:
        """Whether its files do not fit the disk."""
        return self.disk.free_bytes is not None and self.needed_bytes > self.disk.free_bytes

    def __str__(self) -> str:
        return (
            f"shelf: {format_bytes(self.disk_bytes)} of files, a pool of {format_bytes(self.memory_bytes)} (at least "
            f"{format_bytes(self.min_bytes)}); a step reads {format_bytes(self.read_bytes)} and writes "
            f"{format_bytes(self.written_bytes)}; {self.disk}"
        )


class ShelfBlockCosts(NamedTuple):
    """A block of a shelf, planned.

    Attributes:
        filed: its bytes.
        size: for the pool.
        room: bytes of its state that the disk must have room for.
        is_trained: whether any of it is.
    """

    file_size: BlockFileSize
    pool_size: BlockSize
    reserved_state_bytes: int
    is_trained: bool

    @property
    def disk_bytes(self) -> int:
        """Of its files: two halves where it is updated."""
        return 2 * self.file_size.record if self.is_trained else self.file_size.weights

    @property
    def needed_bytes(self) -> int:
        """That a shelf asks the disk for, before anything is written."""
        return 2 * (self.file_size.weights + round_to_pages(self.reserved_state_bytes))


@dataclass(frozen=True, slots=True)
class ShelfCosts:
    """What a shelf is to a step: files, pool and disk.

    Attributes:
        disk: its figures.
        memory_bytes: of the pool.
        sizes: what of it goes where.
        blocks: by key.
    """

    disk: Disk
    memory_bytes: int
    sizes: MemorySizes
    blocks: Mapping[str, ShelfBlockCosts]

    @staticmethod
    def of(
        shelf: PlannedShelf,
        model: ModelShapes,
        optimizer_state: OptimizerStateSize,
        layers: Sequence[str],
        ahead: int,
        casts: bool,
        bf16: bool,
    ) -> ShelfCosts:
        """Plan a shelf for a model.

        Args:
            shelf: what is said of it.
            model: each of its layers is a block, and its shell.
            kept: what the optimizer keeps.
            layers: keys.
            ahead: layers that are loaded ahead.
            casts: whether the device's copies cannot cast on the way.
            bf16: whether weights go to the device in bfloat16.

        Raises:
            ValueError: its memory does not suffice; names the smallest that does. Or masters are in bfloat16.
        """
        if optimizer_state.rounds_weights:
            raise ValueError(
                "masters in bfloat16 (weights=True) are for a shelf in memory: on disk take in_bf16 without it, which keeps "
                "state in bfloat16 alone"
            )
        trial = StateSizeTrial(optimizer_state.optimizer)

        def block(key: str, shapes: Sequence[Shape], trained: Sequence[Shape]) -> ShelfBlockCosts:
            numel, room = slot_numel(tuple(shapes)), sum(map(trial, trained))
            size = BlockSize(key, numel, sum(map(trial, shapes)))  # what is frozen may be trained one day
            cast = round_to_pages(2 * numel) if casts and bf16 else 0
            filed = BlockFileSize(
                size.weights, cast, round_to_pages(size.weights + optimizer_state.record_bytes(trained)), size.record
            )
            return ShelfBlockCosts(filed, size, room, bool(trained))

        one = block(layers[0], model.layer, model.trained[0])
        shell = block(SHELL, model.shell, model.trained[1])
        sizes = MemorySizes.of([(SHELL, [shell.pool_size]), (layers[0], [one.pool_size])], ahead, casts)
        blocks = {SHELL: shell, **dict.fromkeys(layers, one)}
        memory_bytes = shelf.nbytes if shelf.nbytes is not None else sizes.min_bytes
        sizes.split(memory_bytes)  # refuses too little
        return ShelfCosts(shelf.disk, memory_bytes, sizes, blocks)

    def make_virtual_backend(self) -> VirtualDiskBackend:
        """Make the shelf of one replay."""
        loads, records = self.sizes.split(self.memory_bytes)
        return VirtualDiskBackend(
            {key: block.file_size for key, block in self.blocks.items()}, self.disk, loads, records
        )

    def figures(self) -> dict[str, object]:
        """Return what a trace says of it, as plain values."""
        return {"shelf": "planned", **self.disk.figures()}

    def summarize(self, backend: VirtualDiskBackend, trace: Trace) -> ShelfForecast:
        """Say what came of a replay."""
        moved = {lane: sum(event.nbytes for event in trace.lanes[lane]) for lane in ("disk read", "disk write")}
        return ShelfForecast(
            disk=self.disk,
            memory_bytes=self.memory_bytes,
            min_bytes=self.sizes.min_bytes,
            max_useful_bytes=self.sizes.max_useful_bytes,
            min_bytes_reason=self.sizes.description,
            unused_bytes=self.memory_bytes - backend.load_pool.peak_bytes - backend.record_pool.peak_bytes,
            disk_bytes=sum(block.disk_bytes for block in self.blocks.values()),
            needed_bytes=sum(block.needed_bytes for block in self.blocks.values()) + backend.stash.file_bytes,
            read_bytes=moved["disk read"],
            written_bytes=moved["disk write"],
            scratch_bytes=backend.stash.file_bytes,
        )

    def max_depth(self, scratch_bytes: int) -> int | None:
        """Find the most layers like these whose files fit the disk; None without a limit.

        What a stash takes of it, `scratch_bytes`, is counted as if every layer had as much of it.
        """
        free = self.disk.free_bytes
        if free is None:
            return None
        shell, layer = (self.blocks[key].needed_bytes for key in (SHELL, next(k for k in self.blocks if k != SHELL)))
        return max(0, (free - shell) // (layer + -(-scratch_bytes // (len(self.blocks) - 1))))


def relay_shelf_costs(shelf: DiskBackend, config: RelayConfig, disk: Disk) -> ShelfCosts:
    """Return the files and the pool of a relay's own shelf.

    Args:
        shelf: the relay's.
        config: of the step.
        disk: its figures; what is free of it does not count, since the files are there.

    Raises:
        ValueError: layers share weights, or the pool has no room for as many layers ahead.
    """
    room = shelf.budget
    several = [block.key for block in room.blocks if block.shared]
    if several:
        raise ValueError(
            f"forecast: {several[0]} is in several layers, and the order in which a shelf reads such blocks is not planned yet. "
            "Make a step and read its trace"
        )
    sizes, asked = room.sizes(room.ahead), room.sizes(config.ahead)
    loads, _ = sizes.split(room.memory_bytes)
    if asked.load_bytes > loads:
        raise ValueError(
            f"forecast: ahead={config.ahead} takes {asked.load_bytes:,} bytes of buffers for weights, and the shelf has {loads:,}, "
            f"shared out with ahead={room.ahead}: make the relay with that config, or give the shelf more memory_bytes"
        )
    casts = room.casts and config.precision == "bf16"
    blocks = {block.key: _block_costs(block, shelf, casts) for block in room.blocks}
    return ShelfCosts(replace(disk, free_bytes=None), room.memory_bytes, sizes, blocks)


def _block_costs(block: Block, shelf: DiskBackend, casts: bool) -> ShelfBlockCosts:
    size, trained = shelf.budget.blocks[block], any(block.trained.flags)
    record = shelf.record_bytes(block)
    if trained and not block.version:  # its state is yet to come
        record = max(record, size.record)
    cast = round_to_pages(2 * size.numel) if casts else 0
    return ShelfBlockCosts(BlockFileSize(size.weights, cast, record, size.record), size, size.state, trained)
