"""Storage of a shelf between steps: for passes over a whole model, and for edits.

Saves and comparisons lease one block at a time, and a load replaces one at a time. An edit leases a few blocks, and is committed
like a step:

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
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any, NoReturn

import torch
from torch import nn

from l2l_core.devices import Device, Ledger, free_bytes
from l2l_core.eps import BlockContents, BlockStates, BlockStorage, LeaseMode, Notes, OptimizerEntry, StateView
from l2l_core.eps.blocks import Block, Unit, check_values_in_place
from l2l_core.eps.optimizers import snapshot_optimizer, state_bytes
from l2l_core.shelf.direct_io import BufferPool
from l2l_core.shelf.memory_sizes import MemoryBudget
from l2l_core.shelf.record_store import RecordLayout, bind_record, weights_in
from l2l_core.shelf.shelf_manifest import ShelfManifest
from l2l_core.trace import Trace

_NO_LIMIT = 1 << 62  # an edit holds the few blocks that it needs; the ledger counts them


class DiskStorage(BlockStorage):
    """Blocks and their optimizer state in records; with several workers, in each one's folder those of its shards.

    Invariant: outside of `lease` no block is in memory, except new ones before `store_unit`.

    Attributes:
        unshard: context in which leased blocks are whole on every worker; by default they are as in the records.
    """

    def __init__(
        self,
        manifest: ShelfManifest,
        budget: MemoryBudget,
        device: Device,
        host: Ledger,
        on_loaded: Callable[[], None],
        guard: Callable[[nn.Module], None],
    ) -> None:
        super().__init__(manifest.masters)
        self.notes = manifest.notes
        self._records, self._manifest = manifest.records, manifest
        self._budget, self._host, self._on_loaded, self._guard = budget, host, on_loaded, guard
        self._pool = BufferPool(_NO_LIMIT, device.host_empty, host, "weights")
        self._leased: set[Block] = set()
        self._changed: set[Block] = set()
        self.unshard: Callable[[Mapping[Block, StateView]], AbstractContextManager[object]] = nullcontext

    @contextmanager
    def lease(self, blocks: Mapping[Block, StateView], mode: LeaseMode) -> Iterator[None]:
        offloaded = {block: view for block, view in blocks.items() if block.offloaded}
        hold = self._hold_values if mode == "read" else self._hold_modules
        with ExitStack() as stack:  # its callbacks run in reverse
            hold(offloaded, stack)
            if mode == "write":
                self._changed.update(self._leased & blocks.keys())
            with self.unshard(offloaded):
                yield
            for block, view in offloaded.items():
                if block in self._changed:
                    self._write(block, view)

    def _hold_values(self, blocks: Mapping[Block, StateView], stack: ExitStack) -> None:
        """Bind blocks to buffers for updates; the parameters of modules, which may be computing, stay as they are."""
        self._records.trace = Trace()  # the last step, whose trace this was, is over
        for block in blocks:
            layout = self._records.committed[block].layout
            flat = stack.enter_context(self._budget.lease_record(block))[: layout.nbytes]
            self._records.read(block, flat).result()
            stack.enter_context(bind_record(self._masters, block, layout, flat))

    def _hold_modules(self, blocks: Mapping[Block, StateView], stack: ExitStack) -> None:
        """Load blocks, those of detached layers too, for an edit."""
        self._begin()
        if blocks:
            stack.callback(self._masters.book_state)
        stack.callback(self._pool.close)
        for block, view in blocks.items():
            layout = self._records.latest(block).layout
            flat = stack.enter_context(self._pool.lease(layout.nbytes))
            self._records.read(block, flat).result()
            stack.callback(self._release, block, view)
            self._bind(block, view, layout, flat)

    def read(self, block: Block, view: StateView) -> BlockContents:
        record = self._records.latest(block)
        path, nbytes = str(self._records.path(record)), record.layout.nbytes
        flat = torch.from_file(path, shared=True, size=nbytes, dtype=torch.uint8)
        return weights_in(flat, block), record.layout.read_states(flat)

    def _bind(self, block: Block, view: StateView, layout: RecordLayout, flat: torch.Tensor) -> None:
        self._leased.add(block)
        block.offloaded = False
        block.set_master(weights_in(flat, block), view.masters)
        pairs = zip(view.masters, layout.read_states(flat), strict=True)
        view.state.update((master, each) for master, each in pairs if each is not None)

    def _release(self, block: Block, view: StateView) -> None:
        self._leased.discard(block)
        self._changed.discard(block)
        block.offload(view.masters)
        for master in view.masters:
            view.state.pop(master, None)

    def load(
        self, blocks: Iterable[Block], read_state: Callable[[Block], BlockStates], fill: Callable[[Block], None]
    ) -> None:
        """Write the first record of each block.

        Raises:
            ValueError: the state is larger than that of the optimizer, or is neither tensors nor plain data.
            OSError: a record cannot be written.
        """
        self._masters.optimizer.state.clear()
        for block in blocks:
            with self._budget.lease_record(block) as flat:
                states = read_state(block)
                layout, tensors = RecordLayout.of(block.master_layout, states)
                if layout.nbytes > len(flat):
                    raise ValueError(
                        f"the state of {block.key} to be loaded has {layout.nbytes - layout.weights_bytes:,} bytes, but a trial "
                        f"with small parameters needed at most {len(flat) - layout.weights_bytes:,} with this optimizer: "
                        "give the optimizer that the save was made with, or load it into memory (no shelf=)"
                    )
                new = state_bytes(*(each for each in states if each is not None))
                self._host.book("optimizer", "on its way to a record", new)
                weights_in(flat, block).zero_()
                layout.write_states(flat, tensors, layout)
                with torch.no_grad(), bind_record(self._masters, block, layout, flat):
                    fill(block)
                self._host.release("optimizer", "on its way to a record", new)
                self._records.write(block, layout, flat[: layout.nbytes])
                self._records.wait_for_writes()

    def snapshot(self) -> Callable[[], None]:
        """See the base class; one step may follow, which writes the other copies and is not recorded on the disk."""
        manifest, committed, steps = self._manifest, dict(self._records.committed), self._manifest.steps
        versions = {block: block.version for block in committed}
        restore_optimizer = snapshot_optimizer(self._masters.optimizer, with_state=True)
        manifest.is_rehearsal = True

        def undo() -> None:
            manifest.is_rehearsal, manifest.steps, self._records.committed = False, steps, committed
            for block, version in versions.items():
                block.version = version
            restore_optimizer()

        return undo

    def commit_load(self, steps: int) -> None:
        self._manifest.begin()
        self._manifest.commit(steps)
        self._on_loaded()

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
        layout, tensors = RecordLayout.of(block.master_layout, [view.state.get(master) for master in view.masters])
        with self._pool.lease(layout.nbytes) as flat:
            weights_in(flat, block).copy_(block.values)
            layout.write_states(flat, tensors, layout)
            self._records.write(block, layout, flat)
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
        restore = self._manifest.set_units(units, notes)
        self._manifest.begin()
        try:
            self._manifest.commit(self._manifest.steps)
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
        return sum(block.master_layout.nbytes + self._records.latest(block).layout.state_bytes for block in blocks)

    def require_all_in_memory(self, what: str, remedy: str) -> NoReturn:
        raise ValueError(
            f"{what} needs all weights in memory at once, and they are in {self._records.folder}: {remedy}. Nothing was changed"
        )

    @contextmanager
    def all_in_memory(self, copies: int) -> Iterator[None]:
        """Hold all blocks in memory in a block of code, and store their values at its end.

        The memory for `copies` of the records must be free.

        Raises:
            ValueError: there is no room for them.
            RuntimeError: at the end, if a parameter has other memory; no value is stored then.
        """
        blocks, optimizer = self._manifest.blocks, self._masters.optimizer
        if (needed := copies * self.nbytes(blocks)) > (free := free_bytes(None)):
            raise ValueError(
                f"all weights and the optimizer's state take {needed:,} bytes of host memory, and {free:,} are free: read "
                "weights by relay.shelf.weights(), one block at a time. Nothing was done"
            )
        try:
            with self.lease(self.views(blocks), "write"):
                leased: Any = optimizer.state
                yield
                if optimizer.state is not leased:  # load_state_dict replaces it
                    new, optimizer.state = dict(optimizer.state), leased
                    leased.clear()
                    leased.update(new)
                for block in blocks:
                    check_values_in_place(block)
            self.commit(self._manifest.units, self.notes)
        except BaseException:
            self.rollback()
            raise

    def _begin(self) -> None:
        """Free the buffers of the step pools, and detach the trace of the last step."""
        self._budget.clear_pools()
        self._records.trace = Trace()
