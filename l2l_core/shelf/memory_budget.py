"""How a shelf's memory is shared out among the blocks that there are now, which edits may change."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from l2l_core.eps import Masters, OptimizerEntry
from l2l_core.eps.blocks import Block, Unit
from l2l_core.shelf.buffer_pool import BufferPool
from l2l_core.shelf.memory_sizes import BlockSize, MemorySizes, StateSizes


class MemoryBudget:
    """Knows how large every block is, and gives the pools their limits.

    Args:
        memory_bytes: what the user gives.
        ahead, casts: as in `Sizes.of`.
        masters: the optimizer's side.
        loads, updates: the pools.

    Attributes:
        memory_bytes, ahead, casts: as given.
        state: how much of it a block's state needs.
    """

    def __init__(
        self, memory_bytes: int, ahead: int, casts: bool, masters: Masters, loads: BufferPool, updates: BufferPool
    ) -> None:
        self.memory_bytes, self.ahead, self.casts = memory_bytes, ahead, casts
        self._masters, self._pools = masters, (loads, updates)
        self.state_sizes = StateSizes(masters)
        self._measured: dict[Block, BlockSize] = {}
        self._units: Sequence[Unit] = ()
        self._new_units: list[Unit] = []  # new ones of the edit under way

    @property
    def blocks(self) -> dict[Block, BlockSize]:
        """The blocks of all units, with what each needs."""
        return {block: self._measured[block] for unit in self._units for block in unit.blocks}

    def size_of(self, block: Block) -> int:
        """Count the bytes of a buffer for a block's record."""
        return self._measured[block].record

    def sizes(self, ahead: int) -> MemorySizes:
        """Say what of memory goes where with so many layers ahead."""
        return self._sizes(self._units, ahead)

    def plan_split(self, units: Sequence[Unit]) -> Callable[[], None]:
        """Share memory out among units, the shell first; the result puts it in force, while no step runs.

        Raises:
            ValueError: it does not suffice; names the smallest that does.
        """
        for block in {block for unit in units for block in unit.blocks} - self._measured.keys():
            self._measured[block] = BlockSize.of(block, self.state_sizes(block))
        limits = self._sizes(units, self.ahead).split(self.memory_bytes)

        def put_in_force() -> None:
            self._units = tuple(units)
            self.end_edit()
            for pool, limit in zip(self._pools, limits, strict=True):
                pool.limit_bytes = limit

        return put_in_force

    def check_fits(self, unit: Unit, entries: Mapping[Block, OptimizerEntry]) -> None:
        """See whether there is room for a new layer beside those there are, and those that came before it in this edit.

        Raises:
            ValueError: there is not; names the smallest memory that suffices.
        """
        for block, side in entries.items():
            self._measured[block] = BlockSize.of(block, self.state_sizes.of_params(side.masters, side.groups))
        self._sizes([*self._units, *self._new_units, unit], self.ahead).split(self.memory_bytes)
        self._new_units.append(unit)

    def end_edit(self) -> None:
        """Hear that the edit is over, and what it has brought is in force or gone."""
        self._new_units.clear()

    def forget_blocks(self, blocks: Iterable[Block]) -> None:
        """Forget blocks that are gone for good."""
        for block in blocks:
            self._measured.pop(block, None)

    def clear_pools(self) -> None:
        """Let the pools give up what they keep."""
        for pool in self._pools:
            pool.close()

    def _sizes(self, units: Sequence[Unit], ahead: int) -> MemorySizes:
        by_unit = [(unit.key, [self._measured[block] for block in unit.blocks]) for unit in units]
        return MemorySizes.of(by_unit, ahead, self.casts)
