"""Record files of a shelf: two copies per block, one committed and one for the next step.

An update writes the copy that is not committed, so a crash leaves the last step whole. After all writes of a step, a manifest
names the new copies (`shelf_manifest.py`), and `commit` makes them current. A step is undone by forgetting its copies.

Weights fill whole pages, so that a load reads them alone. Tensors of the optimizer state follow one another in the file; its
plain data is in `RecordLayout`, which the manifest holds.
"""

from __future__ import annotations

import errno
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from urllib.parse import quote

import torch

from l2l_core.devices import explain_full_disk, serial_executor
from l2l_core.eps import Masters
from l2l_core.eps.blocks import Block, Layout, aligned
from l2l_core.model import Tensors, decode, encode
from l2l_core.shelf.direct_io import DirectFiles, round_to_pages
from l2l_core.trace import Event, Trace

MaybeParamState = Mapping[str, Any] | None  # optimizer state of a parameter

_REMEDY = "The last whole step is kept; make room there, and resume from it"


@dataclass(frozen=True, slots=True)
class RecordLayout:
    """Positions of weights and state tensors in a record.

    Attributes:
        weights_bytes: bytes of the weights, whole pages.
        nbytes: bytes of the record, whole pages.
        state: optimizer state of each parameter, as returned by `encode`.
        tensors: offset, type, size and strides of each state tensor, by name.
    """

    weights_bytes: int
    nbytes: int
    state: list[Any]
    tensors: dict[str, list[Any]]

    @staticmethod
    def of(layout: Layout, states: Sequence[MaybeParamState]) -> tuple[RecordLayout, Tensors]:
        """Return the layout for a block, and the tensors of its optimizer state by name.

        Raises:
            ValueError: the state contains a value that is neither a tensor nor plain data.
        """
        state_tensors: Tensors = {}
        state = [None if each is None else encode(dict(each), str(i), state_tensors) for i, each in enumerate(states)]
        weights_bytes = offset = round_to_pages(layout.nbytes)
        tensors: dict[str, list[Any]] = {}
        for name, tensor in state_tensors.items():
            stride = torch.empty_like(tensor, device="meta").stride()
            dtype = str(tensor.dtype).removeprefix("torch.")
            tensors[name] = [offset, dtype, list(tensor.shape), list(stride)]
            offset += aligned(tensor.nbytes, 1)
        return RecordLayout(weights_bytes, round_to_pages(offset), state, tensors), state_tensors

    @property
    def state_bytes(self) -> int:
        """Bytes of the state tensors."""
        return sum(
            getattr(torch, word).itemsize * torch.Size(size).numel() for _, word, size, _ in self.tensors.values()
        )

    def read_states(self, flat: torch.Tensor) -> list[dict[str, Any] | None]:
        """Return the optimizer state in a record; its tensors are views of `flat`."""
        return [None if each is None else decode(each, lambda name, _: self._view(flat, name)) for each in self.state]

    def write_states(self, flat: torch.Tensor, tensors: Tensors, before: RecordLayout) -> None:
        """Write the state tensors into a record; some may already lie in it, at their positions in the layout `before`."""
        if self.tensors != before.tensors:  # positions have moved, so a copy might overwrite another tensor
            start = flat.data_ptr()
            inside = {name for name, t in tensors.items() if start <= t.data_ptr() < start + len(flat)}
            tensors = {name: t.clone() if name in inside else t for name, t in tensors.items()}
        for name, tensor in tensors.items():
            target = self._view(flat, name)
            if target.data_ptr() != tensor.data_ptr():
                target.copy_(tensor)

    def _view(self, flat: torch.Tensor, name: str) -> torch.Tensor:
        offset, word, size, stride = self.tensors[name]
        dtype = getattr(torch, word)
        nbytes = dtype.itemsize * torch.Size(size).numel()
        typed = flat[offset : offset + nbytes].view(dtype)
        return typed.as_strided(size, stride, typed.storage_offset())


def weights_in(flat: torch.Tensor, block: Block) -> torch.Tensor:
    """Return the weights in the record of a block, a view of shape (block.master_layout.numel,), float32 or bytes."""
    weights = flat[: block.master_layout.nbytes]
    return weights if block.in_bytes else weights.view(torch.float32)


@contextmanager
def bind_record(
    masters: Masters, block: Block, layout: RecordLayout, flat: torch.Tensor
) -> Iterator[list[MaybeParamState]]:
    """Make a block and its optimizer state views of a record in memory, in a block of code.

    Yields:
        A list that receives the optimizer state of each parameter at the end.
    """
    params, state = masters.params_of(block), masters.optimizer.state
    states: list[MaybeParamState] = []
    block.bind(weights_in(flat, block), params)
    state.update((p, each) for p, each in zip(params, layout.read_states(flat), strict=True) if each is not None)
    try:
        yield states
    finally:
        block.unbind(params)
        states += [state.pop(param, None) for param in params]


@dataclass(frozen=True, slots=True)
class BlockRecord:
    """One copy of a block's record.

    Attributes:
        file: stem of the block's files, which never changes, whereas edits may change the key of a shared block.
        copy_index: 0 or 1.
        layout: layout of the file.
    """

    file: str
    copy_index: int
    layout: RecordLayout


class RecordStore:
    """Records of all blocks, read and written on one thread per direction.

    Invariant: no file in `committed` is written to.

    Attributes:
        committed: record of each block in the last whole step.
        pending: records that the present step or edit has written so far.
        reads: executor for reads.
        writes: executor for writes.
        trace: trace of the present step; receives an event for each read and write.
    """

    def __init__(self, folder: Path) -> None:
        self.folder, self.files = folder, DirectFiles(folder)
        self.committed: dict[Block, BlockRecord] = {}
        self.pending: dict[Block, BlockRecord] = {}
        self.trace = Trace()
        self.reads, self.writes = serial_executor("disk read"), serial_executor("disk write")
        self._new_records: list[BlockRecord] = []  # of blocks that have none yet
        self._writes_in_flight: list[Future[None]] = []
        self._commit_error: BaseException | None = None  # set if it is unknown which copies the manifest names

    def read(self, block: Block, into: torch.Tensor, then: Callable[[], None] = lambda: None) -> Future[None]:
        """Start to fill `into` from the start of a block's record, and then call `then`."""
        path, trace = self.path(self.latest(block)), self.trace

        def work() -> None:
            self._check_commit()
            start_s = time.perf_counter()
            self.files.read(path, into)
            record_event(trace, "disk read", "read", block.key, start_s, len(into))
            then()

        return self.reads.submit(work)

    def write(
        self, block: Block, layout: RecordLayout, flat: torch.Tensor, then: Callable[[], None] = lambda: None
    ) -> None:
        """Start to write the next record of a block; `then` is called when `flat` is no longer in use."""
        old, trace = self.committed.get(block), self.trace
        record = BlockRecord(block.key, 0, layout) if old is None else BlockRecord(old.file, 1 - old.copy_index, layout)
        if old is None:
            self._new_records.append(record)

        def work() -> None:
            start_s = time.perf_counter()
            try:
                self._check_commit()
                with explain_full_disk(self.folder, len(flat), _REMEDY):
                    self.files.write(self.path(record), flat)
            finally:
                then()
            record_event(trace, "disk write", "write", block.key, start_s, len(flat))
            self.pending[block] = record

        self._writes_in_flight.append(self.writes.submit(work))

    def wait_for_writes(self) -> None:
        """Wait until all writes have reached the disk.

        Raises:
            OSError: a write has failed.
        """
        while self._writes_in_flight:
            self._writes_in_flight[0].result()
            self._writes_in_flight.pop(0)

    def commit(self, write_manifest: Callable[[], None], activate: Callable[[], None]) -> None:
        """Commit the pending records: `write_manifest` writes a manifest, and `activate` makes it the current one.

        Both run on the thread for writes, so that no interrupt of the caller can separate the manifest from `committed`.
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
        """Wait for writes in progress, ignoring their errors; drop pending records and delete new files."""
        writes, self._writes_in_flight = self._writes_in_flight, []
        for write in writes:
            write.exception()
        self.pending = {}
        if self._commit_error is None:  # else the manifest may name them
            _delete(map(self.path, self._new_records))
        self._new_records.clear()

    def _check_commit(self) -> None:
        if self._commit_error is not None:
            raise OSError(
                errno.EIO,
                f"the disk has failed ({self._commit_error}) during a commit: the folder has either that step or the one before, "
                "whole. Close this relay, and continue with FileShelf(..., resume=True)",
                str(self.folder),
            )

    def latest(self, block: Block) -> BlockRecord:
        """Return the last record of a block, committed or not."""
        return self.pending.get(block) or self.committed[block]

    def path(self, record: BlockRecord) -> Path:
        """Return the file of a record."""
        return self.folder / f"{quote(record.file, safe=' ')}.{'ab'[record.copy_index]}"

    def delete(self, blocks: Iterable[Block]) -> None:
        """Delete both copies of blocks that the manifest does not name."""
        for block in blocks:
            for record in (self.committed.pop(block, None), self.pending.pop(block, None)):
                if record is not None:
                    _delete(self.path(replace(record, copy_index=i)) for i in (0, 1))

    def delete_orphans(self) -> None:
        """Delete files without a committed record, left by an earlier process: detached layers, an unfinished edit."""
        named = {self.path(replace(record, copy_index=i)) for record in self.committed.values() for i in (0, 1)}
        _delete(path for path in self.folder.iterdir() if path not in named)

    def close(self) -> None:
        """Join the threads."""
        self.reads.shutdown(wait=True)
        self.writes.shutdown(wait=True)


def _delete(paths: Iterable[Path]) -> None:
    for path in paths:
        with suppress(OSError):  # harmless, and `delete_orphans` tries again
            path.unlink()


def record_event(
    trace: Trace, lane: str, kind: str, layer: str, start_s: float, nbytes: int, k: int = -1, visit: int = -1
) -> None:
    """Add an event on a lane of the disk that ends now."""
    t0 = trace.began_s
    trace.add(Event(lane, kind, start_s - t0, time.perf_counter() - t0, layer, k, nbytes, visit))
