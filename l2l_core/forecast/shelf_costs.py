"""Costs of a shelf on disk, planned or built: pool memory, bytes of files, speed of the disk."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from l2l_core.config import RelayConfig
from l2l_core.eps.blocks import Block
from l2l_core.forecast.model_shapes import ModelShapes, slot_numel
from l2l_core.forecast.optimizer_state_size import OptimizerStateSize
from l2l_core.shelf import BlockSize, Disk, DiskBackend, MemorySizes, StateSizeTrial, round_to_pages
from l2l_core.simulator import SHELL, BlockFileSize, VirtualDiskBackend
from l2l_core.trace import Trace, format_bytes, parse_bytes


@dataclass(frozen=True, kw_only=True)
class PlannedShelf:
    """A `FileShelf` that does not exist yet.

    Args:
        disk: speed and free bytes of the disk.
        memory_bytes: of the pool, as for a `FileShelf`; None for the smallest that works.

    Raises:
        ValueError: invalid memory_bytes.
        TypeError: disk is no Disk.

    Example:
        >>> from functools import partial
        >>> from transformers import LlamaConfig
        >>> from l2l_core import Disk, Machine, PlannedShelf, forecast_config
        >>> card = Machine(flops_per_s=50e12, update_params_per_s=1e9, h2d_bytes_per_s=20e9, d2h_bytes_per_s=20e9)
        >>> shelf = PlannedShelf(disk=Disk(read_bytes_per_s=2e9, write_bytes_per_s=1e9), memory_bytes="8 GB")
        >>> settings = {"micro_batches": 2, "batch": 2, "sequence": 512, "optimizer": partial(torch.optim.AdamW, lr=1e-4)}
        >>> forecast = forecast_config(LlamaConfig(num_hidden_layers=8), card, shelf=shelf, **settings)
        >>> forecast.fits, forecast.shelf.needed_bytes  # on the disk
        (True, 45505601536)
    """

    disk: Disk
    memory_bytes: int | str | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.disk, Disk):
            raise TypeError(
                f"disk={self.disk!r}: give its figures, Disk(read_bytes_per_s=2e9, write_bytes_per_s=1e9), or measure them with "
                "Disk.of(folder)"
            )
        given = self.memory_bytes
        is_valid = given is None or (isinstance(given, int | str) and not isinstance(given, bool))
        if not is_valid or (self.nbytes is not None and self.nbytes <= 0):
            raise ValueError(f'memory_bytes={given!r}: must be a positive number of bytes, text as "2 GB", or None')

    @property
    def nbytes(self) -> int | None:
        """`memory_bytes` as a number."""
        given = self.memory_bytes
        return parse_bytes(given, "memory_bytes") if isinstance(given, str) else given


@dataclass(frozen=True, slots=True)
class ShelfForecast:
    """Forecast of a shelf on disk."""

    disk: Disk
    memory_bytes: int  # of the pool; a step may use less, never more
    min_bytes: int  # the smallest pool that works
    max_useful_bytes: int  # pool size beyond which nothing gets faster
    min_bytes_reason: str  # contents of the smallest pool
    unused_bytes: int  # of the pool
    disk_bytes: int  # of all files after a few steps
    needed_bytes: int  # that must be free on the disk before the first step, `scratch_bytes` included
    read_bytes: int  # of a step, a stash on the disk included
    written_bytes: int
    scratch_bytes: int = 0  # of a stash on the disk

    @property
    def exceeds_disk(self) -> bool:
        """True if its files do not fit the disk."""
        return self.disk.free_bytes is not None and self.needed_bytes > self.disk.free_bytes

    def __str__(self) -> str:
        return (
            f"shelf: {format_bytes(self.disk_bytes)} of files, a pool of {format_bytes(self.memory_bytes)} (at least "
            f"{format_bytes(self.min_bytes)}); a step reads {format_bytes(self.read_bytes)} and writes "
            f"{format_bytes(self.written_bytes)}; {self.disk}"
        )


class ShelfBlockCosts(NamedTuple):
    """Sizes of a block on a shelf."""

    file_size: BlockFileSize
    disk_bytes: int  # of its files, two copies if it is updated
    needed_bytes: int  # that must be free on the disk before anything is written

    @staticmethod
    def of(size: BlockSize, record: int, state: int, is_trained: bool, casts: bool) -> ShelfBlockCosts:
        """Return the costs of a block with `record` bytes in a file and room for `state` bytes of state."""
        file_size = BlockFileSize(size.weights, round_to_pages(2 * size.numel) if casts else 0, record, size.record)
        disk_bytes = 2 * record if is_trained else size.weights
        return ShelfBlockCosts(file_size, disk_bytes, 2 * (size.weights + round_to_pages(state)))


@dataclass(frozen=True, slots=True)
class ShelfCosts:
    """Files, pool and disk of a shelf, as a step uses them."""

    disk: Disk
    memory_bytes: int  # of the pool
    sizes: MemorySizes  # division of the pool
    blocks: Mapping[str, ShelfBlockCosts]  # by key

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
        """Plan a shelf for a model, with a block for the shell and for each key in `layers`.

        `casts`: copies to the device cannot cast. `bf16`: weights on the device are bfloat16.

        Raises:
            ValueError: its memory does not suffice (the message names the smallest that does), or masters are bfloat16.
        """
        if optimizer_state.rounds_weights:
            raise ValueError(
                "masters in bfloat16 (weights=True) are for a shelf in memory: on disk use in_bf16 without weights=True, which "
                "keeps only the state in bfloat16"
            )
        trial = StateSizeTrial(optimizer_state.optimizer)

        block_sizes, blocks = dict[str, BlockSize](), dict[str, ShelfBlockCosts]()
        for key, shapes, trained in zip(
            (SHELL, layers[0]), (model.shell, model.layer), model.trained[::-1], strict=True
        ):
            block_sizes[key] = size = BlockSize(key, slot_numel(shapes), sum(map(trial, shapes)))
            record = round_to_pages(size.weights + optimizer_state.record_bytes(trained))
            state = sum(map(trial, trained))
            blocks[key] = ShelfBlockCosts.of(size, record, state, bool(trained), casts and bf16)
        frozen = {key for key, trained in zip((SHELL, layers[0]), model.trained[::-1], strict=True) if not trained}
        sizes = MemorySizes.of([(key, [size]) for key, size in block_sizes.items()], ahead, casts, frozen)
        memory_bytes = shelf.nbytes if shelf.nbytes is not None else sizes.min_bytes
        sizes.split(memory_bytes)  # raises if it is too little
        return ShelfCosts(shelf.disk, memory_bytes, sizes, {**blocks, **dict.fromkeys(layers, blocks[layers[0]])})

    def make_virtual_backend(self) -> VirtualDiskBackend:
        """Make the shelf of one simulation."""
        file_sizes = {key: block.file_size for key, block in self.blocks.items()}
        return VirtualDiskBackend(file_sizes, self.disk, *self.sizes.split(self.memory_bytes))

    def figures(self) -> dict[str, object]:
        """Return its settings in a trace."""
        return {"shelf": "planned", **self.disk.figures()}

    def summarize(self, backend: VirtualDiskBackend, trace: Trace) -> ShelfForecast:
        """Return the forecast from a simulation."""
        blocks, scratch_bytes = self.blocks.values(), backend.stash.file_bytes
        return ShelfForecast(
            disk=self.disk,
            memory_bytes=self.memory_bytes,
            min_bytes=self.sizes.min_bytes,
            max_useful_bytes=self.sizes.max_useful_bytes,
            min_bytes_reason=self.sizes.description,
            unused_bytes=self.memory_bytes - backend.load_pool.peak_bytes - backend.record_pool.peak_bytes,
            disk_bytes=sum(block.disk_bytes for block in blocks),
            needed_bytes=sum(block.needed_bytes for block in blocks) + scratch_bytes,
            read_bytes=sum(event.nbytes for event in trace.lanes["disk read"]),
            written_bytes=sum(event.nbytes for event in trace.lanes["disk write"]),
            scratch_bytes=scratch_bytes,
        )

    def max_depth(self, scratch_bytes: int) -> int | None:
        """Return the most layers like these whose files fit the disk; None without a limit.

        `scratch_bytes` of a stash are divided evenly among the layers.
        """
        free = self.disk.free_bytes
        if free is None:
            return None
        shell, layer = (self.blocks[key].needed_bytes for key in (SHELL, next(k for k in self.blocks if k != SHELL)))
        return max(0, (free - shell) // (layer + -(-scratch_bytes // (len(self.blocks) - 1))))


def relay_shelf_costs(shelf: DiskBackend, config: RelayConfig, disk: Disk) -> ShelfCosts:
    """Return the costs of a relay's own shelf; free bytes of the disk are ignored, since the files exist.

    Raises:
        ValueError: layers share weights, or the pool is too small for the layers ahead.
    """
    budget = shelf.budget
    if several := [block.key for block in budget.blocks if block.shared]:
        raise ValueError(
            f"forecast: {several[0]} is in several layers; the order of reads of such a block on a shelf cannot be forecast. "
            "Make a step and read its trace"
        )
    sizes, needed = budget.sizes(budget.ahead), budget.sizes(config.ahead)
    loads, _ = sizes.split(budget.memory_bytes)
    if needed.load_bytes > loads:
        raise ValueError(
            f"forecast: ahead={config.ahead} takes {needed.load_bytes:,} bytes of buffers for weights, and the shelf has "
            f"{loads:,}, divided with ahead={budget.ahead}: make the relay with that config, or give the shelf more memory_bytes"
        )
    casts = budget.casts and config.precision == "bf16"
    blocks = {block.key: _block_costs(block, shelf, casts) for block in budget.blocks}
    return ShelfCosts(replace(disk, free_bytes=None), budget.memory_bytes, sizes, blocks)


def _block_costs(block: Block, shelf: DiskBackend, casts: bool) -> ShelfBlockCosts:
    size, trained = shelf.budget.blocks[block], any(block.trained.flags)
    record = shelf.record_bytes(block)
    if trained and not block.version:  # the first update will create its state
        record = max(record, size.record)
    return ShelfBlockCosts.of(size, record, size.state, trained, casts)
