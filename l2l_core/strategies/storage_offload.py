"""Offload of storages to the host: they leave during one stage of compute and return before they are read.

A storage keeps its identity: it is emptied when its copy is complete, and gets memory again when its fetch begins. So
autograd's graph, which holds it, does not change.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import NamedTuple

import torch

from l2l_core._torch import DisableTorchDispatch
from l2l_core.devices import Device, Ledger, Ticket
from l2l_core.step.traffic import Lane
from l2l_core.strategies.allocation_meter import AllocationMeter
from l2l_core.trace import Trace

OffloadKey = tuple[str, int]  # kind of the offloading operation, and the stage


class _OffloadedStorage(NamedTuple):
    ref: weakref.ref[torch.UntypedStorage]
    key: int
    host: torch.Tensor


class StorageOffloader:
    """Storages on the host, and copies under way.

    Invariant: after `finish_sends`, an offloaded storage has no device bytes until `fetch`.

    Args:
        device: allocates host buffers and copies.
        host: ledger of host memory.
        meter: counts device bytes.
        trace: gets an event for each copy.

    Example:
        See `Offload`, whose plans it copies storages for.
    """

    def __init__(self, device: Device, host: Ledger, meter: AllocationMeter, trace: Trace) -> None:
        self._device, self.host, self._meter = device, host, meter
        self._d2h, self._h2d = Lane(device, trace, "d2h"), Lane(device, trace, "h2d")
        self._sending: list[tuple[Ticket, list[_OffloadedStorage]]] = []
        self._on_host: dict[OffloadKey, list[_OffloadedStorage]] = {}
        self._fetching: dict[OffloadKey, tuple[Ticket, list[_OffloadedStorage]]] = {}  # host buffers live until the end

    def send(self, offload_key: OffloadKey, keys: Iterable[int], layer: str, k: int) -> None:
        """Start to copy storages to the host; their device bytes are free after the next stage of compute."""
        found = [(key, storage) for key in keys if (storage := self._meter.storage(key)) is not None]
        with DisableTorchDispatch():  # the meter counts device memory only
            buffers = [self._device.host_empty(storage.nbytes(), torch.uint8) for _, storage in found]
        offloaded = [
            _OffloadedStorage(weakref.ref(storage), key, host)
            for (key, storage), host in zip(found, buffers, strict=True)
        ]
        self.host.book("stash", layer, sum(host.nbytes for host in buffers))
        copies = [(host, _as_bytes(storage)) for host, (_, storage) in zip(buffers, found, strict=True)]
        self._sending.append((self._d2h.send("stash", layer, copies, k), offloaded))
        self._on_host[offload_key] = offloaded

    def finish_sends(self) -> None:
        """Wait until all sends are complete, and empty their storages."""
        for ticket, offloaded in self._sending:
            ticket.join()
            for each in offloaded:
                if (storage := each.ref()) is not None:
                    storage.resize_(0)
                    self._meter.on_emptied(each.key)
        self._sending.clear()

    def fetch(self, key: OffloadKey, layer: str, k: int) -> None:
        """Start to copy the storages of one send back; their device bytes are in use from now on."""
        self.finish_sends()
        offloaded, copies = self._on_host.pop(key), []
        for each in offloaded:
            if (storage := each.ref()) is not None:
                storage.resize_(each.host.nbytes)
                self._meter.on_refilled(each.key, each.host.nbytes)
                copies.append((_as_bytes(storage), each.host))
        self._fetching[key] = self._h2d.send("fetch", layer, copies, k), offloaded
        self.host.release("stash", layer, sum(each.host.nbytes for each in offloaded))

    def wait(self, key: OffloadKey) -> None:
        """Make compute wait until the fetch of `key`, if any, is complete."""
        if key in self._fetching:
            ticket, _ = self._fetching.pop(key)
            ticket.wait()

    def abandon(self) -> None:
        """Wait for all copies of a failed step, and ignore their errors."""
        for ticket, _ in [*self._sending, *self._fetching.values()]:
            ticket.abandon()


def _as_bytes(storage: torch.UntypedStorage) -> torch.Tensor:
    with DisableTorchDispatch():
        return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
