"""Division of a shelf's memory between its buffer pools, for the present blocks and after edits."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from l2l_core.eps import Masters, OptimizerEntry
from l2l_core.eps.blocks import Block, Unit
from l2l_core.shelf.buffer_pool import BufferPool
from l2l_core.shelf.memory_sizes import BlockSize, MemorySizes, StateSizes


class MemoryBudget:
    """Sizes of all blocks, and the limits of the pools that follow from them.

    Args:
        memory_bytes: memory that the user allows.
        ahead: number of layers that are loaded ahead.
        casts: as in `MemorySizes.of`.
        masters: blocks and optimizer.
        loads: pool of buffers for weights.
        updates: pool of buffers for records.

    Attributes:
        state_sizes: bytes reserved for the optimizer state of a block.
    """

    def __init__(
        self, memory_bytes: int, ahead: int, casts: bool, masters: Masters, loads: BufferPool, updates: BufferPool
    ) -> None:
        self.memory_bytes, self.ahead, self.casts = memory_bytes, ahead, casts
        self._masters, self._pools = masters, (loads, updates)
        self.state_sizes = StateSizes(masters)
        self._measured: dict[Block, BlockSize] = {}
        self._units: Sequence[Unit] = ()
        self._new_units: list[Unit] = []  # of the edit in progress

    @property
    def blocks(self) -> dict[Block, BlockSize]:
        """Sizes of the blocks of all units."""
        return {block: self._measured[block] for unit in self._units for block in unit.blocks}

    def size_of(self, block: Block) -> int:
        """Return the bytes of a buffer for a block's record."""
        return self._measured[block].record

    def sizes(self, ahead: int) -> MemorySizes:
        """Return the memory needed with `ahead` layers loaded ahead."""
        return self._sizes(self._units, ahead)

    def plan_split(self, units: Sequence[Unit]) -> Callable[[], None]:
        """Divide memory for these units, the shell first; the function returned applies the limits between two steps.

        Raises:
            ValueError: memory does not suffice; names the smallest that does.
        """
        for block in {block for unit in units for block in unit.blocks} - self._measured.keys():
            self._measured[block] = BlockSize.of(block, self.state_sizes(block))
        limits = self._sizes(units, self.ahead).split(self.memory_bytes)

        def apply() -> None:
            self._units = tuple(units)
            self.end_edit()
            for pool, limit in zip(self._pools, limits, strict=True):
                pool.limit_bytes = limit

        return apply

    def check_fits(self, unit: Unit, entries: Mapping[Block, OptimizerEntry]) -> None:
        """Check that memory suffices with a new layer, and the earlier ones of this edit, added.

        Raises:
            ValueError: it does not; names the smallest that does.
        """
        for block, entry in entries.items():
            self._measured[block] = BlockSize.of(block, self.state_sizes.of_params(entry.masters, entry.groups))
        self._sizes([*self._units, *self._new_units, unit], self.ahead).split(self.memory_bytes)
        self._new_units.append(unit)

    def end_edit(self) -> None:
        """End an edit, after its commit or rollback."""
        self._new_units.clear()

    def forget_blocks(self, blocks: Iterable[Block]) -> None:
        """Remove deleted blocks."""
        for block in blocks:
            self._measured.pop(block, None)

    def clear_pools(self) -> None:
        """Free the buffers in the pools."""
        for pool in self._pools:
            pool.close()

    def _sizes(self, units: Sequence[Unit], ahead: int) -> MemorySizes:
        by_unit = [(unit.key, [self._measured[block] for block in unit.blocks]) for unit in units]
        return MemorySizes.of(by_unit, ahead, self.casts)
