"""Which storages of a stash on the disk are in which buffer, and what has to be read: the rule, without bytes or time.

    leaves ──▶ buffer ──▶ written to its extent in the file
    wanted ◀── buffer ◀── read ahead, turns before it is wanted

A buffer keeps what it was filled with until it is taken for something else, and what is still in one is not read. Which buffer
is taken depends on the order of what is asked alone. So whoever knows that order knows all bytes: `stash.py` moves them by this
rule, and forecasts count them by it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Generic, NamedTuple, TypeVar

from l2l_core.devices import Spot
from l2l_core.shelf.direct import pages

BUFFERS = 6  # each for what moves at a turn: three that are read ahead, and three that are filled, written and reused
READ_AHEAD = BUFFERS // 2


class Extent(Spot):
    """Is a place in the file, of whole pages, and in a buffer, if its bytes are in one.

    Attributes:
        start: first byte in the file.
        buffer: that its bytes are in, None if in none.
        within: first byte there.
        written: the last write of it, as whoever writes knows it: it comes before any read.
    """

    __slots__ = ("buffer", "start", "within", "written")

    def __init__(self, nbytes: int, start: int) -> None:
        super().__init__(nbytes)
        self.start, self.within = start, 0
        self.buffer: Buffer | None = None
        self.written: Any = None

    @property
    def size(self) -> int:
        """Bytes in the file."""
        return pages(self.nbytes)


class Buffer:
    """Holds what moves at a turn.

    Attributes:
        extents: whose bytes are in it.
    """

    def __init__(self) -> None:
        self.extents: list[Extent] = []


B = TypeVar("B", bound=Buffer)


class Supply(ABC, Generic[B]):
    """Has the buffers."""

    @abstractmethod
    def new(self, nbytes: int) -> B:
        """Make one of so many bytes."""

    @abstractmethod
    def again(self, buffer: B, nbytes: int) -> B:
        """Make one ready for another use, of so many bytes: itself, or another one in its place. Nothing is in it any more."""


class Read(NamedTuple, Generic[B]):
    """What is to be read.

    Attributes:
        turn: that wants it, by number among those that were told of.
        extents: in the order in which they are in the file.
        buffer: to be filled.
    """

    turn: int
    extents: list[Extent]
    buffer: B


class Rotation(Generic[B]):
    """Takes the buffers in turn.

    Invariant: what is expected keeps its buffer.

    Args:
        supply: has the buffers.

    Attributes:
        file_bytes: that extents reach to, so far.
        buffers: the one that was taken longest ago comes first.
        most_bytes: the most that has moved at a turn, which is what a buffer has room for.
    """

    def __init__(self, supply: Supply[B]) -> None:
        self._supply = supply
        self.file_bytes = self.most_bytes = 0
        self.buffers: list[B] = []
        self._free: dict[int, list[int]] = {}  # places in the file by their bytes
        self._expected: set[Extent] = set()
        self._forgotten: deque[Extent] = deque()

    def free(self, nbytes: int) -> Extent | None:
        """Find a place in the file that was used before; None if there is none of that size."""
        self._settle()
        free = self._free.get(pages(nbytes))
        return Extent(nbytes, free.pop()) if free else None

    def further(self, nbytes: int) -> Extent:
        """Take a place after all others."""
        self.file_bytes += pages(nbytes)
        return Extent(nbytes, self.file_bytes - pages(nbytes))

    def fill(self, extents: Sequence[Extent], but: Iterable[Extent] = ()) -> B:
        """Take a buffer for the bytes of these; not one that holds what is expected, or any of `but`."""
        self.most_bytes = max(self.most_bytes, sum(extent.size for extent in extents))
        busy = {extent.buffer for extent in (*self._expected, *but)}
        idle = next((buffer for buffer in self.buffers if buffer not in busy), None)
        if len(self.buffers) >= BUFFERS and idle is not None:
            self.buffers.remove(idle)
            for extent in idle.extents:
                extent.buffer = None
            idle.extents.clear()
            buffer = self._supply.again(idle, self.most_bytes)
        else:
            buffer = self._supply.new(self.most_bytes)
        self.buffers.append(buffer)
        for extent in extents:
            if extent.buffer is not None:
                extent.buffer.extents.remove(extent)
            extent.buffer, extent.within = buffer, sum(each.size for each in buffer.extents)
            buffer.extents.append(extent)
        return buffer

    def expect(self, turns: Iterable[Sequence[Extent]]) -> Iterator[Read[B]]:
        """Go through what the next turns want, the next one first, as far as buffers go; gives what is to be read ahead."""
        self._settle()
        self._expected = set()
        for turn, extents in enumerate(turns):
            away = [extent for extent in extents if extent.buffer is None]
            pinned = {e.buffer for e in (*self._expected, *extents) if e.buffer is not None}
            if len(pinned) + bool(away) > READ_AHEAD:
                return
            self._expected.update(extents)
            if away:
                yield self._read(turn, away)

    def want(self, extents: Sequence[Extent]) -> Read[B] | None:
        """Have all of these in buffers; gives what is to be read for that now, if anything."""
        self._settle()
        away = [extent for extent in extents if extent.buffer is None]
        return self._read(0, away, extents) if away else None

    def _read(self, turn: int, away: Sequence[Extent], but: Iterable[Extent] = ()) -> Read[B]:
        away = sorted(away, key=lambda extent: extent.start)
        return Read(turn, away, self.fill(away, but))

    def forget(self, extent: Extent) -> None:
        """An extent is free again; any thread may say so, in the middle of anything."""
        self._forgotten.append(extent)

    def _settle(self) -> None:
        while self._forgotten:
            extent = self._forgotten.popleft()
            self._expected.discard(extent)
            if extent.buffer is not None:
                extent.buffer.extents.remove(extent)
                extent.buffer = None
            self._free.setdefault(extent.size, []).append(extent.start)
