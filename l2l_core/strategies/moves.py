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
from l2l_core.strategies.meter import Meter
from l2l_core.trace import Trace

Key = tuple[str, int]  # kind of the operation that sent it out, and the stage


class Moves:
    """What is away, and what is on its way.

    Invariant: after `settle`, a storage that was sent out has no device bytes until `bring`.

    Args:
        device: gives host buffers, and does the copying.
        host: ledger of host memory.
        meter: of the device's bytes.
        trace: gets an event per copy.
    """

    def __init__(self, device: Device, host: Ledger, meter: Meter, trace: Trace) -> None:
        self._device, self._host, self._meter = device, host, meter
        self._out, self._in = Lane(device, trace, "d2h"), Lane(device, trace, "h2d")
        self._leaving: list[tuple[Ticket, list[_Away]]] = []
        self._away: dict[Key, list[_Away]] = {}
        self._coming: dict[Key, tuple[Ticket, list[_Away]]] = {}
        self.host_bytes = 0

    def send(self, what: Key, storages: Iterable[int], layer: str, k: int) -> None:
        """Start to copy storages to the host; their device bytes are free after the next stage of compute."""
        found = [(key, storage) for key in storages if (storage := self._meter.storage(key)) is not None]
        with DisableTorchDispatch():  # the meter counts what is on the device
            room = [self._device.host_empty(storage.nbytes(), torch.uint8) for _, storage in found]
        gone = [_Away(weakref.ref(storage), key, host) for (key, storage), host in zip(found, room, strict=True)]
        nbytes = sum(each.host.nbytes for each in gone)
        self._host.book("stash", layer, nbytes)
        self.host_bytes += nbytes
        copies = [(each.host, _bytes(storage)) for each, (_, storage) in zip(gone, found, strict=True)]
        self._leaving.append((self._out.send("stash", layer, copies, k), gone))
        self._away[what] = gone

    def settle(self) -> None:
        """A stage has run: what has left meanwhile, or leaves now, is no longer on the device."""
        for ticket, gone in self._leaving:
            ticket.join()
            for each in gone:
                if (storage := each.ref()) is not None:
                    storage.resize_(0)
                    self._meter.left(each.key)
        self._leaving.clear()

    def bring(self, key: Key, layer: str, k: int) -> None:
        """Start to copy back what `key` has sent out; its device bytes are in use from now on."""
        self.settle()
        gone, copies = self._away.pop(key), []
        for each in gone:
            if (storage := each.ref()) is not None:
                storage.resize_(each.host.nbytes)
                self._meter.comes(each.key, each.host.nbytes)
                copies.append((_bytes(storage), each.host))
        self._coming[key] = self._in.send("fetch", layer, copies, k), gone
        self._free(gone, layer)

    def _free(self, gone: Collection[_Away], layer: str) -> None:
        nbytes = sum(each.host.nbytes for each in gone)
        self._host.release("stash", layer, nbytes)
        self.host_bytes -= nbytes

    def wait(self, key: Key) -> None:
        """Let compute go on only when what `key` has sent out is back."""
        if key in self._coming:
            ticket, _ = self._coming.pop(key)
            ticket.wait()

    def abandon(self) -> None:
        """A step has failed: wait for every copy. The host's ledger is the step's own, and goes with it."""
        for ticket, _ in [*self._leaving, *self._coming.values()]:
            ticket.abandon()


class _Away:
    __slots__ = ("host", "key", "ref")

    def __init__(self, ref: weakref.ref[torch.UntypedStorage], key: int, host: torch.Tensor) -> None:
        self.ref, self.key, self.host = ref, key, host


def _bytes(storage: torch.UntypedStorage) -> torch.Tensor:
    with DisableTorchDispatch():
        return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
