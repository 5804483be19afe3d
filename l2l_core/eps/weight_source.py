"""Where a block's weights are while no layer computes with them, and how a load gets at them.

Masters lie in host memory. A GPU's copy engine moves bytes: to load bfloat16 weights at 2 bytes per parameter, the cast
happens on the host, once per pass, on a thread of its own, in the order of the layers and ahead of their loads. The price
is 2 bytes of pinned host memory per parameter, and reading 4 and writing 2 per pass. Casting anew in every pass, and not
after every update, means that weights which somebody has changed between two steps are never missed; and backward, when
the EPS is at work, finds the casts done.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Protocol

import torch

from l2l_core.devices import Device, Ledger, Ticket, serial_executor
from l2l_core.eps.blocks import Block, Unit
from l2l_core.trace import Trace


class WeightSource(Protocol):
    """Knows where weights are. From `begin` to `end` is one pass, in which a block is lent before every load of it."""

    def begin(self, units: Sequence[Unit], dtype: torch.dtype, trace: Trace) -> None:
        """Begin a pass that will load weights of these units, in about this order, as `dtype`; `trace` gets its events."""

    def prefetch(self, units: Sequence[Unit]) -> None:
        """Hear which units will probably be lent next, and in which order, so that what takes time can begin."""

    def acquire(self, block: Block) -> torch.Tensor:
        """Give what a load of the block copies from, (numel,), on the host: its values as they were at `begin`."""

    def release(self, block: Block, load: Ticket | None) -> None:
        """Take back what was lent: nobody will begin to read it any more.

        Args:
            block: whose weights they are.
            load: of the block, which compute has waited for. A GPU may still be at it: who writes there abandons it first.
        """

    def end(self) -> None:
        """End the pass, whatever happened in it."""

    def close(self) -> None:
        """Give up threads and files."""


class MemoryWeightSource:
    """Lends masters in memory, as they are, or as casts of them to devices whose copies cannot cast on the way.

    Args:
        device: where the loads go, and what pins host memory.
        host: gets the bytes of the casts booked.
    """

    def __init__(self, device: Device, host: Ledger) -> None:
        self._device, self._host = device, host
        self._thread: ThreadPoolExecutor | None = None
        self._casts: dict[Block, Future[torch.Tensor]] = {}

    def begin(self, units: Sequence[Unit], dtype: torch.dtype, trace: Trace) -> None:
        self.end()
        blocks = dict.fromkeys(block for unit in units for block in unit.blocks if block.master.dtype != dtype)
        if self._device.in_host_memory or not blocks:
            return
        if self._thread is None:
            self._thread = serial_executor("wire", max(1, torch.get_num_threads() // 2))
        for block in blocks:
            if block.cast is None or block.cast.dtype != dtype:
                block.cast = self._new_cast(block.master.numel(), dtype)
            self._casts[block] = self._thread.submit(self._cast, block)

    def _cast(self, block: Block) -> torch.Tensor:
        assert block.cast is not None
        return block.cast.copy_(block.master)

    def prefetch(self, units: Sequence[Unit]) -> None:
        pass

    def acquire(self, block: Block) -> torch.Tensor:
        cast = self._casts.get(block)
        return block.master if cast is None else cast.result()

    def release(self, block: Block, load: Ticket | None) -> None:
        pass

    def end(self) -> None:
        casts, self._casts = self._casts, {}
        for cast in casts.values():  # all of them first: while one is waited for, the next must not begin
            cast.cancel()
        for cast in casts.values():
            if not cast.cancelled():
                cast.exception()  # waits without raising: who wanted this cast has had its error

    def close(self) -> None:
        self.end()
        if self._thread is not None:
            self._thread.shutdown(wait=True)
            self._thread = None

    def _new_cast(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        cast = self._device.host_empty(numel, dtype)
        self._host.book("weights", "wire", cast.nbytes)
        weakref.finalize(cast, self._host.release, "weights", "wire", cast.nbytes)
        return cast
