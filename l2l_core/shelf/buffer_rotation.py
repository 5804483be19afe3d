"""Which storages of a stash on the disk are in which buffer, and what has to be read: the rule, without bytes or time.

    leaves ──▶ buffer ──▶ written to its extent in the file
    wanted ◀── buffer ◀── read ahead, turns before it is wanted

A buffer keeps what it was filled with until it is taken for something else, and what is still in one is not read. Which buffer
is taken depends on the order of what is asked alone. So whoever knows that order knows all bytes: `disk_stash.py` moves them by this
rule, and forecasts count them by it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Generic, NamedTuple, TypeVar

from l2l_core.devices import StashSlot
from l2l_core.shelf.direct_io import round_to_pages

BUFFERS = 6  # each for what moves at a turn: three that are read ahead, and three that are filled, written and reused
READ_AHEAD = BUFFERS // 2


class FileExtent(StashSlot):
    """Is a place in the file, of whole pages, and in a buffer, if its bytes are in one.

    Attributes:
        start: first byte in the file.
        buffer: that its bytes are in, None if in none.
        within: first byte there.
        written: the last write of it, as whoever writes knows it: it comes before any read.
    """

    __slots__ = ("buffer", "buffer_offset", "file_offset", "last_write")

    def __init__(self, nbytes: int, start: int) -> None:
        super().__init__(nbytes)
        self.file_offset, self.buffer_offset = start, 0
        self.buffer: StashBuffer | None = None
        self.last_write: Any = None

    @property
    def size(self) -> int:
        """Bytes in the file."""
        return round_to_pages(self.nbytes)


class StashBuffer:
    """Holds what moves at a turn.

    Attributes:
        extents: whose bytes are in it.
    """

    def __init__(self) -> None:
        self.extents: list[FileExtent] = []


B = TypeVar("B", bound=StashBuffer)


class BufferSupplier(ABC, Generic[B]):
    """Has the buffers."""

    @abstractmethod
    def create(self, nbytes: int) -> B:
        """Make one of so many bytes."""

    @abstractmethod
    def reuse(self, buffer: B, nbytes: int) -> B:
        """Make one ready for another use, of so many bytes: itself, or another one in its place. Nothing is in it any more."""


class ExtentRead(NamedTuple, Generic[B]):
    """What is to be read.

    Attributes:
        turn: that wants it, by number among those that were told of.
        extents: in the order in which they are in the file.
        buffer: to be filled.
    """

    turn: int
    extents: list[FileExtent]
    buffer: B


class BufferRotation(Generic[B]):
    """Takes the buffers in turn.

    Invariant: what is expected keeps its buffer.

    Args:
        supply: has the buffers.

    Attributes:
        file_bytes: that extents reach to, so far.
        buffers: the one that was taken longest ago comes first.
        most_bytes: the most that has moved at a turn, which is what a buffer has room for.
    """

    def __init__(self, supplier: BufferSupplier[B]) -> None:
        self._supplier = supplier
        self.file_bytes = self.buffer_bytes = 0
        self.buffers: list[B] = []
        self._free: dict[int, list[int]] = {}  # places in the file by their bytes
        self._expected: set[FileExtent] = set()
        self._freed: deque[FileExtent] = deque()

    def reuse_extent(self, nbytes: int) -> FileExtent | None:
        """Find a place in the file that was used before; None if there is none of that size."""
        self._reclaim()
        free = self._free.get(round_to_pages(nbytes))
        return FileExtent(nbytes, free.pop()) if free else None

    def append_extent(self, nbytes: int) -> FileExtent:
        """Take a place after all others."""
        self.file_bytes += round_to_pages(nbytes)
        return FileExtent(nbytes, self.file_bytes - round_to_pages(nbytes))

    def assign_buffer(self, extents: Sequence[FileExtent], excluded: Iterable[FileExtent] = ()) -> B:
        """Take a buffer for the bytes of these; not one that holds what is expected, or any of `but`."""
        self.buffer_bytes = max(self.buffer_bytes, sum(extent.size for extent in extents))
        busy = {extent.buffer for extent in (*self._expected, *excluded)}
        idle = next((buffer for buffer in self.buffers if buffer not in busy), None)
        if len(self.buffers) >= BUFFERS and idle is not None:
            self.buffers.remove(idle)
            for extent in idle.extents:
                extent.buffer = None
            idle.extents.clear()
            buffer = self._supplier.reuse(idle, self.buffer_bytes)
        else:
            buffer = self._supplier.create(self.buffer_bytes)
        self.buffers.append(buffer)
        for extent in extents:
            if extent.buffer is not None:
                extent.buffer.extents.remove(extent)
            extent.buffer, extent.buffer_offset = buffer, sum(each.size for each in buffer.extents)
            buffer.extents.append(extent)
        return buffer

    def plan_prefetch(self, turns: Iterable[Sequence[FileExtent]]) -> Iterator[ExtentRead[B]]:
        """Go through what the next turns want, the next one first, as far as buffers go; gives what is to be read ahead."""
        self._reclaim()
        self._expected = set()
        for turn, extents in enumerate(turns):
            away = [extent for extent in extents if extent.buffer is None]
            pinned = {e.buffer for e in (*self._expected, *extents) if e.buffer is not None}
            if len(pinned) + bool(away) > READ_AHEAD:
                return
            self._expected.update(extents)
            if away:
                yield self._plan_read(turn, away)

    def plan_fetch(self, extents: Sequence[FileExtent]) -> ExtentRead[B] | None:
        """Have all of these in buffers; gives what is to be read for that now, if anything."""
        self._reclaim()
        away = [extent for extent in extents if extent.buffer is None]
        return self._plan_read(0, away, extents) if away else None

    def _plan_read(
        self, turn: int, missing: Sequence[FileExtent], excluded: Iterable[FileExtent] = ()
    ) -> ExtentRead[B]:
        missing = sorted(missing, key=lambda extent: extent.file_offset)
        return ExtentRead(turn, missing, self.assign_buffer(missing, excluded))

    def release(self, extent: FileExtent) -> None:
        """An extent is free again; any thread may say so, in the middle of anything."""
        self._freed.append(extent)

    def _reclaim(self) -> None:
        while self._freed:
            extent = self._freed.popleft()
            self._expected.discard(extent)
            if extent.buffer is not None:
                extent.buffer.extents.remove(extent)
                extent.buffer = None
            self._free.setdefault(extent.size, []).append(extent.file_offset)
