"""Where bytes wait that have left the device for a while: a spot for each storage, in host memory or elsewhere."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager

import torch

from l2l_core.devices.device import Device, Ticket
from l2l_core.devices.ledger import Ledger
from l2l_core.trace import Trace


class StashSlot:
    """Is where the bytes of one storage wait.

    Attributes:
        nbytes: of the storage.
    """

    __slots__ = ("nbytes",)

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes


class StashStore(ABC):
    """Has spots for storages. Copies to the targets of spots, and from their sources, are the caller's.

    One thread at a time asks it; `forget` alone may come from any.

    Attributes:
        looks_ahead: how many turns, after the one whose bytes are copied meanwhile, it would like to be told of.
    """

    prefetch_turns = 0

    @abstractmethod
    def begin(self, trace: Trace, stalled: Callable[[], AbstractContextManager[None]]) -> None:
        """A pass begins, with that trace; compute waits inside of `stalled`."""

    @abstractmethod
    def allocate(self, nbytes: int) -> StashSlot:
        """Find room for a storage."""

    @abstractmethod
    def targets(self, slots: Sequence[StashSlot]) -> list[torch.Tensor]:
        """Say where the bytes of storages that leave together are to be copied, each (nbytes,) uint8."""

    @abstractmethod
    def write_started(self, slots: Sequence[StashSlot], ticket: Ticket, k: int, visit: int) -> None:
        """The copies to these targets are under way: of micro-batch `k`, after its turn in `visit`."""

    @abstractmethod
    def prefetch(self, turns: Sequence[tuple[Sequence[StashSlot], str, int, int]]) -> None:
        """Say what the next turns want, the next one first: spots, key of the layer, micro-batch, visit."""

    @abstractmethod
    def sources(self, slots: Sequence[StashSlot], layer: str, k: int, visit: int) -> list[torch.Tensor]:
        """Say from where bytes can be copied now, each (nbytes,) uint8, until `lent` is told by when they have been."""

    @abstractmethod
    def read_started(self, slots: Sequence[StashSlot], ticket: Ticket) -> None:
        """The copies from these sources are under way."""

    @abstractmethod
    def free(self, slot: StashSlot) -> None:
        """A spot is free again."""

    @abstractmethod
    def clear(self) -> None:
        """The pass is over: give back all memory and all room. Every spot has been forgotten."""


class _HostSlot(StashSlot):
    __slots__ = ("flat",)

    def __init__(self, flat: torch.Tensor) -> None:
        super().__init__(flat.numel())
        self.flat = flat


class HostStashStore(StashStore):
    """Lets every storage wait in host memory.

    Args:
        device: makes memory that copies can reach.
        host: gets it booked.
    """

    def __init__(self, device: Device, host: Ledger) -> None:
        self._device, self._host = device, host
        self._free: dict[int, list[_HostSlot]] = {}  # by their bytes

    def begin(self, trace: Trace, stalled: Callable[[], AbstractContextManager[None]]) -> None:
        pass

    def allocate(self, nbytes: int) -> StashSlot:
        free = self._free.get(nbytes)
        if free:
            return free.pop()
        self._host.book("stash", "images", nbytes)
        return _HostSlot(self._device.host_empty(nbytes, torch.uint8))

    def targets(self, slots: Sequence[StashSlot]) -> list[torch.Tensor]:
        return [_buffer_of(spot) for spot in slots]

    def write_started(self, slots: Sequence[StashSlot], ticket: Ticket, k: int, visit: int) -> None:
        pass

    def prefetch(self, turns: Sequence[tuple[Sequence[StashSlot], str, int, int]]) -> None:
        pass

    def sources(self, slots: Sequence[StashSlot], layer: str, k: int, visit: int) -> list[torch.Tensor]:
        return [_buffer_of(spot) for spot in slots]

    def read_started(self, slots: Sequence[StashSlot], ticket: Ticket) -> None:
        pass

    def free(self, slot: StashSlot) -> None:
        assert isinstance(slot, _HostSlot)
        self._free.setdefault(slot.nbytes, []).append(slot)

    def clear(self) -> None:
        self._host.release("stash", "images", sum(n * len(buffers) for n, buffers in self._free.items()))
        self._free.clear()


def _buffer_of(slot: StashSlot) -> torch.Tensor:
    assert isinstance(slot, _HostSlot)
    return slot.flat
