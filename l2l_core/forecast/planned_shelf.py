"""A shelf on disk as forecasts know it, planned or built: its memory, its disk, and the bytes of its files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from l2l_core.config import RelayConfig, bytes_in
from l2l_core.eps.blocks import Block
from l2l_core.forecast.families import ModelShapes, Shape, slot_numel
from l2l_core.forecast.kept_state import KeptState
from l2l_core.shelf import BlockSize, Disk, OnFiles, Sizes, StateTrial, pages
from l2l_core.simulator import SHELL, Filed, OnShelf
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
        return bytes_in(self.memory_bytes, "memory_bytes") if isinstance(self.memory_bytes, str) else self.memory_bytes


@dataclass(frozen=True, slots=True)
class OfShelf:
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
    least_bytes: int
    ample_bytes: int
    needs: str
    spare_bytes: int
    disk_bytes: int
    needed_bytes: int
    read_bytes: int
    written_bytes: int
    scratch_bytes: int = 0

    @property
    def lacks_disk(self) -> bool:
        """Whether its files do not fit the disk."""
        return self.disk.free_bytes is not None and self.needed_bytes > self.disk.free_bytes

    def __str__(self) -> str:
        return (
            f"shelf: {format_bytes(self.disk_bytes)} of files, a pool of {format_bytes(self.memory_bytes)} (at least "
            f"{format_bytes(self.least_bytes)}); a step reads {format_bytes(self.read_bytes)} and writes "
            f"{format_bytes(self.written_bytes)}; {self.disk}"
        )


class BlockCosts(NamedTuple):
    """A block of a shelf, planned.

    Attributes:
        filed: its bytes.
        size: for the pool.
        room: bytes of its state that the disk must have room for.
        is_trained: whether any of it is.
    """

    filed: Filed
    size: BlockSize
    room: int
    is_trained: bool

    @property
    def disk_bytes(self) -> int:
        """Of its files: two halves where it is updated."""
        return 2 * self.filed.record if self.is_trained else self.filed.weights

    @property
    def needed_bytes(self) -> int:
        """That a shelf asks the disk for, before anything is written."""
        return 2 * (self.filed.weights + pages(self.room))


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
    sizes: Sizes
    blocks: Mapping[str, BlockCosts]

    @staticmethod
    def of(
        shelf: PlannedShelf,
        model: ModelShapes,
        kept: KeptState,
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
        if kept.rounds_weights:
            raise ValueError(
                "masters in bfloat16 (weights=True) are for a shelf in memory: on disk take in_bf16 without it, which keeps "
                "state in bfloat16 alone"
            )
        trial = StateTrial(kept.optimizer)

        def block(key: str, shapes: Sequence[Shape], trained: Sequence[Shape]) -> BlockCosts:
            numel, room = slot_numel(tuple(shapes)), sum(map(trial, trained))
            size = BlockSize(key, numel, sum(map(trial, shapes)))  # what is frozen may be trained one day
            cast = pages(2 * numel) if casts and bf16 else 0
            filed = Filed(size.weights, cast, pages(size.weights + kept.in_file(trained)), size.record)
            return BlockCosts(filed, size, room, bool(trained))

        one = block(layers[0], model.layer, model.trained[0])
        shell = block(SHELL, model.shell, model.trained[1])
        sizes = Sizes.of([(SHELL, [shell.size]), (layers[0], [one.size])], ahead, casts)
        blocks = {SHELL: shell, **dict.fromkeys(layers, one)}
        memory_bytes = shelf.nbytes if shelf.nbytes is not None else sizes.least
        sizes.shared_out(memory_bytes)  # refuses too little
        return ShelfCosts(shelf.disk, memory_bytes, sizes, blocks)

    def company(self) -> OnShelf:
        """Make the shelf of one replay."""
        loads, records = self.sizes.shared_out(self.memory_bytes)
        return OnShelf({key: block.filed for key, block in self.blocks.items()}, self.disk, loads, records)

    def figures(self) -> dict[str, object]:
        """Return what a trace says of it, as plain values."""
        return {"shelf": "planned", **self.disk.figures()}

    def told(self, company: OnShelf, trace: Trace) -> OfShelf:
        """Say what came of a replay."""
        moved = {lane: sum(event.nbytes for event in trace.lanes[lane]) for lane in ("disk read", "disk write")}
        return OfShelf(
            disk=self.disk,
            memory_bytes=self.memory_bytes,
            least_bytes=self.sizes.least,
            ample_bytes=self.sizes.ample,
            needs=self.sizes.says,
            spare_bytes=self.memory_bytes - company.loads.most - company.records.most,
            disk_bytes=sum(block.disk_bytes for block in self.blocks.values()),
            needed_bytes=sum(block.needed_bytes for block in self.blocks.values()) + company.stash.file_bytes,
            read_bytes=moved["disk read"],
            written_bytes=moved["disk write"],
            scratch_bytes=company.stash.file_bytes,
        )

    def deepest(self, scratch_bytes: int) -> int | None:
        """Find the most layers like these whose files fit the disk; None without a limit.

        What a stash takes of it, `scratch_bytes`, is counted as if every layer had as much of it.
        """
        free = self.disk.free_bytes
        if free is None:
            return None
        shell, layer = (self.blocks[key].needed_bytes for key in (SHELL, next(k for k in self.blocks if k != SHELL)))
        return max(0, (free - shell) // (layer + -(-scratch_bytes // (len(self.blocks) - 1))))


def built_shelf(shelf: OnFiles, config: RelayConfig, disk: Disk) -> ShelfCosts:
    """Return the files and the pool of a relay's own shelf.

    Args:
        shelf: the relay's.
        config: of the step.
        disk: its figures; what is free of it does not count, since the files are there.

    Raises:
        ValueError: layers share weights, or the pool has no room for as many layers ahead.
    """
    room = shelf.room
    several = [block.key for block in room.blocks if block.shared]
    if several:
        raise ValueError(
            f"forecast: {several[0]} is in several layers, and the order in which a shelf reads such blocks is not planned yet. "
            "Make a step and read its trace"
        )
    sizes, asked = room.sizes(room.ahead), room.sizes(config.ahead)
    loads, _ = sizes.shared_out(room.memory_bytes)
    if asked.loads > loads:
        raise ValueError(
            f"forecast: ahead={config.ahead} takes {asked.loads:,} bytes of buffers for weights, and the shelf has {loads:,}, "
            f"shared out with ahead={room.ahead}: make the relay with that config, or give the shelf more memory_bytes"
        )
    casts = room.casts and config.precision == "bf16"
    blocks = {block.key: _planned(block, shelf, casts) for block in room.blocks}
    return ShelfCosts(replace(disk, free_bytes=None), room.memory_bytes, sizes, blocks)


def _planned(block: Block, shelf: OnFiles, casts: bool) -> BlockCosts:
    size, trained = shelf.room.blocks[block], any(block.trained.flags)
    record = shelf.record_bytes(block)
    if trained and not block.version:  # its state is yet to come
        record = max(record, size.record)
    cast = pages(2 * size.numel) if casts else 0
    return BlockCosts(Filed(size.weights, cast, record, size.record), size, size.state, trained)
