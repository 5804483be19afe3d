"""The files of a shelf: two halves per block, of which one holds the last whole step and the other takes the next.

An update writes the half that is not current, so whatever happens meanwhile, the step before is whole. When all of a step is
written, one manifest says which halves are current now (`shelf_manifest.py`), and so does `commit` here. That is the undo log of a
step too: who forgets what was written has the old step.
"""

from __future__ import annotations

import errno
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from urllib.parse import quote

import torch

from l2l_core.devices import disk_full_error, is_disk_full, serial_executor
from l2l_core.eps.blocks import Block
from l2l_core.shelf.direct_io import DirectFiles
from l2l_core.shelf.record_layout import RecordLayout
from l2l_core.trace import Event, Trace


@dataclass(frozen=True, slots=True)
class BlockRecord:
    """Is what a half of a block holds.

    Attributes:
        file: name of the block's files, the same for good: a shared block's key follows the layers that are edited.
        half: 0 or 1.
        form: how it lies there.
    """

    file: str
    copy_index: int
    layout: RecordLayout


class RecordStore:
    """Reads and writes records, one after another on a lane for each direction.

    Invariant: no file of `current` is written to.

    Args:
        folder: of the files.

    Attributes:
        current: by block, what the last whole step has left.
        coming: what this step, or the edit under way, has written so far.
        reads, writes: the lanes of the disk.
        trace: of the step under way; gets an event for everything that is read or written.
    """

    def __init__(self, folder: Path) -> None:
        self.folder, self.files = folder, DirectFiles(folder)
        self.committed: dict[Block, BlockRecord] = {}
        self.pending: dict[Block, BlockRecord] = {}
        self.trace = Trace()
        self.reads, self.writes = serial_executor("disk read"), serial_executor("disk write")
        self._new_records: list[BlockRecord] = []  # of blocks that have none yet
        self._writes_in_flight: list[Future[None]] = []
        self._commit_error: BaseException | None = None  # why nobody knows which halves are current

    def read(self, block: Block, into: torch.Tensor, then: Callable[[], None] = lambda: None) -> Future[None]:
        """Begin to read the beginning of a block's record, as much as there is room for in `into`; `then` is done after it."""
        path, trace = self.path(self.latest(block)), self.trace

        def work() -> None:
            self._check_commit()
            start_s = time.perf_counter()
            self.files.read(path, into)
            _record_event(trace, "disk read", "read", block, start_s, len(into))
            then()

        return self.reads.submit(work)

    def write(self, block: Block, layout: RecordLayout, flat: torch.Tensor, then: Callable[[], None]) -> None:
        """Begin to write a block's next record; `then` is done when nobody reads `flat` any more."""
        now, trace = self.committed.get(block), self.trace
        record = BlockRecord(block.key, 0, layout) if now is None else BlockRecord(now.file, 1 - now.copy_index, layout)
        if now is None:
            self._new_records.append(record)

        def work() -> None:
            start_s = time.perf_counter()
            try:
                self._check_commit()
                self.files.write(self.path(record), flat)
            except OSError as error:
                if not is_disk_full(error):
                    raise
                remedy = "The last whole step is kept; make room there, and go on from it"
                raise disk_full_error(error, self.folder, len(flat), remedy) from error
            finally:
                then()
            _record_event(trace, "disk write", "write", block, start_s, len(flat))
            self.pending[block] = record

        self._writes_in_flight.append(self.writes.submit(work))

    def wait_for_writes(self) -> None:
        """Wait until all is on the disk that is being written.

        Raises:
            OSError: some of it could not be.
        """
        while self._writes_in_flight:
            self._writes_in_flight[0].result()
            self._writes_in_flight.pop(0)

    def commit(self, write_manifest: Callable[[], None], activate: Callable[[], None]) -> None:
        """Make the step that was written the current one: `prepare` writes a manifest, and `switch` puts it in force.

        On the lane of writes, which nobody interrupts: between manifest and memory nothing may come.
        """

        def work() -> None:
            write_manifest()
            try:
                activate()
            except BaseException as error:
                self._commit_error = error
                raise
            self.committed |= self.pending
            self.pending = {}
            self._new_records.clear()

        self._writes_in_flight.append(self.writes.submit(work))
        self.wait_for_writes()

    def rollback(self) -> None:
        """Wait for what is being written, however it ends, and forget what is not committed; files that are new go."""
        under_way, self._writes_in_flight = self._writes_in_flight, []
        for each in under_way:
            each.exception()
        self.pending = {}
        if self._commit_error is None:  # else the manifest may name them
            _delete(map(self.path, self._new_records))
        self._new_records.clear()

    def _check_commit(self) -> None:
        if self._commit_error is not None:
            raise OSError(
                errno.EIO,
                f"the disk has failed ({self._commit_error}) just when a step was to become the current one: the folder has that step "
                "or the one before, whole. Close this relay, and go on with FileShelf(..., resume=True)",
                str(self.folder),
            )

    def latest(self, block: Block) -> BlockRecord:
        """Give the record that was written last; an edit is seen before it is committed."""
        return self.pending.get(block) or self.committed[block]

    def path(self, record: BlockRecord) -> Path:
        """Name the file of a record."""
        return self.folder / f"{quote(record.file, safe=' ')}.{'ab'[record.copy_index]}"

    def delete(self, blocks: Iterable[Block]) -> None:
        """Delete both halves of blocks that nobody wants any more, and that the manifest does not name."""
        for block in blocks:
            for record in (self.committed.pop(block, None), self.pending.pop(block, None)):
                if record is not None:
                    _delete(self.path(replace(record, copy_index=half)) for half in (0, 1))

    def delete_orphans(self) -> None:
        """Delete what a process that ended had left beside the current records: parked layers, an edit under way."""
        named = {self.path(replace(record, copy_index=half)) for record in self.committed.values() for half in (0, 1)}
        _delete(path for path in self.folder.iterdir() if path not in named)

    def close(self) -> None:
        """Join the threads."""
        self.reads.shutdown(wait=True)
        self.writes.shutdown(wait=True)


def _delete(paths: Iterable[Path]) -> None:
    for path in paths:
        with suppress(OSError):  # it is in nobody's way, and `sweep` tries it again
            path.unlink()


def _record_event(trace: Trace, lane: str, kind: str, block: Block, start_s: float, nbytes: int) -> None:
    t0 = trace.began_s
    trace.add(Event(lane, kind, start_s - t0, time.perf_counter() - t0, block.key, nbytes=nbytes))
