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
from l2l_core.eps import ByOptimizer, Clock, Masters, Whole, check_newcomers
from l2l_core.eps.blocks import Block, GradientPiece
from l2l_core.eps.optimizers import state_bytes
from l2l_core.model import keep_without
from l2l_core.shelf.form import Form
from l2l_core.shelf.here import here
from l2l_core.shelf.manifest import Steps
from l2l_core.shelf.pool import Buffer, Pool
from l2l_core.shelf.records import Records
from l2l_core.trace import Trace


class ThroughFiles:
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
        inner: ByOptimizer,
        records: Records,
        pool: Pool,
        size_of: Callable[[Block], int],
        host: Ledger,
        manifest: Steps,
    ) -> None:
        self._masters, self._inner, self._records, self._pool = masters, inner, records, pool
        self._size_of, self._host, self.manifest = size_of, host, manifest
        self._changed = threading.Condition()
        self._wanted: deque[Block] = deque()
        self._reading: dict[Block, tuple[Buffer, Future[None]]] = {}
        self._versions: dict[Block, int] = {}  # of the updated blocks, before
        self._clock, self._is_committed = Clock(Trace()), False
        self.updated: list[Block] = []

    def begin(self, logged: bool, deferred: bool, clock: Clock) -> None:
        self._clock, self._is_committed, self.updated, self._versions = clock, False, [], {}
        self._records.trace = clock.trace
        self.manifest.begin()
        if self.manifest.steps:
            check_newcomers(self._masters, self._has_state)
        self._inner.begin(logged=False, deferred=deferred, clock=clock)  # the old half is the log

    def _has_state(self, block: Block) -> bool:
        return any(state is not None for state in self._records.current[block].form.state)

    def expect(self, block: Block) -> None:
        self._wanted.append(block)
        self._read_ahead()

    def spare(self, block: Block) -> None:
        buffer, done = self._await(block)
        done.exception()
        self._release(buffer)

    def gathered(self, whole: Whole) -> None:
        self._inner.gathered(whole)

    def update(self, block: Block, piece: GradientPiece) -> Mapping[str, float]:
        buffer, done = self._await(block)
        try:
            done.result()
            self._clock.start()  # waiting for the disk is no work
            form, stats = self._updated(block, piece, buffer)
        except BaseException:
            self._release(buffer)
            raise
        self._records.write(block, form, buffer.flat[: form.nbytes], lambda: self._release(buffer))
        return stats

    def _updated(self, block: Block, piece: GradientPiece, buffer: Buffer) -> tuple[Form, Mapping[str, float]]:
        """Update a block that lies in a buffer, and let the buffer be its new record."""
        before = self._records.current[block].form
        self._versions[block] = block.version
        with here(self._masters, block, before, buffer.flat) as known:
            stats = self._inner.update(block, piece)
        form, tensors = Form.of(block.layout, known)
        if form.nbytes > len(buffer.flat):
            raise ValueError(
                f"the optimizer keeps {form.nbytes - form.weights_bytes:,} bytes of {block.key}, and a trial with small "
                f"parameters told at most {len(buffer.flat) - form.weights_bytes:,}: it keeps more of large ones, which a shelf "
                "cannot plan for. Use another optimizer, or masters in memory. The old step is kept"
            )
        made = state_bytes(*(each for each in known if each is not None)) if form.tensors != before.tensors else 0
        self._host.book("optimizer", "made in a first update", made)
        form.put(buffer.flat, tensors, before)
        self._host.release("optimizer", "made in a first update", made)
        return form, stats

    def finish(self, whole: Whole) -> None:
        self._records.settle()
        put_back = keep_without(vars(self._masters.optimizer), {"state"})
        self._inner.finish(whole)
        steps = self.manifest.steps + 1
        try:
            self._records.commit(partial(self.manifest.prepare, steps), partial(self._switch, steps))
        except BaseException:
            if not self._is_committed:
                put_back()
            raise
        self.updated = self._inner.updated

    def _switch(self, steps: int) -> None:
        self.manifest.switch(steps)
        self._is_committed = True

    def undo(self) -> None:
        self._records.forget()  # it waits for a commit too
        with self._changed:
            self._wanted.clear()
            reading, self._reading = self._reading, {}
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
        with self._changed:
            while self._wanted and (buffer := self._pool.take(self._size_of(self._wanted[0]))) is not None:
                block = self._wanted.popleft()
                on_disk = self._records.current[block].form.nbytes
                self._reading[block] = buffer, self._records.read(block, buffer.flat[:on_disk])
            self._changed.notify_all()

    def _await(self, block: Block) -> tuple[Buffer, Future[None]]:
        with self._changed:
            self._changed.wait_for(lambda: block in self._reading)
            return self._reading.pop(block)

    def _release(self, buffer: Buffer) -> None:
        self._pool.give_back(buffer)
        self._read_ahead()
