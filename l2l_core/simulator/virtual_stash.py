"""Stash stores on a virtual clock: host memory, which takes no time, or a file, by `buffer_rotation.py`."""

from __future__ import annotations

import math
from collections.abc import Sequence

from l2l_core.shelf import PAGE, READ_AHEAD, BufferRotation, ExtentRead, FileExtent, StashBuffer
from l2l_core.simulator.step_costs import StashMoves, TurnCost
from l2l_core.simulator.virtual_lane import VirtualDiskLane

LaterTurn = tuple[str, int, TurnCost]  # layer and visit of a turn, and its costs


class VirtualStashStore:
    """A stash in host memory. Methods that return a time delay compute until then."""

    prefetch_turns = 0  # turns that `prefetch` wants, beyond the one being fetched

    def targets(self, k: int, moves: StashMoves) -> float:
        """Return the time at which buffers for the offloaded storages are free."""
        return -math.inf

    def write_started(self, t: float, k: int, visit: int, moves: StashMoves) -> None:
        """Record that they are copied into the buffers at `t`."""

    def sources(self, t: float, layer: str, k: int, visit: int, numbers: Sequence[int]) -> float:
        """Return the time at which storages of micro-batch `k` are in buffers."""
        return -math.inf

    def read_started(self, t: float, k: int, numbers: Sequence[int]) -> None:
        """Record that they are copied from the buffers at `t`."""

    def prefetch(self, t: float, current: TurnCost, later: Sequence[LaterTurn]) -> float:
        """Start reads for turns after the next one; turn `current` begins at `t`."""
        return -math.inf


class _VirtualBuffer(StashBuffer):
    """Times of a buffer: end of its last fill, of the copy from it, and its release."""

    def __init__(self, nbytes: int) -> None:
        super().__init__()
        self.nbytes, self.is_read = nbytes, False
        self.free_s = self.done_s = self.copied_s = -math.inf


class VirtualDiskStash(VirtualStashStore):
    """A stash in a scratch file."""

    prefetch_turns = READ_AHEAD

    def __init__(self, reads: VirtualDiskLane, writes: VirtualDiskLane) -> None:
        self._reads, self._writes = reads, writes
        self.buffer_bytes = 0
        self._rotation = BufferRotation(self._renew)
        self._extents: dict[tuple[int, int], FileExtent] = {}  # by micro-batch and number

    @property
    def file_bytes(self) -> int:
        """Minimum size of the file."""
        return self._rotation.file_bytes

    def targets(self, k: int, moves: StashMoves) -> float:
        for extent in self._offloaded(k, moves.freed):
            self._rotation.release(extent)
        for number, nbytes in moves.offloaded:
            if (k, number) not in self._extents:
                self._extents[k, number] = self._rotation.allocate(nbytes)
        return self._rotation.assign_buffer(self._offloading(k, moves)).free_s if moves.offloaded else -math.inf

    def write_started(self, t: float, k: int, visit: int, moves: StashMoves) -> None:
        extents = self._offloading(k, moves)
        buffer = _buffer_of(extents[0])
        buffer.done_s = self._writes.transfer(t, "", _total_size(extents), "stash", k, visit)
        for extent in extents:
            extent.last_write = buffer.done_s

    def sources(self, t: float, layer: str, k: int, visit: int, numbers: Sequence[int]) -> float:
        extents = self._offloaded(k, numbers)
        if (read := self._rotation.plan_fetch(extents)) is not None:
            self._start_read(t, read, layer, k, visit)
        return max((buffer.done_s for buffer in map(_buffer_of, extents) if buffer.is_read), default=-math.inf)

    def read_started(self, t: float, k: int, numbers: Sequence[int]) -> None:
        for extent in self._offloaded(k, numbers):
            _buffer_of(extent).copied_s = t

    def prefetch(self, t: float, current: TurnCost, later: Sequence[LaterTurn]) -> float:
        until_s, resident = -math.inf, {(current.k, number) for number in _moves_of(current).fetched}
        storages = [[(turn.k, number) for number in _moves_of(turn).fetched] for _, _, turn in later]
        extents = [[self._extents[n] for n in each if n in self._extents and n not in resident] for each in storages]
        for read in self._rotation.plan_prefetch(extents):
            layer, visit, turn = later[read.turn]
            until_s = max(until_s, read.buffer.free_s)
            self._start_read(max(t, until_s), read, layer, turn.k, visit)
        return until_s

    def _renew(self, buffer: _VirtualBuffer | None, nbytes: int) -> _VirtualBuffer:
        self.buffer_bytes += nbytes + PAGE if buffer is None else nbytes - buffer.nbytes
        new = _VirtualBuffer(nbytes)
        if buffer is not None:
            new.free_s = max(buffer.done_s, buffer.copied_s)
        return new

    def _start_read(self, t: float, read: ExtentRead[_VirtualBuffer], layer: str, k: int, visit: int) -> None:
        start_s = max(t, read.buffer.free_s, *(extent.last_write for extent in read.extents))
        read.buffer.done_s = self._reads.transfer(start_s, layer, _total_size(read.extents), "fetch", k, visit)
        read.buffer.is_read = True

    def _offloaded(self, k: int, numbers: Sequence[int]) -> list[FileExtent]:
        """Return the extents of offloaded storages; with fewer micro-batches than rehearsed, others are on the device."""
        return [self._extents[k, number] for number in numbers if (k, number) in self._extents]

    def _offloading(self, k: int, moves: StashMoves) -> list[FileExtent]:
        return [self._extents[k, number] for number, _ in moves.offloaded]


def _moves_of(turn: TurnCost) -> StashMoves:
    assert turn.moves is not None, "a stash on disk needs the moves of single storages"
    return turn.moves


def _buffer_of(extent: FileExtent) -> _VirtualBuffer:
    assert isinstance(extent.buffer, _VirtualBuffer), "an extent without a buffer"
    return extent.buffer


def _total_size(extents: Sequence[FileExtent]) -> int:
    return sum(extent.size for extent in extents)
