"""A waiting room on the disk: what leaves the device passes through a few buffers to a scratch file, and back.

    leaves ──▶ buffer ──▶ written to its place in the file, behind compute
    wanted ◀── buffer ◀── read ahead, turns before it is wanted

A buffer keeps what it was filled with until the buffer is needed for something else, and what is still in one is not read. Which
buffer that is depends on the order of events alone, never on time, so neither does the number of bytes that are read.

The file has no name: whatever ends the process, nothing of it stays. It is no part of a whole step.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager
from pathlib import Path

import torch

from l2l_core.devices import Ledger, Spot, Ticket, WaitingRoom, is_full, no_room
from l2l_core.shelf.direct import PAGE, ScratchFile, page_aligned, pages
from l2l_core.shelf.records import Records
from l2l_core.trace import Event, Trace

BUFFERS = 6  # each for what moves at a turn: three that are read ahead, and three that are filled, written and reused
_READ_AHEAD = BUFFERS // 2
_GROWTH = 8  # the file grows by an eighth at least, so that room is asked for seldom
_REMEDY = "The last whole step is kept; make room there, or keep the stash in memory (RelayConfig(stash='host'))"

Stalled = Callable[[], AbstractContextManager[None]]


class _Extent(Spot):
    """Is a place in the file, of whole pages, and in a buffer, if its bytes are in one."""

    __slots__ = ("buffer", "start", "within", "written")

    def __init__(self, nbytes: int, start: int) -> None:
        super().__init__(nbytes)
        self.start = start
        self.buffer: _Buffer | None = None
        self.within = 0  # first byte in the buffer
        self.written: Future[None] | None = None  # the write that comes before any read


class _Buffer:
    """Is page-aligned memory for what moves at a turn.

    Attributes:
        flat: (nbytes,) uint8.
        extents: whose bytes are in it.
        work: the read that fills it, or the write that empties it.
        is_read: which of them. What is written was there when the storage was dropped.
        load: may still read it.
    """

    def __init__(self, flat: torch.Tensor) -> None:
        self.flat = flat
        self.extents: list[_Extent] = []
        self.work: Future[None] | None = None
        self.is_read = False
        self.load: Ticket | None = None

    def view(self, extent: _Extent) -> torch.Tensor:
        return self.flat[extent.within : extent.within + extent.nbytes]


class OnDisk(WaitingRoom):
    """Lets storages wait in a scratch file.

    Invariant: the bytes of an extent are in its buffer, or all written before they are read: one lane writes, in the order in
    which storages leave, and a read waits for the last write of what it reads.

    Args:
        path: of the file while it is made.
        records: on the same disk, with which it shares the lanes.
        empty: makes host memory that copies can reach.
        host: gets the buffers booked.
    """

    looks_ahead = _READ_AHEAD

    def __init__(
        self,
        path: Path,
        records: Records,
        empty: Callable[[int, torch.dtype], torch.Tensor],
        host: Ledger,
    ) -> None:
        self._path, self._records, self._empty, self._host = path, records, empty, host
        self._file: ScratchFile | None = None
        self._trace, self._stalled = Trace(), _no_stall
        self._used_bytes = self._largest = 0
        self._free: dict[int, list[int]] = {}  # places in the file by their bytes
        self._buffers: list[_Buffer] = []  # the one that was taken longest ago comes first
        self._expected: set[_Extent] = set()
        self._forgotten: deque[_Extent] = deque()

    def begin(self, trace: Trace, stalled: Stalled) -> None:
        self._trace, self._stalled = trace, stalled
        self._file = self._records.files.scratch(self._path)

    def spot(self, nbytes: int) -> Spot:
        self._settle_forgotten()
        size = pages(nbytes)
        if free := self._free.get(size):
            return _Extent(nbytes, free.pop())
        if self._used_bytes + size > self._scratch.nbytes:
            self._grow(self._used_bytes + size)
        self._used_bytes += size
        return _Extent(nbytes, self._used_bytes - size)

    def targets(self, spots: Sequence[Spot]) -> list[torch.Tensor]:
        extents = _extents(spots)
        buffer = self._take(extents, but=())
        return [buffer.view(extent) for extent in extents]

    def left(self, spots: Sequence[Spot], ticket: Ticket, k: int, visit: int) -> None:
        extents = _extents(spots)
        buffer, file, trace = extents[0].buffer, self._scratch, self._trace
        assert buffer is not None, "left without targets"
        runs = [(start, buffer.flat[a:b]) for start, a, b in _runs(extents)]

        def write() -> None:
            ticket.join()
            start_s = time.perf_counter()
            try:
                for start, part in runs:
                    file.write(part, start)
            except OSError as error:
                if not is_full(error):
                    raise
                raise no_room(error, self._path.parent, sum(len(part) for _, part in runs), _REMEDY) from error
            _note(trace, "disk write", "stash", "", k, visit, start_s, runs)

        buffer.work, buffer.is_read = self._records.writes.submit(write), False
        for extent in extents:
            extent.written = buffer.work

    def expect(self, turns: Sequence[tuple[Sequence[Spot], str, int, int]]) -> None:
        self._settle_forgotten()
        self._expected = set()
        for spots, layer, k, visit in turns:
            extents = _extents(spots)
            away = [extent for extent in extents if extent.buffer is None]
            pinned = {e.buffer for e in (*self._expected, *extents) if e.buffer is not None}
            if len(pinned) + bool(away) > _READ_AHEAD:
                return
            self._expected.update(extents)
            if away:
                self._read(away, (), layer, k, visit)

    def sources(self, spots: Sequence[Spot], layer: str, k: int, visit: int) -> list[torch.Tensor]:
        self._settle_forgotten()
        extents = _extents(spots)
        if away := [extent for extent in extents if extent.buffer is None]:
            self._read(away, extents, layer, k, visit)
        buffers = [extent.buffer for extent in extents if extent.buffer is not None]
        for work in {buffer.work for buffer in buffers if buffer.is_read and buffer.work is not None}:
            self._wait_for(work)
        return [buffer.view(extent) for buffer, extent in zip(buffers, extents, strict=True)]

    def lent(self, spots: Sequence[Spot], ticket: Ticket) -> None:
        for extent in _extents(spots):
            assert extent.buffer is not None, "lent without a source"
            extent.buffer.load = ticket

    def forget(self, spot: Spot) -> None:
        self._forgotten += _extents([spot])  # storages may die in any thread, and in the middle of anything

    def clear(self) -> None:
        for buffer in self._buffers:
            _let_finish(buffer)
            self._host.release("stash", "disk buffers", len(buffer.flat) + PAGE)
        self._buffers.clear()
        self._expected.clear()
        self._forgotten.clear()
        self._free.clear()
        self._used_bytes = self._largest = 0
        if self._file is not None:
            self._file.close()
            self._file = None

    # -- buffers -------------------------------------------------------------------------------------------------------

    def _take(self, extents: Sequence[_Extent], but: Iterable[_Extent]) -> _Buffer:
        """Empty a buffer for the bytes of these; not one that holds what is expected, or any of `but`."""
        nbytes = sum(pages(extent.nbytes) for extent in extents)
        self._largest = max(self._largest, nbytes)
        busy = {extent.buffer for extent in (*self._expected, *but)}
        idle = next((buffer for buffer in self._buffers if buffer not in busy), None)
        if len(self._buffers) >= BUFFERS and idle is not None:
            self._buffers.remove(idle)
            buffer = self._emptied(idle)
        else:
            buffer = self._new()
        self._buffers.append(buffer)
        for extent in extents:
            if extent.buffer is not None:
                extent.buffer.extents.remove(extent)
            extent.buffer, extent.within = buffer, sum(pages(each.nbytes) for each in buffer.extents)
            buffer.extents.append(extent)
        return buffer

    def _new(self) -> _Buffer:
        self._host.book("stash", "disk buffers", self._largest + PAGE)
        return _Buffer(page_aligned(self._empty(self._largest + PAGE, torch.uint8), self._largest))

    def _emptied(self, buffer: _Buffer) -> _Buffer:
        """Make one buffer ready for another use: itself, or a larger one in its place.

        Raises:
            OSError: what was in it could not be written.
        """
        work = buffer.work
        if work is not None and not work.done():
            with self._stalled():
                _let_finish(buffer)
        _let_finish(buffer)
        for extent in buffer.extents:
            extent.buffer = None
        failure = work.exception() if work is not None else None
        if failure is None and len(buffer.flat) == self._largest:
            buffer.extents, buffer.work, buffer.load, buffer.is_read = [], None, None, False
            return buffer
        self._host.release("stash", "disk buffers", len(buffer.flat) + PAGE)
        if failure is not None:
            raise failure
        return self._new()

    def _read(self, extents: Sequence[_Extent], but: Iterable[_Extent], layer: str, k: int, visit: int) -> None:
        """Begin to bring extents back to a buffer."""
        extents = sorted(extents, key=lambda extent: extent.start)
        buffer, file, trace = self._take(extents, but), self._scratch, self._trace
        written = {extent.written for extent in extents if extent.written is not None}
        runs = [(start, buffer.flat[a:b]) for start, a, b in _runs(extents)]

        def read() -> None:
            for each in written:
                each.result()
            start_s = time.perf_counter()
            for start, part in runs:
                file.read(part, start)
            _note(trace, "disk read", "fetch", layer, k, visit, start_s, runs)

        buffer.work, buffer.is_read = self._records.reads.submit(read), True

    def _wait_for(self, work: Future[None]) -> None:
        if work.done():
            work.result()
            return
        with self._stalled():
            work.result()

    # -- the file ------------------------------------------------------------------------------------------------------

    @property
    def _scratch(self) -> ScratchFile:
        assert self._file is not None, "no pass is under way"
        return self._file

    def _grow(self, nbytes: int) -> None:
        file, ample = self._scratch, nbytes + pages(nbytes // _GROWTH)
        try:
            file.grow(ample)
        except OSError as error:
            if not is_full(error):
                raise
            try:
                file.grow(nbytes)
            except OSError as last:
                if not is_full(last):
                    raise
                raise no_room(last, self._path.parent, nbytes, _REMEDY) from last

    def _settle_forgotten(self) -> None:
        while self._forgotten:
            extent = self._forgotten.popleft()
            self._expected.discard(extent)
            if extent.buffer is not None:
                extent.buffer.extents.remove(extent)
                extent.buffer = None
            self._free.setdefault(pages(extent.nbytes), []).append(extent.start)


def _extents(spots: Sequence[Spot]) -> list[_Extent]:
    assert all(isinstance(spot, _Extent) for spot in spots), "spots of another room"
    return list(spots)  # type: ignore[arg-type]


def _runs(extents: Iterable[_Extent]) -> Iterator[tuple[int, int, int]]:
    """Join extents that follow one another in the file and in their buffer: first byte there, first and last byte here."""
    first = begin = end = -1
    for extent in extents:
        if begin < 0 or (extent.start, extent.within) != (first + end - begin, end):
            if begin >= 0:
                yield first, begin, end
            first, begin = extent.start, extent.within
        end = extent.within + pages(extent.nbytes)
    yield first, begin, end


def _let_finish(buffer: _Buffer) -> None:
    """Wait for whatever uses a buffer, however it ends."""
    if buffer.work is not None:
        buffer.work.exception()
    if buffer.load is not None:
        buffer.load.abandon()


def _no_stall() -> AbstractContextManager[None]:
    raise AssertionError("no pass is under way")


def _note(
    trace: Trace,
    lane: str,
    kind: str,
    layer: str,
    k: int,
    visit: int,
    start_s: float,
    runs: list[tuple[int, torch.Tensor]],
) -> None:
    t0, nbytes = trace.began_s, sum(len(part) for _, part in runs)
    trace.add(Event(lane, kind, start_s - t0, time.perf_counter() - t0, layer, k, nbytes, visit))
