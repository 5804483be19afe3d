"""Updates of blocks that lie in files: a record is read, its block updated by the optimizer, and the record written anew.

    expect ──▶ read ahead, as far as there is room ──▶ come ──▶ optimizer ──▶ go ──▶ write to the other half
                                                                                        │ all written
                                                                    commit ◀── finish ◀─┘

Between the first update and `commit` the old step stays on the disk, so an error anywhere leaves the old step.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any

from l2l_core.devices import Ledger
from l2l_core.eps import BlockGradients, EPSClock, Masters, OptimizerUpdater, check_newcomers
from l2l_core.eps.blocks import Block, BlockGradient
from l2l_core.eps.optimizers import state_bytes
from l2l_core.model import snapshot_except
from l2l_core.shelf.buffer_pool import BufferPool, PoolBuffer
from l2l_core.shelf.here import bind_record
from l2l_core.shelf.record_layout import RecordLayout
from l2l_core.shelf.record_store import RecordStore
from l2l_core.shelf.shelf_manifest import StepManifest
from l2l_core.trace import Trace


class DiskUpdater:
    """Is an `Update` that brings every block from its file and takes it back there.

    Invariant: records are read in the order in which they were expected, so those that hold buffers are updated before those
    that wait for one.

    Args:
        masters: the optimizer's side of all blocks, which are away.
        inner: updates a block that is here.
        records, pool: files, and buffers for whole records.
        size_of: bytes of the buffer that a block needs.
        host: gets the bytes booked of state that the optimizer has just made.
        manifest: says on the disk which step is whole.

    Attributes:
        manifest: may be exchanged between two steps.
    """

    def __init__(
        self,
        masters: Masters,
        inner: OptimizerUpdater,
        records: RecordStore,
        pool: BufferPool,
        size_of: Callable[[Block], int],
        host: Ledger,
        manifest: StepManifest,
    ) -> None:
        self._masters, self._inner, self._records, self._pool = masters, inner, records, pool
        self._size_of, self._host, self.manifest = size_of, host, manifest
        self._read_started = threading.Condition()
        self._queue: deque[Block] = deque()
        self._reads: dict[Block, tuple[PoolBuffer, Future[None]]] = {}
        self._versions: dict[Block, int] = {}  # of the updated blocks, before
        self._clock, self._is_committed = EPSClock(Trace()), False
        self.updated: list[Block] = []

    def begin(self, undoable: bool, deferred: bool, clock: EPSClock) -> None:
        self._clock, self._is_committed, self.updated, self._versions = clock, False, [], {}
        self._records.trace = clock.trace
        self.manifest.begin()
        if self.manifest.steps:
            check_newcomers(self._masters, self._has_state)
        self._inner.begin(undoable=False, deferred=deferred, clock=clock)  # the old half is the log

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
            self._clock.start()  # waiting for the disk is no work
            form, stats = self._update_in_buffer(block, gradient, buffer)
        except BaseException:
            self._release(buffer)
            raise
        self._records.write(block, form, buffer.flat[: form.nbytes], lambda: self._release(buffer))
        return stats

    def _update_in_buffer(
        self, block: Block, gradient: BlockGradient, buffer: PoolBuffer
    ) -> tuple[RecordLayout, Mapping[str, float]]:
        """Update a block that lies in a buffer, and let the buffer be its new record."""
        before = self._records.committed[block].layout
        self._versions[block] = block.version
        with bind_record(self._masters, block, before, buffer.flat) as known:
            stats = self._inner.update(block, gradient)
        form, tensors = RecordLayout.of(block.layout, known)
        if form.nbytes > len(buffer.flat):
            raise ValueError(
                f"the optimizer keeps {form.nbytes - form.weights_bytes:,} bytes of {block.key}, and a trial with small "
                f"parameters told at most {len(buffer.flat) - form.weights_bytes:,}: it keeps more of large ones, which a shelf "
                "cannot plan for. Use another optimizer, or masters in memory. The old step is kept"
            )
        made = state_bytes(*(each for each in known if each is not None)) if form.tensors != before.tensors else 0
        self._host.book("optimizer", "made in a first update", made)
        form.write_states(buffer.flat, tensors, before)
        self._host.release("optimizer", "made in a first update", made)
        return form, stats

    def finish(self, gradients: BlockGradients) -> None:
        self._records.wait_for_writes()
        put_back = snapshot_except(vars(self._masters.optimizer), {"state"})
        self._inner.finish(gradients)
        steps = self.manifest.steps + 1
        try:
            self._records.commit(partial(self.manifest.write_next, steps), partial(self._activate, steps))
        except BaseException:
            if not self._is_committed:
                put_back()
            raise
        self.updated = self._inner.updated

    def _activate(self, steps: int) -> None:
        self.manifest.activate(steps)
        self._is_committed = True

    def undo(self) -> None:
        self._records.rollback()  # it waits for a commit too
        with self._read_started:
            self._queue.clear()
            reading, self._reads = self._reads, {}
        for buffer, done in reading.values():
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
        return [{} for _ in block.params]  # nothing of it is in memory

    # -- buffers -------------------------------------------------------------------------------------------------------

    def _read_ahead(self) -> None:
        """Begin to read what is wanted next. Never waits: who waited for room in a lane would hold up loads behind it."""
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
