"""Where a stash waits, on a virtual clock: host memory, which takes no time, or a file, by the rule of `rotation.py`."""

from __future__ import annotations

import math
from collections.abc import Sequence

from l2l_core.shelf import PAGE, READ_AHEAD, Buffer, Extent, Read, Rotation, Supply
from l2l_core.simulator.costs import Moves, Stay, TurnCost
from l2l_core.simulator.virtual_lane import DiskLane


class InMemory:
    """Lets storages wait in host memory. What answers with a time says until when compute must wait."""

    def targets(self, k: int, moves: Moves) -> float:
        """Find where what leaves can be copied to."""
        return -math.inf

    def left(self, t: float, k: int, visit: int, moves: Moves) -> None:
        """It has been copied there at `t`."""

    def sources(self, t: float, layer: str, k: int, visit: int, wanted: Sequence[int]) -> float:
        """At `t` storages of micro-batch `k` are wanted."""
        return -math.inf

    def lent(self, t: float, k: int, wanted: Sequence[int]) -> None:
        """They have been copied from there at `t`."""

    def expect(self, t: float, stay: Stay, at: int, following: Sequence[Stay]) -> float:
        """At `t` a turn begins, the one at that place in its stay; others follow."""
        return -math.inf


class _Held(Buffer):
    """Is a buffer on the clock: when what fills or empties it is done, and the copy from it, and when it is free again."""

    def __init__(self, nbytes: int) -> None:
        super().__init__()
        self.nbytes, self.is_read = nbytes, False
        self.free_s = self.done_s = self.lent_s = -math.inf


class _Counted(Supply[_Held]):
    """Counts the bytes of buffers."""

    def __init__(self) -> None:
        self.nbytes = 0

    def new(self, nbytes: int) -> _Held:
        self.nbytes += nbytes + PAGE
        return _Held(nbytes)

    def again(self, buffer: _Held, nbytes: int) -> _Held:
        self.nbytes += nbytes - buffer.nbytes
        other = _Held(nbytes)
        other.free_s = max(buffer.done_s, buffer.lent_s)
        return other


class InFile(InMemory):
    """Lets them wait in a scratch file.

    Args:
        reads, writes: lanes of the disk.
    """

    def __init__(self, reads: DiskLane, writes: DiskLane) -> None:
        self._reads, self._writes = reads, writes
        self._supply = _Counted()
        self._rotation = Rotation(self._supply)
        self._extents: dict[tuple[int, int], Extent] = {}  # by micro-batch and number

    @property
    def buffer_bytes(self) -> int:
        """Host memory of all buffers, which stay as long as the pass does."""
        return self._supply.nbytes

    @property
    def file_bytes(self) -> int:
        """That the file must have at least."""
        return self._rotation.file_bytes

    def targets(self, k: int, moves: Moves) -> float:
        for extent in self._away(k, moves.gone):
            self._rotation.forget(extent)
        for number, nbytes in moves.left:
            if (k, number) not in self._extents:
                found = self._rotation.free(nbytes)
                self._extents[k, number] = self._rotation.further(nbytes) if found is None else found
        return self._rotation.fill(self._left(k, moves)).free_s if moves.left else -math.inf

    def left(self, t: float, k: int, visit: int, moves: Moves) -> None:
        extents = self._left(k, moves)
        buffer = _buffer_of(extents[0])
        buffer.done_s = self._writes.move(t, "", _size(extents), "stash", k, visit)
        for extent in extents:
            extent.written = buffer.done_s

    def sources(self, t: float, layer: str, k: int, visit: int, wanted: Sequence[int]) -> float:
        extents = self._away(k, wanted)
        if (read := self._rotation.want(extents)) is not None:
            self._read(t, read, layer, k, visit)
        return max((buffer.done_s for buffer in map(_buffer_of, extents) if buffer.is_read), default=-math.inf)

    def lent(self, t: float, k: int, wanted: Sequence[int]) -> None:
        for extent in self._away(k, wanted):
            _buffer_of(extent).lent_s = t

    def expect(self, t: float, stay: Stay, at: int, following: Sequence[Stay]) -> float:
        turns, until_s = _foreseen(stay, at, following), -math.inf
        here = stay.turns[at]
        resident = {(here.k, number) for number in _moves_of(here).fetched}
        wanted = [[(turn.k, number) for number in _moves_of(turn).fetched] for _, turn in turns]
        known = [[self._extents[n] for n in names if n in self._extents and n not in resident] for names in wanted]
        for read in self._rotation.expect(known):
            there, turn = turns[read.turn]
            until_s = max(until_s, read.buffer.free_s)
            self._read(max(t, until_s), read, there.layer, turn.k, there.visit)
        return until_s

    def _read(self, t: float, read: Read[_Held], layer: str, k: int, visit: int) -> None:
        start_s = max(t, read.buffer.free_s, *(extent.written for extent in read.extents))
        read.buffer.done_s = self._reads.move(start_s, layer, _size(read.extents), "fetch", k, visit)
        read.buffer.is_read = True

    def _away(self, k: int, numbers: Sequence[int]) -> list[Extent]:
        """What has not left yet is on the device: fewer micro-batches than were rehearsed may want it before it leaves."""
        return [self._extents[k, number] for number in numbers if (k, number) in self._extents]

    def _left(self, k: int, moves: Moves) -> list[Extent]:
        return [self._extents[k, number] for number, _ in moves.left]


def _foreseen(stay: Stay, at: int, following: Sequence[Stay]) -> list[tuple[Stay, TurnCost]]:
    """List the turns after the next one, as the loop knows them: see `Order.in_turn`, and `TrainLoop.train` for backward."""
    here = [(stay, turn) for turn in stay.turns[at + 1 : at + 2 + READ_AHEAD]]
    if not stay.has("forward"):
        here += [(each, turn) for each in following[: 1 + READ_AHEAD] for turn in each.turns]
        return here[1 : 1 + READ_AHEAD]
    there: list[tuple[Stay, TurnCost]] = []
    if following and following[0].has("forward"):  # others have been here and wait there
        there = [(following[0], turn) for turn in following[0].turns[: min(at, 1 + READ_AHEAD)]]
    return (here + there)[1 : 1 + READ_AHEAD]


def _moves_of(turn: TurnCost) -> Moves:
    assert turn.moves is not None, "a stash on the disk is planned by storages"
    return turn.moves


def _buffer_of(extent: Extent) -> _Held:
    assert isinstance(extent.buffer, _Held), "an extent is in no buffer"
    return extent.buffer


def _size(extents: Sequence[Extent]) -> int:
    return sum(extent.size for extent in extents)
