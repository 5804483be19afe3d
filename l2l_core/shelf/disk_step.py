"""A step of a shelf: weights are read ahead of loads, and updated records are written to the other copy.

    prefetch ──▶ read ahead, as room allows ──▶ bind ──▶ optimizer ──▶ unbind ──▶ write to the other copy
                                                                                        │ all written
                                                                    commit ◀── finish ◀─┘

Until `commit` the old step stays on the disk, so that an error leaves the old step. Reads for loads skip the optimizer state,
which lies behind the weights in a record.
"""

from __future__ import annotations

import threading
from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any

import torch

from l2l_core.config import RelayConfig
from l2l_core.devices import Ledger, Ticket
from l2l_core.eps import BlockGradients, EPSClock, Updater, WeightSource, check_newcomers
from l2l_core.eps.blocks import Block, BlockGradient, Unit
from l2l_core.eps.optimizers import snapshot_optimizer, state_bytes
from l2l_core.shelf.direct_io import BufferPool, PoolBuffer, round_to_pages
from l2l_core.shelf.memory_sizes import MemoryBudget
from l2l_core.shelf.record_store import RecordLayout, RecordStore, bind_record, weights_in
from l2l_core.shelf.shelf_manifest import ShelfManifest
from l2l_core.trace import Trace

_Read = tuple[PoolBuffer, "Future[None]"]


class DiskWeightSource(WeightSource):
    """Weight source that reads blocks from records; with `casts`, loads cannot cast, and it converts weights itself."""

    reads_ahead = True

    def __init__(self, records: RecordStore, pool: BufferPool, casts: bool) -> None:
        self._records, self._pool, self._casts = records, pool, casts
        self._dtype = torch.float32
        self._reads: dict[Block, _Read] = {}
        self._acquired: defaultdict[Block, list[PoolBuffer]] = defaultdict(list)

    def begin(self, units: Sequence[Unit], dtype: torch.dtype, trace: Trace) -> None:
        self.end()
        self._dtype, self._records.trace = dtype, trace

    def prefetch(self, units: Sequence[Unit]) -> None:
        wanted = dict.fromkeys(block for unit in units for block in unit.blocks)
        for block in [block for block in self._reads if block not in wanted]:
            self._discard(block)
        for block in wanted:
            if block not in self._reads and (read := self._start(block)) is not None:
                self._reads[block] = read

    def acquire(self, block: Block) -> torch.Tensor:
        read = self._reads.pop(block, None) or self._start(block)
        while read is None and self._reads:  # free buffers of reads ahead, latest first
            self._discard(next(reversed(self._reads)))
            read = self._start(block)
        if read is None:
            raise ValueError(
                f"memory_bytes of the shelf leaves no room for the weights of {block.key} ({block.layout.nbytes:,} bytes) "
                f"beside {sum(map(len, self._acquired.values()))} blocks in loading: raise memory_bytes, or load fewer layers "
                "ahead (RelayConfig(ahead=...)). The old step is kept"
            )
        buffer, done = read
        try:
            done.result()
        except BaseException:
            self._pool.release(buffer)
            raise
        self._acquired[block].append(buffer)
        if block.in_bytes:
            return buffer.flat[: block.layout.nbytes].view(self._dtype)
        dtype = self._dtype if self._casts else torch.float32
        return buffer.flat[: dtype.itemsize * block.layout.numel].view(dtype)

    def release(self, block: Block, load: Ticket | None) -> None:
        self._pool.release(self._acquired[block].pop(0), load)

    def end(self) -> None:
        for block in list(self._reads):
            self._discard(block)
        for buffers in self._acquired.values():  # not empty after a pass that has failed
            for buffer in buffers:
                self._pool.release(buffer)
        self._acquired.clear()

    def close(self) -> None:
        self.end()

    def _start(self, block: Block) -> _Read | None:
        """Start to read a block's weights, or return None if there is no room."""
        pool, numel = self._pool, block.layout.numel
        raw = pool.acquire(round_to_pages(block.layout.nbytes))
        if raw is None or not self._casts or block.in_bytes or self._dtype == torch.float32:
            return None if raw is None else (raw, self._records.read(block, raw.flat))
        cast = pool.acquire(round_to_pages(self._dtype.itemsize * numel))
        if cast is None:
            pool.release(raw)
            return None

        def convert() -> None:
            target = cast.flat[: self._dtype.itemsize * numel].view(self._dtype)
            target.copy_(weights_in(raw.flat, block))

        done = self._records.read(block, raw.flat, convert)
        done.add_done_callback(lambda _: pool.release(raw))  # also after an error
        return cast, done

    def _discard(self, block: Block) -> None:
        buffer, done = self._reads.pop(block)
        done.exception()  # an error is raised by another call
        self._pool.release(buffer)


class DiskUpdater(Updater):
    """`Updater` that reads each block from its record and writes it back.

    Invariant: records are read in the order of `prefetch` calls, so blocks that hold buffers are updated before blocks that wait
    for one.
    """

    def __init__(self, inner: Updater, manifest: ShelfManifest, budget: MemoryBudget, host: Ledger) -> None:
        super().__init__(manifest.masters)
        self._inner, self._manifest, self._budget, self._host = inner, manifest, budget, host
        self._records = manifest.records
        self._read_started = threading.Condition()
        self._queue: deque[Block] = deque()
        self._reads: dict[Block, tuple[PoolBuffer, Future[None]]] = {}
        self._versions: dict[Block, int] = {}  # of the updated blocks, before the step
        self._clock, self._steps_before = EPSClock(Trace()), 0

    def begin(self, config: RelayConfig, clock: EPSClock) -> None:
        self._budget.plan_split(self._manifest.units)()  # the user may have frozen or unfrozen some
        self._clock, self._steps_before, self.updated, self._versions = clock, self._manifest.steps, [], {}
        self._records.trace = clock.trace
        self._manifest.begin()
        if self._manifest.steps:
            check_newcomers(self._masters, self._has_state)
        self._inner.begin(config, clock)

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
        layout, tensors = RecordLayout.of(block.master_layout, states)
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
        restore = snapshot_optimizer(self._masters.optimizer)
        self._inner.finish(gradients)
        try:
            self._manifest.commit(self._steps_before + 1)
        except BaseException:
            if not self._is_committed:
                restore()
            raise
        self.updated = self._inner.updated

    @property
    def _is_committed(self) -> bool:
        return self._manifest.steps > self._steps_before

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
            while self._queue and (buffer := self._budget.acquire_record(self._queue[0])) is not None:
                block = self._queue.popleft()
                on_disk = self._records.committed[block].layout.nbytes
                self._reads[block] = buffer, self._records.read(block, buffer.flat[:on_disk])
            self._read_started.notify_all()

    def _wait_for_read(self, block: Block) -> tuple[PoolBuffer, Future[None]]:
        with self._read_started:
            self._read_started.wait_for(lambda: block in self._reads)
            return self._reads.pop(block)

    def _release(self, buffer: PoolBuffer) -> None:
        self._budget.updates.release(buffer)
        self._read_ahead()
