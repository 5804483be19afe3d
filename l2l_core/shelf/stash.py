"""A waiting room on the disk: what leaves the device passes through a few buffers to a scratch file, and back.

Which buffer is taken, and what has to be read, `rotation.py` says; here the bytes move, behind compute.

The file has no name: whatever ends the process, nothing of it stays. It is no part of a whole step.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager
from pathlib import Path

import torch

from l2l_core.devices import Ledger, Spot, Ticket, WaitingRoom, is_full, no_room
from l2l_core.shelf.direct import PAGE, ScratchFile, page_aligned, pages
from l2l_core.shelf.records import Records
from l2l_core.shelf.rotation import READ_AHEAD, Buffer, Extent, Read, Rotation, Supply
from l2l_core.trace import Event, Trace

_GROWTH = 8  # the file grows by an eighth at least, so that room is asked for seldom
_REMEDY = "The last whole step is kept; make room there, or keep the stash in memory (RelayConfig(stash='host'))"

Stalled = Callable[[], AbstractContextManager[None]]


class _Buffer(Buffer):
    """Is page-aligned memory for what moves at a turn.

    Attributes:
        flat: (nbytes,) uint8.
        work: the read that fills it, or the write that empties it.
        is_read: which of them. What is written was there when the storage was dropped.
        load: may still read it.
    """

    def __init__(self, flat: torch.Tensor) -> None:
        super().__init__()
        self.flat = flat
        self.work: Future[None] | None = None
        self.is_read = False
        self.load: Ticket | None = None

    def view(self, extent: Extent) -> torch.Tensor:
        return self.flat[extent.within : extent.within + extent.nbytes]

    def finish(self) -> None:
        """Wait for whatever uses it, however that ends."""
        if self.work is not None:
            self.work.exception()
        if self.load is not None:
            self.load.abandon()


class _Memory(Supply[_Buffer]):
    """Makes the buffers, and books them.

    Attributes:
        stalled: compute waits inside of it.
    """

    def __init__(self, empty: Callable[[int, torch.dtype], torch.Tensor], host: Ledger) -> None:
        self._empty, self._host = empty, host
        self.stalled: Stalled = _no_stall

    def new(self, nbytes: int) -> _Buffer:
        self._host.book("stash", "disk buffers", nbytes + PAGE)
        return _Buffer(page_aligned(self._empty(nbytes + PAGE, torch.uint8), nbytes))

    def again(self, buffer: _Buffer, nbytes: int) -> _Buffer:
        """Make one ready for another use.

        Raises:
            OSError: what was in it could not be written.
        """
        work = buffer.work
        if work is not None and not work.done():
            with self.stalled():
                buffer.finish()
        buffer.finish()
        failure = work.exception() if work is not None else None
        if failure is None and len(buffer.flat) == nbytes:
            buffer.work, buffer.load, buffer.is_read = None, None, False
            return buffer
        self.release(buffer)
        if failure is not None:
            raise failure
        return self.new(nbytes)

    def release(self, buffer: _Buffer) -> None:
        """Book it no longer."""
        self._host.release("stash", "disk buffers", len(buffer.flat) + PAGE)


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

    looks_ahead = READ_AHEAD

    def __init__(
        self,
        path: Path,
        records: Records,
        empty: Callable[[int, torch.dtype], torch.Tensor],
        host: Ledger,
    ) -> None:
        self._path, self._records = path, records
        self._file: ScratchFile | None = None
        self._trace = Trace()
        self._memory = _Memory(empty, host)
        self._rotation = Rotation(self._memory)

    def begin(self, trace: Trace, stalled: Stalled) -> None:
        self._trace, self._memory.stalled = trace, stalled
        self._file = self._records.files.scratch(self._path)

    def spot(self, nbytes: int) -> Spot:
        if (used := self._rotation.free(nbytes)) is not None:
            return used
        if (end := self._rotation.file_bytes + pages(nbytes)) > self._scratch.nbytes:
            self._grow(end)
        return self._rotation.further(nbytes)

    def targets(self, spots: Sequence[Spot]) -> list[torch.Tensor]:
        extents = _extents(spots)
        buffer = self._rotation.fill(extents)
        return [buffer.view(extent) for extent in extents]

    def left(self, spots: Sequence[Spot], ticket: Ticket, k: int, visit: int) -> None:
        extents = _extents(spots)
        buffer, file, trace = _buffer_of(extents[0]), self._scratch, self._trace
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
        for read in self._rotation.expect([_extents(spots) for spots, *_ in turns]):
            self._read(read, *turns[read.turn][1:])

    def sources(self, spots: Sequence[Spot], layer: str, k: int, visit: int) -> list[torch.Tensor]:
        extents = _extents(spots)
        if (read := self._rotation.want(extents)) is not None:
            self._read(read, layer, k, visit)
        buffers = [_buffer_of(extent) for extent in extents]
        for work in {buffer.work for buffer in buffers if buffer.is_read and buffer.work is not None}:
            self._wait_for(work)
        return [buffer.view(extent) for buffer, extent in zip(buffers, extents, strict=True)]

    def lent(self, spots: Sequence[Spot], ticket: Ticket) -> None:
        for extent in _extents(spots):
            _buffer_of(extent).load = ticket

    def forget(self, spot: Spot) -> None:
        self._rotation.forget(*_extents([spot]))

    def clear(self) -> None:
        for buffer in self._rotation.buffers:
            buffer.finish()
            self._memory.release(buffer)
        self._rotation = Rotation(self._memory)
        if self._file is not None:
            self._file.close()
            self._file = None

    def _read(self, read: Read[_Buffer], layer: str, k: int, visit: int) -> None:
        """Begin to bring extents back to a buffer."""
        buffer, file, trace = read.buffer, self._scratch, self._trace
        written = {extent.written for extent in read.extents if extent.written is not None}
        runs = [(start, buffer.flat[a:b]) for start, a, b in _runs(read.extents)]

        def bring() -> None:
            for each in written:
                each.result()
            start_s = time.perf_counter()
            for start, part in runs:
                file.read(part, start)
            _note(trace, "disk read", "fetch", layer, k, visit, start_s, runs)

        buffer.work, buffer.is_read = self._records.reads.submit(bring), True

    def _wait_for(self, work: Future[None]) -> None:
        if work.done():
            work.result()
            return
        with self._memory.stalled():
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


def _extents(spots: Sequence[Spot]) -> list[Extent]:
    assert all(isinstance(spot, Extent) for spot in spots), "spots of another room"
    return list(spots)  # type: ignore[arg-type]


def _buffer_of(extent: Extent) -> _Buffer:
    assert isinstance(extent.buffer, _Buffer), "an extent is in no buffer"
    return extent.buffer


def _runs(extents: Iterable[Extent]) -> Iterator[tuple[int, int, int]]:
    """Join extents that follow one another in the file and in their buffer: first byte there, first and last byte here."""
    first = begin = end = -1
    for extent in extents:
        if begin < 0 or (extent.start, extent.within) != (first + end - begin, end):
            if begin >= 0:
                yield first, begin, end
            first, begin = extent.start, extent.within
        end = extent.within + extent.size
    yield first, begin, end


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
