"""Buffers through which files pass: page-aligned, pinned where a GPU copies from them, and of so many bytes at most."""

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
    """Is memory for a record or its beginning.

    Attributes:
        flat: (nbytes,) uint8, whole pages on a page boundary.
        load: may still read it, though its owner has given it back.
    """

    flat: torch.Tensor
    load: Ticket | None = None


class BufferPool:
    """Lends buffers, and keeps those that come back for whoever wants one of the same size.

    Invariant: buffers that are lent and buffers that are kept take `limit_bytes` together at most.

    Args:
        limit_bytes: of all buffers.
        empty: makes host memory of so many elements of a type.
        host: gets the bytes booked.
        category: under which.
    """

    def __init__(
        self, limit_bytes: int, empty: Callable[[int, torch.dtype], torch.Tensor], host: Ledger, category: str
    ) -> None:
        self.limit_bytes, self._empty, self._host, self._category = limit_bytes, empty, host, category
        self._lock = threading.Lock()
        self._total = 0
        self._free: OrderedDict[PoolBuffer, int] = OrderedDict()  # the one that has been there longest comes first

    def acquire(self, nbytes: int) -> PoolBuffer | None:
        """Lend a buffer of so many bytes, whole pages; None if there is no room for it now."""
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
        """Take a buffer back; `load` may still be reading it."""
        buffer.load = load
        with self._lock:
            self._free[buffer] = len(buffer.flat)

    def close(self) -> None:
        """Let go of what is kept."""
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
