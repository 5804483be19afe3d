"""Going through a whole model on a shelf: a block at a time is read, shown, and let go of; or given other values, and written."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial

import torch

from l2l_core.devices import Ledger
from l2l_core.eps import BlockStates, Masters
from l2l_core.eps.blocks import Block
from l2l_core.eps.optimizers import state_bytes
from l2l_core.model import snapshot_value
from l2l_core.shelf.buffer_pool import BufferPool, PoolBuffer
from l2l_core.shelf.disk_updater import DiskUpdater
from l2l_core.shelf.here import bind_record
from l2l_core.shelf.record_layout import RecordLayout
from l2l_core.shelf.record_store import RecordStore
from l2l_core.shelf.shelf_manifest import DryRunManifest, ShelfManifest
from l2l_core.trace import Trace


class DiskBlockStorage:
    """Has blocks and their state in records.

    Args:
        masters: the optimizer's side of all blocks.
        records, pool: files, and buffers for whole records.
        size_of: bytes of the buffer that a block needs.
        host: gets the bytes booked of state on its way into a buffer.
        manifest: says on the disk which step is whole.
        update: makes steps.
        then: is done when a whole model was received.
    """

    def __init__(
        self,
        masters: Masters,
        records: RecordStore,
        pool: BufferPool,
        size_of: Callable[[Block], int],
        host: Ledger,
        manifest: ShelfManifest,
        updater: DiskUpdater,
        on_loaded: Callable[[], None],
    ) -> None:
        self._masters, self._records, self._pool = masters, records, pool
        self._size_of, self._host, self._manifest = size_of, host, manifest
        self._updater, self._on_loaded = updater, on_loaded

    @contextmanager
    def lease(self, block: Block) -> Iterator[None]:
        form = self._records.committed[block].layout
        self._records.trace = Trace()  # not that of the last step, which is over
        with self._leased_buffer(block) as buffer:
            self._records.read(block, buffer.flat[: form.nbytes]).result()
            with bind_record(self._masters, block, form, buffer.flat):
                yield

    def nbytes(self, block: Block) -> int:
        return self._records.committed[block].layout.nbytes

    def load(
        self, blocks: Iterable[Block], read_state: Callable[[Block], BlockStates], fill: Callable[[Block], None]
    ) -> None:
        """Write the first record of each block.

        Raises:
            ValueError: there is more state than the optimizer keeps, or something that is neither tensor nor plain data.
            OSError: the disk refuses.
        """
        self._masters.optimizer.state.clear()
        for block in blocks:
            with self._leased_buffer(block) as buffer:
                known = read_state(block)
                form, tensors = RecordLayout.of(block.layout, known)
                if form.nbytes > len(buffer.flat):
                    raise ValueError(
                        f"{form.nbytes - form.weights_bytes:,} bytes of state of {block.key} are to be taken over, and a trial "
                        f"with small parameters told that the optimizer keeps at most {len(buffer.flat) - form.weights_bytes:,}: "
                        "give the optimizer that the save was made with, or load it into memory (no shelf=)"
                    )
                made = state_bytes(*(each for each in known if each is not None))
                self._host.book("optimizer", "on its way to a record", made)
                weights, twins = form.weights(buffer.flat, block.layout).zero_(), self._masters.params_of(block)
                block.bind(weights, twins)
                try:
                    with torch.no_grad():
                        fill(block)
                finally:
                    block.unbind(twins)
                form.write_states(buffer.flat, tensors, form)
                self._host.release("optimizer", "on its way to a record", made)
                self._records.write(block, form, buffer.flat[: form.nbytes], lambda: None)
                self._records.wait_for_writes()

    def snapshot(self) -> Callable[[], None]:
        """See `Custody`: the halves that are current now are left alone by one step, which does not count on the disk."""
        update, manifest, current = self._updater, self._updater.manifest, dict(self._records.committed)
        versions = {block: block.version for block in current}
        put_optimizer_back = snapshot_value(vars(self._masters.optimizer))
        update.manifest = DryRunManifest(manifest.steps)

        def undo() -> None:
            update.manifest, self._records.committed = manifest, current
            for block, version in versions.items():
                block.version = version
            put_optimizer_back()

        return undo

    def commit_load(self, steps: int) -> None:
        self._manifest.begin()
        self._records.commit(partial(self._manifest.write_next, steps), partial(self._manifest.activate, steps))
        self._on_loaded()

    @contextmanager
    def _leased_buffer(self, block: Block) -> Iterator[PoolBuffer]:
        buffer = self._pool.acquire(self._size_of(block))
        assert buffer is not None, f"no room for {block.key} between two steps"
        try:
            yield buffer
        finally:
            self._pool.release(buffer)
