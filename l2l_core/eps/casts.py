"""Masters in the type in which they travel, for devices whose copies cannot cast on the way.

A GPU's copy engine moves bytes. To load bfloat16 weights at 2 bytes per parameter, the cast happens on the host: once per
pass, on a thread of its own, in the order of the layers and ahead of their loads. The price is 2 bytes of pinned host
memory per parameter, and reading 4 and writing 2 per pass. Casting anew in every pass, and not after every update, means
that weights which somebody has changed between two steps are never missed; and backward, when the EPS is at work, finds
the casts done.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import torch

from l2l_core.devices import Device, Ledger, serial_thread
from l2l_core.eps.blocks import Block, Unit


class Wires:
    """Where loads read the weights of a block.

    Invariant: between `begin` and `end`, `source` gives the values that the master had at `begin`.

    Args:
        device: where the loads go, and what pins host memory.
        host: gets the bytes of the copies booked.
    """

    def __init__(self, device: Device, host: Ledger) -> None:
        self._device, self._host = device, host
        self._thread: ThreadPoolExecutor | None = None
        self._casts: dict[Block, Future[torch.Tensor]] = {}

    def begin(self, units: Sequence[Unit], dtype: torch.dtype) -> None:
        """Start to cast what a pass with weights of `dtype` will load, in the order of `units`."""
        self.end()
        if self._device.in_host_memory or dtype == torch.float32:
            return
        if self._thread is None:
            self._thread = serial_thread("wire", max(1, torch.get_num_threads() // 2))
        for block in dict.fromkeys(block for unit in units for block in unit.blocks):
            if block.wire is None or block.wire.dtype != dtype:
                block.wire = self._new_wire(block.master.numel(), dtype)
            self._casts[block] = self._thread.submit(block.wire.copy_, block.master)

    def source(self, block: Block) -> torch.Tensor:
        """What a load of `block` copies from, shape (numel,): the master, or its cast as soon as that is done."""
        cast = self._casts.get(block)
        return block.master if cast is None else cast.result()

    def end(self) -> None:
        """The pass is over: nothing reads masters for it any more."""
        casts, self._casts = self._casts, {}
        for cast in casts.values():
            cast.cancel()
        for cast in casts.values():
            if not cast.cancelled():
                cast.exception()

    def close(self) -> None:
        """Join the thread."""
        self.end()
        if self._thread is not None:
            self._thread.shutdown(wait=True)
            self._thread = None

    def _new_wire(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        wire = self._device.host_empty(numel, dtype)
        self._host.book("weights", "wire", wire.nbytes)
        weakref.finalize(wire, self._host.release, "weights", "wire", wire.nbytes)
        return wire
