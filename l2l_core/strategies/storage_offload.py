"""Storages that wait on the host: out on one lane behind one stage of compute, back on the other before they are read.

A storage keeps its identity: it is emptied when its copy has left and gets memory again when the way back begins, so
that autograd's record, which holds it, notices nothing.
"""

from __future__ import annotations

import weakref
from collections.abc import Collection, Iterable

import torch

from l2l_core._torch import DisableTorchDispatch
from l2l_core.devices import Device, Ledger, Ticket
from l2l_core.step.traffic import Lane
from l2l_core.strategies.allocation_meter import AllocationMeter
from l2l_core.trace import Trace

OffloadKey = tuple[str, int]  # kind of the operation that sent it out, and the stage


class StorageOffloader:
    """What is away, and what is on its way.

    Invariant: after `settle`, a storage that was sent out has no device bytes until `bring`.

    Args:
        device: gives host buffers, and does the copying.
        host: ledger of host memory.
        meter: of the device's bytes.
        trace: gets an event per copy.
    """

    def __init__(self, device: Device, host: Ledger, meter: AllocationMeter, trace: Trace) -> None:
        self._device, self._host, self._meter = device, host, meter
        self._d2h, self._h2d = Lane(device, trace, "d2h"), Lane(device, trace, "h2d")
        self._sending: list[tuple[Ticket, list[_OffloadedStorage]]] = []
        self._on_host: dict[OffloadKey, list[_OffloadedStorage]] = {}
        self._fetching: dict[OffloadKey, tuple[Ticket, list[_OffloadedStorage]]] = {}
        self.host_bytes = 0

    def send(self, offload_key: OffloadKey, storages: Iterable[int], layer: str, k: int) -> None:
        """Start to copy storages to the host; their device bytes are free after the next stage of compute."""
        found = [(key, storage) for key in storages if (storage := self._meter.storage(key)) is not None]
        with DisableTorchDispatch():  # the meter counts what is on the device
            room = [self._device.host_empty(storage.nbytes(), torch.uint8) for _, storage in found]
        gone = [
            _OffloadedStorage(weakref.ref(storage), key, host) for (key, storage), host in zip(found, room, strict=True)
        ]
        nbytes = sum(each.host.nbytes for each in gone)
        self._host.book("stash", layer, nbytes)
        self.host_bytes += nbytes
        copies = [(each.host, _as_bytes(storage)) for each, (_, storage) in zip(gone, found, strict=True)]
        self._sending.append((self._d2h.send("stash", layer, copies, k), gone))
        self._on_host[offload_key] = gone

    def finish_sends(self) -> None:
        """A stage has run: what has left meanwhile, or leaves now, is no longer on the device."""
        for ticket, gone in self._sending:
            ticket.join()
            for each in gone:
                if (storage := each.ref()) is not None:
                    storage.resize_(0)
                    self._meter.on_emptied(each.key)
        self._sending.clear()

    def fetch(self, key: OffloadKey, layer: str, k: int) -> None:
        """Start to copy back what `key` has sent out; its device bytes are in use from now on."""
        self.finish_sends()
        gone, copies = self._on_host.pop(key), []
        for each in gone:
            if (storage := each.ref()) is not None:
                storage.resize_(each.host.nbytes)
                self._meter.on_refilled(each.key, each.host.nbytes)
                copies.append((_as_bytes(storage), each.host))
        self._fetching[key] = self._h2d.send("fetch", layer, copies, k), gone
        self._free_host(gone, layer)

    def _free_host(self, storages: Collection[_OffloadedStorage], layer: str) -> None:
        nbytes = sum(each.host.nbytes for each in storages)
        self._host.release("stash", layer, nbytes)
        self.host_bytes -= nbytes

    def wait(self, key: OffloadKey) -> None:
        """Let compute go on only when what `key` has sent out is back."""
        if key in self._fetching:
            ticket, _ = self._fetching.pop(key)
            ticket.wait()

    def abandon(self) -> None:
        """A step has failed: wait for every copy. The host's ledger is the step's own, and goes with it."""
        for ticket, _ in [*self._sending, *self._fetching.values()]:
            ticket.abandon()


class _OffloadedStorage:
    __slots__ = ("host", "key", "ref")

    def __init__(self, ref: weakref.ref[torch.UntypedStorage], key: int, host: torch.Tensor) -> None:
        self.ref, self.key, self.host = ref, key, host


def _as_bytes(storage: torch.UntypedStorage) -> torch.Tensor:
    with DisableTorchDispatch():
        return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
