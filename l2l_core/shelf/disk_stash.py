"""Stash store on disk: storages pass through a few buffers to a scratch file and back, concurrently with compute.

`buffer_rotation.py` assigns buffers and determines the reads. The file is unnamed, so nothing of it is left when the process
ends; it is not part of a whole step.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import torch

from l2l_core.devices import Ledger, StashSlot, StashStore, Ticket, explain_full_disk
from l2l_core.shelf.buffer_rotation import (
    READ_AHEAD,
    BufferRotation,
    ExtentRead,
    FileExtent,
    StashBuffer,
)
from l2l_core.shelf.direct_io import PAGE, ScratchFile, page_aligned, round_to_pages
from l2l_core.shelf.record_store import RecordStore, record_event
from l2l_core.trace import Trace

_GROWTH = 8  # the file grows by at least an eighth, so that it grows seldom
_REMEDY = "The last whole step is kept; make room there, or keep the stash in memory (RelayConfig(stash='host'))"

StalledFn = Callable[[], AbstractContextManager[None]]


class _DiskBuffer(StashBuffer):
    """Page-aligned memory for the storages of one turn.

    Attributes:
        flat: (nbytes,) uint8.
        work: the read into it, or the write from it.
        is_read: whether `work` is a read, which must finish before the contents are used.
        load: load that may still read it.
    """

    def __init__(self, flat: torch.Tensor) -> None:
        super().__init__()
        self.flat = flat
        self.work: Future[None] | None = None
        self.is_read = False
        self.load: Ticket | None = None

    def view(self, extent: FileExtent) -> torch.Tensor:
        return self.flat[extent.buffer_offset : extent.buffer_offset + extent.nbytes]

    def finish(self) -> None:
        """Wait for all users of the buffer, ignoring their errors."""
        if self.work is not None:
            self.work.exception()
        if self.load is not None:
            self.load.abandon()


class DiskStashStore(StashStore):
    """Stash store with a scratch file.

    Invariant: an extent that is not in a buffer is written completely before it is read: one thread writes, in the order in
    which storages leave, and a read waits for the last write of each of its extents.
    """

    prefetch_turns = READ_AHEAD

    def __init__(
        self,
        path: Path,
        records: RecordStore,
        empty: Callable[[int, torch.dtype], torch.Tensor],
        host: Ledger,
    ) -> None:
        self._path, self._records, self._empty, self._host = path, records, empty, host
        self._file: ScratchFile | None = None
        self._trace = Trace()
        self._stalled: StalledFn = nullcontext
        self._rotation = BufferRotation(self._renew)

    def begin(self, trace: Trace, stalled: StalledFn) -> None:
        self._trace, self._stalled = trace, stalled
        self._file = self._records.files.open_scratch(self._path)

    def allocate(self, nbytes: int) -> StashSlot:
        extent = self._rotation.allocate(nbytes)
        if self._rotation.file_bytes > self._scratch.nbytes:
            self._grow(self._rotation.file_bytes)
        return extent

    def targets(self, slots: Sequence[StashSlot]) -> list[torch.Tensor]:
        extents = _extents(slots)
        buffer = self._rotation.assign_buffer(extents)
        return [buffer.view(extent) for extent in extents]

    def write_started(self, slots: Sequence[StashSlot], ticket: Ticket, k: int, visit: int) -> None:
        extents = _extents(slots)
        buffer, file, trace = _buffer_of(extents[0]), self._scratch, self._trace
        runs = [(start, buffer.flat[a:b]) for start, a, b in _contiguous_runs(extents)]

        def write() -> None:
            ticket.join()
            start_s, nbytes = time.perf_counter(), sum(len(part) for _, part in runs)
            with explain_full_disk(self._path.parent, nbytes, _REMEDY):
                for start, part in runs:
                    file.write(part, start)
            record_event(trace, "disk write", "stash", "", start_s, nbytes, k, visit)

        buffer.work, buffer.is_read = self._records.writes.submit(write), False
        for extent in extents:
            extent.last_write = buffer.work

    def prefetch(self, turns: Sequence[tuple[Sequence[StashSlot], str, int, int]]) -> None:
        for read in self._rotation.plan_prefetch([_extents(slots) for slots, *_ in turns]):
            self._start_read(read, *turns[read.turn][1:])

    def sources(self, slots: Sequence[StashSlot], layer: str, k: int, visit: int) -> list[torch.Tensor]:
        extents = _extents(slots)
        if (read := self._rotation.plan_fetch(extents)) is not None:
            self._start_read(read, layer, k, visit)
        buffers = [_buffer_of(extent) for extent in extents]
        for work in {buffer.work for buffer in buffers if buffer.is_read and buffer.work is not None}:
            with self._waiting_for(work):
                work.result()
        return [buffer.view(extent) for buffer, extent in zip(buffers, extents, strict=True)]

    def read_started(self, slots: Sequence[StashSlot], ticket: Ticket) -> None:
        for extent in _extents(slots):
            _buffer_of(extent).load = ticket

    def free(self, slot: StashSlot) -> None:
        self._rotation.release(*_extents([slot]))

    def clear(self) -> None:
        for buffer in self._rotation.buffers:
            buffer.finish()
            self._release(buffer)
        self._rotation = BufferRotation(self._renew)
        if self._file is not None:
            self._file.close()
            self._file = None

    def _start_read(self, read: ExtentRead[_DiskBuffer], layer: str, k: int, visit: int) -> None:
        """Start to read extents into a buffer."""
        buffer, file, trace = read.buffer, self._scratch, self._trace
        writes = {extent.last_write for extent in read.extents if extent.last_write is not None}
        runs = [(start, buffer.flat[a:b]) for start, a, b in _contiguous_runs(read.extents)]

        def work() -> None:
            for write in writes:
                write.result()
            start_s = time.perf_counter()
            for start, part in runs:
                file.read(part, start)
            record_event(trace, "disk read", "fetch", layer, start_s, sum(len(part) for _, part in runs), k, visit)

        buffer.work, buffer.is_read = self._records.reads.submit(work), True

    def _waiting_for(self, work: Future[None] | None) -> AbstractContextManager[None]:
        return nullcontext() if work is None or work.done() else self._stalled()

    # -- buffers ---------------------------------------------------------------------------------------------------------

    def _renew(self, buffer: _DiskBuffer | None, nbytes: int) -> _DiskBuffer:
        """See `BufferRotation`; raises the error of the last write from the buffer."""
        if buffer is not None:
            work = buffer.work
            with self._waiting_for(work):
                buffer.finish()
            failure = work.exception() if work is not None else None
            if failure is None and len(buffer.flat) == nbytes:
                buffer.work, buffer.load, buffer.is_read = None, None, False
                return buffer
            self._release(buffer)
            if failure is not None:
                raise failure
        self._host.book("stash", "disk buffers", nbytes + PAGE)
        return _DiskBuffer(page_aligned(self._empty(nbytes + PAGE, torch.uint8), nbytes))

    def _release(self, buffer: _DiskBuffer) -> None:
        self._host.release("stash", "disk buffers", len(buffer.flat) + PAGE)

    # -- the file ------------------------------------------------------------------------------------------------------

    @property
    def _scratch(self) -> ScratchFile:
        assert self._file is not None, "no pass is in progress"
        return self._file

    def _grow(self, nbytes: int) -> None:
        try:
            self._scratch.grow(nbytes + round_to_pages(nbytes // _GROWTH))
        except OSError:
            with explain_full_disk(self._path.parent, nbytes, _REMEDY):
                self._scratch.grow(nbytes)


def _extents(slots: Sequence[StashSlot]) -> list[FileExtent]:
    extents = [slot for slot in slots if isinstance(slot, FileExtent)]
    assert len(extents) == len(slots), "slots of another store"
    return extents


def _buffer_of(extent: FileExtent) -> _DiskBuffer:
    assert isinstance(extent.buffer, _DiskBuffer), "an extent is in no buffer"
    return extent.buffer


def _contiguous_runs(extents: Iterable[FileExtent]) -> Iterator[tuple[int, int, int]]:
    """Join extents that are adjacent in file and buffer; yield the file offset, and start and end in the buffer."""
    first = begin = end = -1
    for extent in extents:
        if begin < 0 or (extent.file_offset, extent.buffer_offset) != (first + end - begin, end):
            if begin >= 0:
                yield first, begin, end
            first, begin = extent.file_offset, extent.buffer_offset
        end = extent.buffer_offset + extent.size
    yield first, begin, end
