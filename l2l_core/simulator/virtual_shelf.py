"""A shelf on disk on a virtual clock: `place.py`, `updates.py` and `pool.py` of `l2l_core/shelf`, in numbers.

expect ──▶ read ahead, as far as there is room ──▶ lend            weights, for loads
expect_update ──▶ read, as far as there is room ──▶ come ──▶ go    records, for updates: read, and written anew
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from heapq import heappop, heappush
from typing import NamedTuple

from l2l_core.shelf import PAGE, Disk
from l2l_core.simulator.virtual_crew import Alone
from l2l_core.simulator.virtual_lane import DiskLane
from l2l_core.simulator.virtual_stash import InFile
from l2l_core.trace import Event


class Filed(NamedTuple):
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
        self.limit_bytes, self.most = limit_bytes, 0
        self._total, self._kept = 0, deque[int]()

    def take(self, nbytes: int) -> bool:
        """Lend a buffer; tells whether there was room."""
        if nbytes in self._kept:
            self._kept.remove(nbytes)
            return True
        while self._kept and self._total + PAGE + nbytes > self.limit_bytes:
            self._total -= self._kept.popleft() + PAGE
        if self._total + PAGE + nbytes > self.limit_bytes:
            return False
        self._total += nbytes + PAGE
        self.most = max(self.most, self._total)
        return True

    def give_back(self, nbytes: int) -> None:
        """Take a buffer back."""
        self._kept.append(nbytes)


class OnShelf(Alone):
    """Is the company of one worker whose weights and state are in files.

    Args:
        blocks: by key, the shell among them; each layer is one.
        disk: its figures.
        loads, records: bytes of the two pools.

    Attributes:
        loads, records: the pools.
        stash: in a file beside the records, if that is where it waits.
    """

    def __init__(self, blocks: Mapping[str, Filed], disk: Disk, loads: int, records: int) -> None:
        self.events = list[Event]()
        self.loads, self.records = VirtualPool(loads), VirtualPool(records)
        self._blocks = blocks
        self._reads = DiskLane("disk read", disk.read_bytes_per_s, self.events)
        self._writes = DiskLane("disk write", disk.write_bytes_per_s, self.events)
        self.stash = InFile(self._reads, self._writes)
        self._coming: dict[str, float] = {}  # when weights that are read ahead are there
        self._lent: set[str] = set()
        self._raw: list[tuple[float, int]] = []  # buffers from which is cast, and when they come back
        self._wanted: dict[str, float] = {}  # blocks to be updated, and since when that is known
        self._written: list[tuple[float, int]] = []  # when buffers of records that are being written come back
        self._read_s = 0.0  # when the last record began to be read

    # -- loads ---------------------------------------------------------------------------------------------------------

    def expect(self, t: float, layers: Iterable[str]) -> None:
        wanted = list(layers)
        for layer in [layer for layer in self._coming if layer not in wanted]:
            self._forget(t, layer)
        for layer in wanted:
            if layer not in self._coming and (there_s := self._start(t, layer)) is not None:
                self._coming[layer] = there_s

    def lend(self, t: float, layer: str) -> float:
        there_s = self._coming.pop(layer, None)
        if there_s is None:
            there_s = self._start(t, layer)
        while there_s is None:
            if self._coming:
                t = self._forget(t, next(reversed(self._coming)))
            else:
                assert self._raw, f"no room for {layer}, though the pool has its least"
                t = max(t, self._raw[0][0])
            there_s = self._start(t, layer)
        self._lent.add(layer)
        return there_s

    def take_back(self, layer: str) -> None:
        if layer in self._lent:
            self._lent.remove(layer)
            self.loads.give_back(self._lends(layer))

    def _start(self, t: float, layer: str) -> float | None:
        """Begin to read a layer's weights; None if there is no room."""
        while self._raw and self._raw[0][0] <= t:
            self.loads.give_back(heappop(self._raw)[1])
        block = self._blocks[layer]
        if not self.loads.take(block.weights):
            return None
        if block.cast and not self.loads.take(block.cast):
            self.loads.give_back(block.weights)
            return None
        there_s = self._reads.move(t, layer, block.weights, "read")
        if block.cast:
            heappush(self._raw, (there_s, block.weights))
        return there_s

    def _forget(self, t: float, layer: str) -> float:
        """Give up what is read ahead; gives when its buffer is free."""
        t = max(t, self._coming.pop(layer))
        self.loads.give_back(self._lends(layer))
        return t

    def _lends(self, layer: str) -> int:
        block = self._blocks[layer]
        return block.cast or block.weights

    # -- updates -------------------------------------------------------------------------------------------------------

    def expect_update(self, t: float, block: str) -> None:
        self._wanted.setdefault(block, t)

    def come(self, t: float, block: str) -> float:
        # Blocks come in the order in which they were expected, so all that may hold a buffer have gone, and it is known when
        start_s, nbytes = max(self._wanted.pop(block), self._read_s), self._blocks[block].buffer
        while self._written and (self._written[0][0] <= start_s):
            self.records.give_back(heappop(self._written)[1])
        while not self.records.take(nbytes):
            done_s, size = heappop(self._written)
            self.records.give_back(size)
            start_s = max(start_s, done_s)
        self._read_s = start_s
        return max(t, self._reads.move(start_s, block, self._blocks[block].record, "read"))

    def go(self, t: float, block: str) -> None:
        done_s = self._writes.move(t, block, self._blocks[block].record, "write")
        heappush(self._written, (done_s, self._blocks[block].buffer))
