"""Sources of weights for loads: host buffers with a block's weights in the dtype of the load.

Masters are in host memory. A GPU's copy engine cannot cast: to load bfloat16 weights at 2 bytes per parameter, the host casts
them once per pass, on a separate thread, in the order of the layers and ahead of their loads. This costs 2 bytes of pinned host
memory per parameter, and 4 bytes read and 2 written per pass. A cast per pass, rather than per update, includes weights that were
changed between steps, and is done before backward, when the EPS is busy.
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
    """Lends weights for loads. One pass lasts from `begin` to `end`; a block is acquired before each load."""

    def begin(self, units: Sequence[Unit], dtype: torch.dtype, trace: Trace) -> None:
        """Begin a pass that will load these units, in about this order, as `dtype`; events are added to `trace`."""
        ...

    def prefetch(self, units: Sequence[Unit]) -> None:
        """Announce the units that will probably be acquired next, in order."""
        ...

    def acquire(self, block: Block) -> torch.Tensor:
        """Return a host buffer, (numel,), with the block's weights as of `begin`."""
        ...

    def release(self, block: Block, load: Ticket | None) -> None:
        """Return the buffer of a block, after compute has waited for `load`.

        A GPU may still be reading: abandon the ticket before writing to the buffer.
        """
        ...

    def end(self) -> None:
        """End the pass, also after an error."""
        ...

    def close(self) -> None:
        """Release threads and files."""
        ...


class MemoryWeightSource:
    """Lends masters in memory, or casts of them (booked in the ledger `host`) for devices whose copies cannot cast."""

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
            self._casts[block] = self._thread.submit(block.cast.copy_, block.master)

    def prefetch(self, units: Sequence[Unit]) -> None:
        pass

    def acquire(self, block: Block) -> torch.Tensor:
        cast = self._casts.get(block)
        return block.master if cast is None else cast.result()

    def release(self, block: Block, load: Ticket | None) -> None:
        pass

    def end(self) -> None:
        casts, self._casts = self._casts, {}
        for cast in casts.values():  # all before the first wait, during which the next would begin
            cast.cancel()
        for cast in casts.values():
            if not cast.cancelled():
                cast.exception()  # waits; `acquire` has raised the error

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
