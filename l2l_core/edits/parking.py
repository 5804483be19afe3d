"""Where layers wait that are in no stack: what holds them, and the books about it."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from l2l_core.devices import Ledger
from l2l_core.edits.parked import Parked
from l2l_core.eps import Side
from l2l_core.eps.blocks import Block, Unit


class Parking:
    """The parked layers of one relay.

    Invariant: the bytes of a parked layer that are in memory are booked, and statistics of steps it has none.

    Args:
        host: gets the bytes booked.
        empty: makes a float32 host buffer of so many elements.
    """

    def __init__(self, host: Ledger, empty: Callable[[int], torch.Tensor]) -> None:
        self._host, self._empty = host, empty
        self._parked: dict[Unit, Parked] = {}
        self._sides: dict[Block, Side] = {}
        self._booked: dict[Unit, int] = {}

    def __contains__(self, unit: Unit) -> bool:
        return unit in self._parked

    def __iter__(self) -> Iterator[Parked]:
        return iter(tuple(self._parked.values()))

    def __getitem__(self, unit: Unit) -> Parked:
        return self._parked[unit]

    def side_of(self, block: Block) -> Side | None:
        """What the optimizer holds of a parked block; None if it is not parked."""
        return self._sides.get(block)

    def put(self, parked: Parked) -> None:
        """Take a layer in."""
        self._parked[parked.unit] = parked
        parked.unit.stats.clear()  # what steps tell of layers is of those that were in them
        self._sides.update(parked.sides)
        self._booked[parked.unit] = parked.nbytes
        self._host.book("other", f"parked {parked.unit.key}", parked.nbytes)

    def take(self, unit: Unit) -> Parked:
        """Let a layer go."""
        self._host.release("other", f"parked {unit.key}", self._booked.pop(unit))
        parked = self._parked.pop(unit)
        for block in parked.sides:
            del self._sides[block]
        return parked

    def spill(self, unit: Unit) -> None:
        """Let a parked layer wait on disk; one that is in a stack stays where it is."""
        if unit in self._parked:
            self._change(unit, Parked.spill)

    def fetch(self, unit: Unit) -> None:
        """Bring a layer back to memory, if it waits on disk."""
        if unit in self._parked and self._parked[unit].path is not None:
            self._change(unit, lambda parked: parked.fetch(self._empty))

    def book_again(self) -> None:
        """Values have been exchanged: what layers hold may have another size."""
        for unit in list(self._parked):
            self.put(self.take(unit))

    def close(self) -> None:
        """Leave nothing on disk."""
        for parked in self._parked.values():
            parked.close()

    def _change(self, unit: Unit, change: Callable[[Parked], None]) -> None:
        parked = self.take(unit)
        try:
            change(parked)
        finally:
            self.put(parked)
