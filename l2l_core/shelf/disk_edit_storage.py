"""Storage for edits of a shelf: an edit is committed like a step.

    lease ──▶ read ──▶ the edit reads or changes the block ──▶ if changed: write to the other copy ─┐
    store_unit: a new layer ──▶ check room ──▶ write to new files ──────────────────────────────────┤
                                                                              commit, or rollback ◀─┘

Until `commit` the manifest names the old records, so an error or a crash leaves the old stack. Files of detached layers are kept
while undo may need them; the manifest does not name them, and `resume=True` deletes them.
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

_NO_LIMIT = 1 << 62  # an edit holds the few blocks that it needs; the ledger counts them


class DiskEditStorage:
    """Edit storage with blocks in files.

    Invariant: outside of `lease` no block is in memory, except new ones before `store_unit`.

    Args:
        masters: blocks of the stacks, and optimizer.
        records: records of the shelf.
        manifest: manifest of the shelf.
        budget: division of memory.
        device: allocates host memory.
        host: ledger for its bytes.
        guard: makes a new module refuse a state dict without values.
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
        self._guard, self.notes = guard, manifest.notes
        self._leased: set[Block] = set()
        self._changed: set[Block] = set()

    @contextmanager
    def lease(self, blocks: Mapping[Block, StateView], writable: bool) -> Iterator[None]:
        offloaded = {block: view for block, view in blocks.items() if block.offloaded}
        self._begin()
        buffers = []
        try:
            for block, view in offloaded.items():
                layout = self._records.latest(block).layout
                buffer = self._pool.acquire(layout.nbytes)
                assert buffer is not None
                buffers.append(buffer)
                self._records.read(block, buffer.flat).result()
                self._bind(block, view, layout, buffer.flat)
            if writable:
                self._changed.update(self._leased & blocks.keys())
            yield
            for block, view in offloaded.items():
                if block in self._changed:
                    self._write(block, view)
        finally:
            for block, view in offloaded.items():
                self._release(block, view)
            for buffer in buffers:
                self._pool.release(buffer)
            self._pool.close()
            if offloaded:
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
        for block, entry in entries.items():
            view = StateView(entry.masters, entry.state)
            self._write(block, view)
            self._release(block, view)
        self._guard(unit.module)
        self._pool.close()

    def _write(self, block: Block, view: StateView) -> None:
        layout, tensors = RecordLayout.of(block.layout, [view.state.get(master) for master in view.masters])
        buffer = self._pool.acquire(layout.nbytes)
        assert buffer is not None
        layout.weights(buffer.flat, block.layout).copy_(block.values)
        layout.write_states(buffer.flat, tensors, layout)
        self._records.write(block, layout, buffer.flat, partial(self._pool.release, buffer))
        self._records.wait_for_writes()

    def _check_disk_space(self, entries: Mapping[Block, OptimizerEntry]) -> None:
        """Check that the disk has room for both copies of all new layers of this edit."""
        sizes = {block: self._budget.size_of(block) for block in entries}
        new = {block for block in self._records.pending if block not in self._records.committed} - sizes.keys()
        needed = 2 * sum(sizes.values()) + sum(self._budget.size_of(block) for block in new)
        folder = self._records.folder
        if needed > (free := shutil.disk_usage(folder).free):
            raise OSError(
                errno.ENOSPC,
                f"two copies of the new layers with their state take {needed:,} bytes more, and {free:,} are free there: make "
                "room, or drop layers for good first (Drop(..., park=None)). The stack is as it was",
                str(folder),
            )

    def commit(self, units: Sequence[Unit], notes: Notes) -> None:
        apply_split = self._budget.plan_split(units)
        self._begin()
        restore, steps = self._manifest.set_units(units, notes), self._manifest.steps
        self._manifest.begin()
        try:
            self._records.commit(partial(self._manifest.write_next, steps), partial(self._manifest.activate, steps))
        except BaseException:
            restore()
            raise
        self.notes = notes
        apply_split()

    def rollback(self) -> None:
        self._records.rollback()
        self._budget.end_edit()

    def undo_for(self, undo: Callable[[], object]) -> Callable[[], object]:
        return lambda: None  # without reading the disk, which may have failed

    def delete(self, blocks: Iterable[Block]) -> None:
        blocks = tuple(blocks)
        self._records.delete(blocks)
        self._budget.forget_blocks(blocks)

    def nbytes(self, blocks: Iterable[Block]) -> int:
        return sum(4 * block.layout.numel + self._records.latest(block).layout.state_bytes for block in blocks)

    def require_all_in_memory(self, what: str, remedy: str) -> NoReturn:
        raise ValueError(
            f"{what} needs all weights in memory at once, and they are in {self._records.folder}: {remedy}. Nothing was changed"
        )

    def _begin(self) -> None:
        """Free the buffers of the step pools, and detach the trace of the last step."""
        self._budget.clear_pools()
        self._records.trace = Trace()
