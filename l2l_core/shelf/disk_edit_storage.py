"""Edits of layers that lie in files: a few blocks are in memory at a time, and an edit is committed as a step is.

    bring ──▶ read ──▶ the edit reads or changes it ──▶ changed: write to the other half ─┐
    put_away: a new layer ──▶ is there room? ──▶ write to files of its own ───────────────┤
                                                                       all_or_nothing ──▶ commit, or abandon

Until `commit` the manifest names the records of before, so an error or a crash leaves the old stack. Layers that left stay in
their files for as long as undo may want them; the manifest does not name them, and whoever resumes deletes them.
"""

from __future__ import annotations

import errno
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import NoReturn

import torch
from torch import nn

from l2l_core.devices import Device, Ledger
from l2l_core.eps import BlockContents, Masters, Notes, OptimizerEntry, StateView
from l2l_core.eps.blocks import Block, Unit
from l2l_core.shelf.buffer_pool import BufferPool
from l2l_core.shelf.memory_budget import MemoryBudget
from l2l_core.shelf.record_layout import RecordLayout
from l2l_core.shelf.record_store import RecordStore
from l2l_core.shelf.shelf_manifest import ShelfManifest
from l2l_core.trace import Trace

_NO_LIMIT = 1 << 62  # an edit holds what it must, a few blocks; the ledger has it


class DiskEditStorage:
    """Is what edits have at hand where blocks lie in files.

    Invariant: outside of `bring` no block is in memory but new ones that `put_away` has not had yet.

    Args:
        masters: the optimizer's side of all blocks in stacks.
        records, manifest: of the shelf.
        room: in memory, for the largest blocks there are.
        device, host: make memory, and get it booked.
        guard: lets a new module refuse to give out a state without values.
    """

    def __init__(
        self,
        masters: Masters,
        records: RecordStore,
        manifest: ShelfManifest,
        budget: MemoryBudget,
        device: Device,
        host: Ledger,
        guard: Callable[[nn.Module], None],
    ) -> None:
        self._masters, self._records, self._manifest, self._budget = masters, records, manifest, budget
        self._pool = BufferPool(_NO_LIMIT, device.host_empty, host, "weights")
        self._guard = guard
        self._leased: set[Block] = set()
        self._changed: set[Block] = set()

    @property
    def notes(self) -> Notes:
        """What the folder's last commit was told."""
        return self._manifest.notes

    @contextmanager
    def lease(self, blocks: Mapping[Block, StateView], writable: bool) -> Iterator[None]:
        mine = {block: known for block, known in blocks.items() if block.offloaded}
        self._begin()
        buffers = []
        try:
            for block, known in mine.items():
                form = self._records.latest(block).layout
                buffer = self._pool.acquire(form.nbytes)
                assert buffer is not None
                buffers.append(buffer)
                self._records.read(block, buffer.flat).result()
                self._bind(block, known, form, buffer.flat)
            if writable:
                self._changed.update(self._leased & blocks.keys())
            yield
            for block in mine:
                if block in self._changed:
                    self._write(block, mine[block])
        finally:
            for block, known in mine.items():
                self._release(block, known)
            for buffer in buffers:
                self._pool.release(buffer)
            self._pool.close()
            if mine:
                self._masters.book_state()

    def read(self, block: Block, view: StateView) -> BlockContents:
        record = self._records.latest(block)
        path, nbytes = str(self._records.path(record)), record.layout.nbytes
        flat = torch.from_file(path, shared=True, size=nbytes, dtype=torch.uint8)
        return record.layout.weights(flat, block.layout), record.layout.read_states(flat)

    def _bind(self, block: Block, view: StateView, layout: RecordLayout, flat: torch.Tensor) -> None:
        self._leased.add(block)
        block.offloaded = False
        block.set_master(layout.weights(flat, block.layout), view.masters)
        pairs = zip(view.masters, layout.read_states(flat), strict=True)
        view.state.update((master, each) for master, each in pairs if each is not None)

    def _release(self, block: Block, view: StateView) -> None:
        self._leased.discard(block)
        self._changed.discard(block)
        block.offload(view.masters)
        for master in view.masters:
            view.state.pop(master, None)

    def store_unit(self, unit: Unit, entries: Mapping[Block, OptimizerEntry]) -> None:
        self._budget.check_fits(unit, entries)
        self._check_disk_space(entries)
        self._begin()
        for block, side in entries.items():
            known = StateView(side.masters, side.state)
            self._write(block, known)
            self._release(block, known)
        self._guard(unit.module)
        self._pool.close()

    def _write(self, block: Block, view: StateView) -> None:
        form, tensors = RecordLayout.of(block.layout, [view.state.get(master) for master in view.masters])
        buffer = self._pool.acquire(form.nbytes)
        assert buffer is not None
        form.weights(buffer.flat, block.layout).copy_(block.values)
        form.write_states(buffer.flat, tensors, form)
        self._records.write(block, form, buffer.flat, partial(self._pool.release, buffer))
        self._records.wait_for_writes()

    def _check_disk_space(self, entries: Mapping[Block, OptimizerEntry]) -> None:
        """See whether two halves of a new layer have room, and the second ones of those before it."""
        halves = {block: self._budget.size_of(block) for block in entries}
        new = {block for block in self._records.pending if block not in self._records.committed} - halves.keys()
        needed = 2 * sum(halves.values()) + sum(self._budget.size_of(block) for block in new)
        folder = self._records.folder
        if needed > (free := shutil.disk_usage(folder).free):
            raise OSError(
                errno.ENOSPC,
                f"two halves of the new layers with their state take {needed:,} bytes more, and {free:,} are free there: make "
                "room, or drop layers for good first (Drop(..., park=None)). The stack is as it was",
                str(folder),
            )

    def commit(self, units: Sequence[Unit], notes: Notes) -> None:
        share = self._budget.plan_split(units)
        self._begin()
        put_back, steps = self._manifest.set_units(units, notes), self._manifest.steps
        self._manifest.begin()
        try:
            self._records.commit(partial(self._manifest.write_next, steps), partial(self._manifest.activate, steps))
        except BaseException:
            put_back()
            raise
        share()

    def rollback(self) -> None:
        self._records.rollback()
        self._budget.end_edit()

    def undo_for(self, undo: Callable[[], object]) -> Callable[[], object]:
        return lambda: None  # and the disk, which may have failed, is not asked

    def delete(self, blocks: Iterable[Block]) -> None:
        blocks = tuple(blocks)
        self._records.delete(blocks)
        self._budget.forget_blocks(blocks)

    def nbytes(self, blocks: Iterable[Block]) -> int:
        held = [(block, self._records.latest(block).layout) for block in blocks]
        return sum(4 * block.layout.numel + form.state_bytes for block, form in held)

    def require_all_in_memory(self, what: str, remedy: str) -> NoReturn:
        raise ValueError(
            f"{what} needs all weights in memory at once, and they are in {self._records.folder}: {remedy}. Nothing was changed"
        )

    def _begin(self) -> None:
        """Let pools of steps give up what they keep, and the last step's trace be."""
        self._budget.clear_pools()
        self._records.trace = Trace()
