"""Rule that assigns storages of a disk stash to buffers, and determines the reads; it moves no bytes.

    leaves ──▶ buffer ──▶ written to its extent in the file
    wanted ◀── buffer ◀── read ahead, turns before it is wanted

A buffer keeps its contents until it is reused; storages in a buffer are not read again. The assignment depends on the order of
calls alone, so forecasts count bytes by the same rule by which `disk_stash.py` moves them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Generic, NamedTuple, TypeVar

from l2l_core.devices import StashSlot
from l2l_core.shelf.direct_io import round_to_pages

BUFFERS = 6  # of one turn each: three for reading ahead, three that are filled, written and reused
READ_AHEAD = BUFFERS // 2


class FileExtent(StashSlot):
    """Stash slot in the file, in whole pages.

    Attributes:
        file_offset: first byte in the file.
        buffer: buffer that holds its bytes, or None.
        buffer_offset: first byte in that buffer.
        last_write: the last write to the file, which any read must wait for.
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
    """Buffer for the storages of one turn.

    Attributes:
        extents: extents in the buffer, in order.
    """

    def __init__(self) -> None:
        self.extents: list[FileExtent] = []


B = TypeVar("B", bound=StashBuffer)


class ExtentRead(NamedTuple, Generic[B]):
    """Extents to be read into a buffer.

    Attributes:
        turn: index, in the argument of `plan_prefetch`, of the turn that needs them.
        extents: extents in file order.
        buffer: target.
    """

    turn: int
    extents: list[FileExtent]
    buffer: B


class BufferRotation(Generic[B]):
    """Assignment of extents to buffers, which are reused in rotation.

    Invariant: an extent that a later turn expects keeps its buffer.

    Args:
        renew: prepares a buffer, from which all extents have been removed, for another use, or replaces it by one of the given
            size; given None, makes one.

    Attributes:
        file_bytes: end of the last extent.
        buffers: the buffers, least recently assigned first.
        buffer_bytes: size of a buffer: the most bytes of one turn so far.
    """

    def __init__(self, renew: Callable[[B | None, int], B]) -> None:
        self._renew = renew
        self.file_bytes = self.buffer_bytes = 0
        self.buffers: list[B] = []
        self._free: dict[int, list[int]] = {}  # file offsets by size
        self._expected: set[FileExtent] = set()
        self._freed: deque[FileExtent] = deque()

    def allocate(self, nbytes: int) -> FileExtent:
        """Return a freed extent of this size, or a new one at the end of the file."""
        self._reclaim()
        if free := self._free.get(round_to_pages(nbytes)):
            return FileExtent(nbytes, free.pop())
        self.file_bytes += round_to_pages(nbytes)
        return FileExtent(nbytes, self.file_bytes - round_to_pages(nbytes))

    def assign_buffer(self, extents: Sequence[FileExtent], excluded: Iterable[FileExtent] = ()) -> B:
        """Assign a buffer to extents; not one with expected extents, or with any of `excluded`."""
        self.buffer_bytes = max(self.buffer_bytes, sum(extent.size for extent in extents))
        busy = {extent.buffer for extent in (*self._expected, *excluded)}
        idle = next((buffer for buffer in self.buffers if buffer not in busy), None)
        if len(self.buffers) < BUFFERS:
            idle = None
        if idle is not None:
            self.buffers.remove(idle)
            for extent in idle.extents:
                extent.buffer = None
            idle.extents.clear()
        buffer = self._renew(idle, self.buffer_bytes)
        self.buffers.append(buffer)
        for extent in extents:
            if extent.buffer is not None:
                extent.buffer.extents.remove(extent)
            extent.buffer, extent.buffer_offset = buffer, sum(other.size for other in buffer.extents)
            buffer.extents.append(extent)
        return buffer

    def plan_prefetch(self, turns: Iterable[Sequence[FileExtent]]) -> Iterator[ExtentRead[B]]:
        """Yield the reads for the coming turns, next turn first, as far as there are buffers."""
        self._reclaim()
        self._expected = set()
        for turn, extents in enumerate(turns):
            missing = [extent for extent in extents if extent.buffer is None]
            pinned = {e.buffer for e in (*self._expected, *extents) if e.buffer is not None}
            if len(pinned) + bool(missing) > READ_AHEAD:
                return
            self._expected.update(extents)
            if missing:
                yield self._plan_read(turn, missing)

    def plan_fetch(self, extents: Sequence[FileExtent]) -> ExtentRead[B] | None:
        """Return the read that brings all of these extents into buffers, or None if they are there."""
        self._reclaim()
        missing = [extent for extent in extents if extent.buffer is None]
        return self._plan_read(0, missing, extents) if missing else None

    def _plan_read(
        self, turn: int, missing: Sequence[FileExtent], excluded: Iterable[FileExtent] = ()
    ) -> ExtentRead[B]:
        missing = sorted(missing, key=lambda extent: extent.file_offset)
        return ExtentRead(turn, missing, self.assign_buffer(missing, excluded))

    def release(self, extent: FileExtent) -> None:
        """Free an extent; thread-safe, takes effect at the next call."""
        self._freed.append(extent)

    def _reclaim(self) -> None:
        while self._freed:
            extent = self._freed.popleft()
            self._expected.discard(extent)
            if extent.buffer is not None:
                extent.buffer.extents.remove(extent)
                extent.buffer = None
            self._free.setdefault(extent.size, []).append(extent.file_offset)
