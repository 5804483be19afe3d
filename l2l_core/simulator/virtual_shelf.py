"""A shelf on a virtual clock: `weight_source`, updates and buffer pools of `l2l_core/shelf`, in numbers.

prefetch ──▶ read ahead, as far as there is room ──▶ acquire                        weights, for loads
prefetch_update ──▶ read, as far as there is room ──▶ load_block ──▶ store_block    records, for updates: read and written
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
    """Sizes of a block in a file, in bytes, whole pages."""

    weights: int  # read by a load
    cast: int  # of the buffer for weights in the device's type; 0 if copies cast on the way
    record: int  # weights and state, read and written by an update
    buffer: int  # memory for a record


class VirtualPool:
    """Counts buffers as the shelf's pool does: released ones are kept for reuse at the same size."""

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes, self.peak_bytes = limit_bytes, 0
        self._total, self._free = 0, deque[int]()

    def acquire(self, nbytes: int) -> bool:
        """Acquire a buffer; return False if there is no room."""
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
        """Release a buffer."""
        self._free.append(nbytes)


class VirtualDiskBackend(VirtualLocalBackend):
    """Backend of one worker with weights and state in files."""

    reads_ahead = True

    def __init__(self, blocks: Mapping[str, BlockFileSize], disk: Disk, loads: int, records: int) -> None:
        self.events: list[Event] = []
        self.load_pool, self.record_pool = VirtualPool(loads), VirtualPool(records)
        self._blocks = blocks  # by key, shell included; each layer is one block
        self._reads = VirtualDiskLane("disk read", disk.read_bytes_per_s, self.events)
        self._writes = VirtualDiskLane("disk write", disk.write_bytes_per_s, self.events)
        self.stash = VirtualDiskStash(self._reads, self._writes)
        self._read_ahead: dict[str, float] = {}  # end of each read ahead
        self._acquired: set[str] = set()
        self._casting: list[tuple[float, int]] = []  # source buffers of casts: time of release, bytes
        self._update_queue: dict[str, float] = {}  # announced updates: time of the announcement
        self._writing: list[tuple[float, int]] = []  # buffers of records: time of release, bytes
        self._last_read_s = 0.0  # start of the last read of a record

    # -- loads ---------------------------------------------------------------------------------------------------------

    def prefetch(self, t: float, layers: Iterable[str]) -> None:
        wanted = list(layers)
        for layer in [layer for layer in self._read_ahead if layer not in wanted]:
            self._discard(t, layer)
        for layer in wanted:
            if layer not in self._read_ahead and (read_s := self._start_read(t, layer)) is not None:
                self._read_ahead[layer] = read_s

    def acquire(self, t: float, layer: str) -> float:
        read_s = self._read_ahead.pop(layer, None)
        if read_s is None:
            read_s = self._start_read(t, layer)
        while read_s is None:
            if self._read_ahead:
                t = self._discard(t, next(reversed(self._read_ahead)))
            else:
                assert self._casting, f"no room for {layer} in a pool of the minimum size"
                t = max(t, self._casting[0][0])
            read_s = self._start_read(t, layer)
        self._acquired.add(layer)
        return read_s

    def release(self, layer: str) -> None:
        if layer in self._acquired:
            self._acquired.remove(layer)
            self.load_pool.release(self._buffer_bytes(layer))

    def _start_read(self, t: float, layer: str) -> float | None:
        """Start to read a layer's weights; return the end, None without room."""
        while self._casting and self._casting[0][0] <= t:
            self.load_pool.release(heappop(self._casting)[1])
        block = self._blocks[layer]
        if not self.load_pool.acquire(block.weights):
            return None
        if block.cast and not self.load_pool.acquire(block.cast):
            self.load_pool.release(block.weights)
            return None
        read_s = self._reads.transfer(t, layer, block.weights, "read")
        if block.cast:
            heappush(self._casting, (read_s, block.weights))
        return read_s

    def _discard(self, t: float, layer: str) -> float:
        """Discard weights that were read ahead; return the time at which their buffer is free."""
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
        # Blocks are updated in the order of their announcement, so the release of every buffer in use is known
        start_s, nbytes = max(self._update_queue.pop(block), self._last_read_s), self._blocks[block].buffer
        while self._writing and self._writing[0][0] <= start_s:
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
