"""A shelf on disk on a virtual clock: `place.py`, `updates.py` and `buffer_pool.py` of `l2l_core/shelf`, in numbers.

expect ──▶ read ahead, as far as there is room ──▶ lend            weights, for loads
expect_update ──▶ read, as far as there is room ──▶ come ──▶ go    records, for updates: read, and written anew
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from heapq import heappop, heappush
from typing import NamedTuple

from l2l_core.shelf import PAGE, Disk
from l2l_core.simulator.virtual_lane import VirtualDiskLane
from l2l_core.simulator.virtual_stash import VirtualDiskStash
from l2l_core.simulator.virtual_workers import VirtualLocalBackend
from l2l_core.trace import Event


class BlockFileSize(NamedTuple):
    """A block in a file, in bytes, whole pages.

    Attributes:
        weights: that a load reads.
        cast: of the buffer in which a device gets them in another type; 0 where copies cast on the way.
        record: weights and state, that an update reads and writes.
        buffer: of memory for a record.
    """

    weights: int
    cast: int
    record: int
    buffer: int


class VirtualPool:
    """Counts buffers as `Pool` lends them: what comes back is kept for whoever wants one of the same size.

    Args:
        limit_bytes: of all buffers.

    Attributes:
        most: bytes that there were at once.
    """

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes, self.peak_bytes = limit_bytes, 0
        self._total, self._free = 0, deque[int]()

    def acquire(self, nbytes: int) -> bool:
        """Lend a buffer; tells whether there was room."""
        if nbytes in self._free:
            self._free.remove(nbytes)
            return True
        while self._free and self._total + PAGE + nbytes > self.limit_bytes:
            self._total -= self._free.popleft() + PAGE
        if self._total + PAGE + nbytes > self.limit_bytes:
            return False
        self._total += nbytes + PAGE
        self.peak_bytes = max(self.peak_bytes, self._total)
        return True

    def release(self, nbytes: int) -> None:
        """Take a buffer back."""
        self._free.append(nbytes)


class VirtualDiskBackend(VirtualLocalBackend):
    """Is the company of one worker whose weights and state are in files.

    Args:
        blocks: by key, the shell among them; each layer is one.
        disk: its figures.
        loads, records: bytes of the two pools.

    Attributes:
        loads, records: the pools.
        stash: in a file beside the records, if that is where it waits.
    """

    def __init__(self, blocks: Mapping[str, BlockFileSize], disk: Disk, loads: int, records: int) -> None:
        self.events = list[Event]()
        self.load_pool, self.record_pool = VirtualPool(loads), VirtualPool(records)
        self._blocks = blocks
        self._reads = VirtualDiskLane("disk read", disk.read_bytes_per_s, self.events)
        self._writes = VirtualDiskLane("disk write", disk.write_bytes_per_s, self.events)
        self.stash = VirtualDiskStash(self._reads, self._writes)
        self._read_ahead: dict[str, float] = {}  # when weights that are read ahead are there
        self._acquired: set[str] = set()
        self._casting: list[tuple[float, int]] = []  # buffers from which is cast, and when they come back
        self._update_queue: dict[str, float] = {}  # blocks to be updated, and since when that is known
        self._writing: list[tuple[float, int]] = []  # when buffers of records that are being written come back
        self._last_read_s = 0.0  # when the last record began to be read

    # -- loads ---------------------------------------------------------------------------------------------------------

    def prefetch(self, t: float, layers: Iterable[str]) -> None:
        wanted = list(layers)
        for layer in [layer for layer in self._read_ahead if layer not in wanted]:
            self._discard(t, layer)
        for layer in wanted:
            if layer not in self._read_ahead and (there_s := self._start_read(t, layer)) is not None:
                self._read_ahead[layer] = there_s

    def acquire(self, t: float, layer: str) -> float:
        there_s = self._read_ahead.pop(layer, None)
        if there_s is None:
            there_s = self._start_read(t, layer)
        while there_s is None:
            if self._read_ahead:
                t = self._discard(t, next(reversed(self._read_ahead)))
            else:
                assert self._casting, f"no room for {layer}, though the pool has its least"
                t = max(t, self._casting[0][0])
            there_s = self._start_read(t, layer)
        self._acquired.add(layer)
        return there_s

    def release(self, layer: str) -> None:
        if layer in self._acquired:
            self._acquired.remove(layer)
            self.load_pool.release(self._buffer_bytes(layer))

    def _start_read(self, t: float, layer: str) -> float | None:
        """Begin to read a layer's weights; None if there is no room."""
        while self._casting and self._casting[0][0] <= t:
            self.load_pool.release(heappop(self._casting)[1])
        block = self._blocks[layer]
        if not self.load_pool.acquire(block.weights):
            return None
        if block.cast and not self.load_pool.acquire(block.cast):
            self.load_pool.release(block.weights)
            return None
        there_s = self._reads.transfer(t, layer, block.weights, "read")
        if block.cast:
            heappush(self._casting, (there_s, block.weights))
        return there_s

    def _discard(self, t: float, layer: str) -> float:
        """Give up what is read ahead; gives when its buffer is free."""
        t = max(t, self._read_ahead.pop(layer))
        self.load_pool.release(self._buffer_bytes(layer))
        return t

    def _buffer_bytes(self, layer: str) -> int:
        block = self._blocks[layer]
        return block.cast or block.weights

    # -- updates -------------------------------------------------------------------------------------------------------

    def prefetch_update(self, t: float, block: str) -> None:
        self._update_queue.setdefault(block, t)

    def load_block(self, t: float, block: str) -> float:
        # Blocks come in the order in which they were expected, so all that may hold a buffer have gone, and it is known when
        start_s, nbytes = max(self._update_queue.pop(block), self._last_read_s), self._blocks[block].buffer
        while self._writing and (self._writing[0][0] <= start_s):
            self.record_pool.release(heappop(self._writing)[1])
        while not self.record_pool.acquire(nbytes):
            done_s, size = heappop(self._writing)
            self.record_pool.release(size)
            start_s = max(start_s, done_s)
        self._last_read_s = start_s
        return max(t, self._reads.transfer(start_s, block, self._blocks[block].record, "read"))

    def store_block(self, t: float, block: str) -> None:
        done_s = self._writes.transfer(t, block, self._blocks[block].record, "write")
        heappush(self._writing, (done_s, self._blocks[block].buffer))
