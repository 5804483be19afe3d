"""Updater of a shelf: reads a record, lets the optimizer update it, and writes it to the other copy.

    prefetch ──▶ read ahead, as room allows ──▶ bind ──▶ optimizer ──▶ unbind ──▶ write to the other copy
                                                                                        │ all written
                                                                    commit ◀── finish ◀─┘

Until `commit` the old step stays on the disk, so that an error leaves the old step.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any

from l2l_core.devices import Ledger
from l2l_core.eps import BlockGradients, EPSClock, Masters, Updater, check_newcomers
from l2l_core.eps.blocks import Block, BlockGradient
from l2l_core.eps.optimizers import state_bytes
from l2l_core.model import snapshot_except
from l2l_core.shelf.buffer_pool import BufferPool, PoolBuffer
from l2l_core.shelf.record_layout import RecordLayout, bind_record
from l2l_core.shelf.record_store import RecordStore
from l2l_core.shelf.shelf_manifest import DryRunManifest, ShelfManifest
from l2l_core.trace import Trace


class DiskUpdater:
    """`Updater` that reads each block from its record and writes it back.

    Invariant: records are read in the order of `prefetch` calls, so blocks that hold buffers are updated before blocks that wait
    for one.

    Args:
        masters: blocks, which are offloaded, and optimizer.
        inner: updates a block in memory.
        records: files of the shelf.
        pool: buffers for whole records.
        size_of: returns the bytes of the buffer that a block needs.
        host: ledger for the bytes of new optimizer state.
        manifest: manifest of the shelf; may be replaced between two steps.
    """

    def __init__(
        self,
        masters: Masters,
        inner: Updater,
        records: RecordStore,
        pool: BufferPool,
        size_of: Callable[[Block], int],
        host: Ledger,
        manifest: ShelfManifest,
    ) -> None:
        self._masters, self._inner, self._records, self._pool = masters, inner, records, pool
        self._size_of, self._host = size_of, host
        self.manifest: ShelfManifest | DryRunManifest = manifest
        self._read_started = threading.Condition()
        self._queue: deque[Block] = deque()
        self._reads: dict[Block, tuple[PoolBuffer, Future[None]]] = {}
        self._versions: dict[Block, int] = {}  # of the updated blocks, before the step
        self._clock, self._is_committed = EPSClock(Trace()), False
        self.updated: list[Block] = []

    def begin(self, undoable: bool, deferred: bool, clock: EPSClock) -> None:
        self._clock, self._is_committed, self.updated, self._versions = clock, False, [], {}
        self._records.trace = clock.trace
        self.manifest.begin()
        if self.manifest.steps:
            check_newcomers(self._masters, self._has_state)
        self._inner.begin(undoable=False, deferred=deferred, clock=clock)  # the old copy serves for undo

    def _has_state(self, block: Block) -> bool:
        return any(state is not None for state in self._records.committed[block].layout.state)

    def prefetch(self, block: Block) -> None:
        self._queue.append(block)
        self._read_ahead()

    def skip(self, block: Block) -> None:
        buffer, done = self._wait_for_read(block)
        done.exception()
        self._release(buffer)

    def gradients_complete(self, gradients: BlockGradients) -> None:
        self._inner.gradients_complete(gradients)

    def update(self, block: Block, gradient: BlockGradient) -> Mapping[str, float]:
        buffer, done = self._wait_for_read(block)
        try:
            done.result()
            self._clock.start()  # the wait for the disk is not part of the update
            layout, stats = self._update_in_buffer(block, gradient, buffer)
        except BaseException:
            self._release(buffer)
            raise
        self._records.write(block, layout, buffer.flat[: layout.nbytes], partial(self._release, buffer))
        return stats

    def _update_in_buffer(
        self, block: Block, gradient: BlockGradient, buffer: PoolBuffer
    ) -> tuple[RecordLayout, Mapping[str, float]]:
        """Update the block whose record is in the buffer, and turn the buffer into its new record."""
        before = self._records.committed[block].layout
        self._versions[block] = block.version
        with bind_record(self._masters, block, before, buffer.flat) as states:
            stats = self._inner.update(block, gradient)
        layout, tensors = RecordLayout.of(block.layout, states)
        if layout.nbytes > len(buffer.flat):
            raise ValueError(
                f"the optimizer keeps {layout.nbytes - layout.weights_bytes:,} bytes of state for {block.key}, but a trial with "
                f"small parameters needed at most {len(buffer.flat) - layout.weights_bytes:,}: a shelf cannot plan for state "
                "that grows faster than the parameters. Use another optimizer, or masters in memory. The old step is kept"
            )
        new = state_bytes(*(each for each in states if each is not None)) if layout.tensors != before.tensors else 0
        self._host.book("optimizer", "made in a first update", new)
        layout.write_states(buffer.flat, tensors, before)
        self._host.release("optimizer", "made in a first update", new)
        return layout, stats

    def finish(self, gradients: BlockGradients) -> None:
        self._records.wait_for_writes()
        restore = snapshot_except(vars(self._masters.optimizer), {"state"})
        self._inner.finish(gradients)
        steps = self.manifest.steps + 1
        try:
            self._records.commit(partial(self.manifest.write_next, steps), partial(self._activate, steps))
        except BaseException:
            if not self._is_committed:
                restore()
            raise
        self.updated = self._inner.updated

    def _activate(self, steps: int) -> None:
        self.manifest.activate(steps)
        self._is_committed = True

    def undo(self) -> None:
        self._records.rollback()  # waits for a commit too
        with self._read_started:
            self._queue.clear()
            reads, self._reads = self._reads, {}
        for buffer, done in reads.values():
            done.exception()
            self._release(buffer)
        if self._is_committed:
            self.updated = self._inner.updated
        else:
            for block, version in self._versions.items():
                block.version = version
            self._inner.updated.clear()
        self._inner.undo()

    def state_of(self, block: Block) -> Sequence[Mapping[str, Any]]:
        return [{} for _ in block.params]  # not in memory

    # -- buffers -------------------------------------------------------------------------------------------------------

    def _read_ahead(self) -> None:
        """Start the next reads for which there is room, without waiting: loads use the same thread."""
        with self._read_started:
            while self._queue and (buffer := self._pool.acquire(self._size_of(self._queue[0]))) is not None:
                block = self._queue.popleft()
                on_disk = self._records.committed[block].layout.nbytes
                self._reads[block] = buffer, self._records.read(block, buffer.flat[:on_disk])
            self._read_started.notify_all()

    def _wait_for_read(self, block: Block) -> tuple[PoolBuffer, Future[None]]:
        with self._read_started:
            self._read_started.wait_for(lambda: block in self._reads)
            return self._reads.pop(block)

    def _release(self, buffer: PoolBuffer) -> None:
        self._pool.release(buffer)
        self._read_ahead()
