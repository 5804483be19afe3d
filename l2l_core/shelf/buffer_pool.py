"""Pool of page-aligned buffers for file contents, pinned where a GPU copies from them, with a limit in bytes."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

import torch

from l2l_core.devices import Ledger, Ticket
from l2l_core.shelf.direct_io import PAGE, page_aligned


@dataclass(eq=False, slots=True)
class PoolBuffer:
    """Memory for a record or its beginning.

    Attributes:
        flat: (nbytes,) uint8, whole pages on a page boundary.
        load: load that may still read the buffer after its release.
    """

    flat: torch.Tensor
    load: Ticket | None = None


class BufferPool:
    """Buffers that are reused by size.

    Invariant: acquired and free buffers together take at most `limit_bytes`.

    Args:
        limit_bytes: limit for all buffers.
        empty: allocates host memory with the given number of elements and type.
        host: ledger for the bytes.
        category: category in the ledger.
    """

    def __init__(
        self, limit_bytes: int, empty: Callable[[int, torch.dtype], torch.Tensor], host: Ledger, category: str
    ) -> None:
        self.limit_bytes, self._empty, self._host, self._category = limit_bytes, empty, host, category
        self._lock = threading.Lock()
        self._total = 0
        self._free: OrderedDict[PoolBuffer, int] = OrderedDict()  # the oldest first

    def acquire(self, nbytes: int) -> PoolBuffer | None:
        """Return a buffer of `nbytes`, whole pages, or None if the limit leaves no room now."""
        with self._lock:
            buffer = next((kept for kept, size in self._free.items() if size == nbytes), None)
            if buffer is not None:
                del self._free[buffer]
            else:
                while self._free and self._total + PAGE + nbytes > self.limit_bytes:
                    self._drop(self._free.popitem(last=False)[0])
                if self._total + PAGE + nbytes > self.limit_bytes:
                    return None
                buffer = self._new(nbytes)
        if buffer.load is not None:
            buffer.load.abandon()
            buffer.load = None
        return buffer

    def release(self, buffer: PoolBuffer, load: Ticket | None = None) -> None:
        """Return a buffer to the pool; `load` may still read it."""
        buffer.load = load
        with self._lock:
            self._free[buffer] = len(buffer.flat)

    def close(self) -> None:
        """Free all buffers in the pool."""
        with self._lock:
            while self._free:
                self._drop(self._free.popitem()[0])

    def _new(self, nbytes: int) -> PoolBuffer:
        raw = self._empty(nbytes + PAGE, torch.uint8)
        self._host.book(self._category, "shelf", nbytes + PAGE)
        self._total += nbytes + PAGE
        return PoolBuffer(page_aligned(raw, nbytes))

    def _drop(self, buffer: PoolBuffer) -> None:
        if buffer.load is not None:
            buffer.load.abandon()
        self._host.release(self._category, "shelf", len(buffer.flat) + PAGE)
        self._total -= len(buffer.flat) + PAGE
