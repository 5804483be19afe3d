"""The files of a shelf: two halves per block, of which one holds the last whole step and the other takes the next.

An update writes the half that is not current, so whatever happens meanwhile, the step before is whole. When all of a step is
written, one manifest says which halves are current now (`manifest.py`), and so does `commit` here. That is the undo log of a
step too: who forgets what was written has the old step.
"""

from __future__ import annotations

import errno
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

import torch

from l2l_core.devices import is_full, no_room, serial_thread
from l2l_core.eps.blocks import Block
from l2l_core.shelf.direct import DirectFiles
from l2l_core.shelf.form import Form
from l2l_core.trace import Event, Trace


@dataclass(frozen=True, slots=True)
class Record:
    """Is what a half of a block holds."""

    half: int
    form: Form


class Records:
    """Reads and writes records, one after another on a lane for each direction.

    Invariant: no file of `current` is written to.

    Args:
        folder: of the files.

    Attributes:
        current: by block, what the last whole step has left.
        coming: what this step has written so far.
        reads, writes: the lanes of the disk.
        trace: of the step under way; gets an event for everything that is read or written.
    """

    def __init__(self, folder: Path) -> None:
        self.folder, self.files = folder, DirectFiles(folder)
        self.current: dict[Block, Record] = {}
        self.coming: dict[Block, Record] = {}
        self.trace = Trace()
        self.reads, self.writes = serial_thread("disk read"), serial_thread("disk write")
        self._under_way: list[Future[None]] = []
        self._unsure: BaseException | None = None  # why nobody knows which halves are current

    def read(self, block: Block, into: torch.Tensor, then: Callable[[], None] = lambda: None) -> Future[None]:
        """Begin to read the beginning of a block's record, as much as there is room for in `into`; `then` is done after it."""
        path, trace = self.path(block, self.current[block].half), self.trace

        def work() -> None:
            self._check_sure()
            start_s = time.perf_counter()
            self.files.read(path, into)
            _note(trace, "disk read", "read", block, start_s, len(into))
            then()

        return self.reads.submit(work)

    def write(self, block: Block, form: Form, flat: torch.Tensor, then: Callable[[], None]) -> None:
        """Begin to write a block's next record; `then` is done when nobody reads `flat` any more."""
        now = self.current.get(block)
        record, trace = Record(1 - now.half if now is not None else 0, form), self.trace

        def work() -> None:
            start_s = time.perf_counter()
            try:
                self._check_sure()
                self.files.write(self.path(block, record.half), flat)
            except OSError as error:
                if not is_full(error):
                    raise
                remedy = "The last whole step is kept; make room there, and go on from it"
                raise no_room(error, self.folder, len(flat), remedy) from error
            finally:
                then()
            _note(trace, "disk write", "write", block, start_s, len(flat))
            self.coming[block] = record

        self._under_way.append(self.writes.submit(work))

    def settle(self) -> None:
        """Wait until all is on the disk that is being written.

        Raises:
            OSError: some of it could not be.
        """
        while self._under_way:
            self._under_way[0].result()
            self._under_way.pop(0)

    def commit(self, prepare: Callable[[], None], switch: Callable[[], None]) -> None:
        """Make the step that was written the current one: `prepare` writes a manifest, and `switch` puts it in force.

        On the lane of writes, which nobody interrupts: between manifest and memory nothing may come.
        """

        def work() -> None:
            prepare()
            try:
                switch()
            except BaseException as error:
                self._unsure = error
                raise
            self.current |= self.coming
            self.coming = {}

        self._under_way.append(self.writes.submit(work))
        self.settle()

    def forget(self) -> None:
        """Wait for what is being written, however it ends, and forget what is not committed."""
        under_way, self._under_way = self._under_way, []
        for each in under_way:
            each.exception()
        self.coming = {}

    def _check_sure(self) -> None:
        if self._unsure is not None:
            raise OSError(
                errno.EIO,
                f"the disk has failed ({self._unsure}) just when a step was to become the current one: the folder has that step "
                "or the one before, whole. Close this relay, and go on with FileShelf(..., resume=True)",
                str(self.folder),
            )

    def path(self, block: Block, half: int) -> Path:
        """Name the file of a block's half."""
        return self.folder / f"{quote(block.key, safe=' ')}.{'ab'[half]}"

    def close(self) -> None:
        """Join the threads."""
        self.reads.shutdown(wait=True)
        self.writes.shutdown(wait=True)


def _note(trace: Trace, lane: str, kind: str, block: Block, start_s: float, nbytes: int) -> None:
    t0 = trace.began_s
    trace.add(Event(lane, kind, start_s - t0, time.perf_counter() - t0, block.key, nbytes=nbytes))
