"""Stores for the stash: a slot for each offloaded storage, in host memory or elsewhere."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager

import torch

from l2l_core.devices.device import Device, Ticket
from l2l_core.devices.ledger import Ledger
from l2l_core.trace import Trace


class StashSlot:
    """Place of the bytes of one offloaded storage."""

    __slots__ = ("nbytes",)

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes


class StashStore(ABC):
    """Slots for offloaded storages. The caller copies to `targets` and from `sources`.

    One thread at a time calls it, except for `free`, which any thread may call. Methods with a default are for stores that move
    the bytes on.

    Attributes:
        prefetch_turns: number of turns that `prefetch` wants, beyond the one being fetched.
    """

    prefetch_turns = 0

    def begin(self, trace: Trace, stalled: Callable[[], AbstractContextManager[None]]) -> None:  # noqa: B027
        """Begin a pass, recorded in `trace`; time spent waiting is counted inside `stalled`."""

    @abstractmethod
    def allocate(self, nbytes: int) -> StashSlot:
        """Return a slot for a storage of `nbytes` bytes."""

    @abstractmethod
    def targets(self, slots: Sequence[StashSlot]) -> list[torch.Tensor]:
        """Return the buffers to which storages are copied, each (nbytes,) uint8; all slots leave the device together."""

    def write_started(self, slots: Sequence[StashSlot], ticket: Ticket, k: int, visit: int) -> None:  # noqa: B027
        """Register the ticket of the copies to the targets, of micro-batch `k` after its turn in `visit`."""

    def prefetch(self, turns: Sequence[tuple[Sequence[StashSlot], str, int, int]]) -> None:  # noqa: B027
        """Announce the next turns in order: (slots, layer key, micro-batch, visit)."""

    @abstractmethod
    def sources(self, slots: Sequence[StashSlot], layer: str, k: int, visit: int) -> list[torch.Tensor]:
        """Return buffers to copy from, each (nbytes,) uint8, valid until the ticket given to `read_started` is done."""

    def read_started(self, slots: Sequence[StashSlot], ticket: Ticket) -> None:  # noqa: B027
        """Register the ticket of the copies from the sources."""

    @abstractmethod
    def free(self, slot: StashSlot) -> None:
        """Free a slot."""

    @abstractmethod
    def clear(self) -> None:
        """End the pass and release all memory; every slot has been freed."""


class _HostSlot(StashSlot):
    __slots__ = ("flat",)

    def __init__(self, flat: torch.Tensor) -> None:
        super().__init__(flat.numel())
        self.flat = flat


class HostStashStore(StashStore):
    """Stash store in memory allocated by `device`, booked in the ledger `host`."""

    def __init__(self, device: Device, host: Ledger) -> None:
        self._device, self._host = device, host
        self._free: dict[int, list[_HostSlot]] = {}  # by size in bytes

    def allocate(self, nbytes: int) -> StashSlot:
        if free := self._free.get(nbytes):
            return free.pop()
        self._host.book("stash", "images", nbytes)
        return _HostSlot(self._device.host_empty(nbytes, torch.uint8))

    def targets(self, slots: Sequence[StashSlot]) -> list[torch.Tensor]:
        buffers = [slot.flat for slot in slots if isinstance(slot, _HostSlot)]
        assert len(buffers) == len(slots), "slots of another store"
        return buffers

    def sources(self, slots: Sequence[StashSlot], layer: str, k: int, visit: int) -> list[torch.Tensor]:
        return self.targets(slots)

    def free(self, slot: StashSlot) -> None:
        assert isinstance(slot, _HostSlot)
        self._free.setdefault(slot.nbytes, []).append(slot)

    def clear(self) -> None:
        self._host.release("stash", "images", sum(n * len(buffers) for n, buffers in self._free.items()))
        self._free.clear()
