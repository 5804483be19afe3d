"""Block storage of a shelf: reads or replaces the blocks of a model one at a time."""

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
from l2l_core.shelf.record_layout import RecordLayout, bind_record
from l2l_core.shelf.record_store import RecordStore
from l2l_core.shelf.shelf_manifest import DryRunManifest, ShelfManifest
from l2l_core.trace import Trace


class DiskBlockStorage:
    """Blocks and their optimizer state in records.

    Args:
        masters: blocks and optimizer.
        records: files of the shelf.
        pool: buffers for whole records.
        size_of: returns the bytes of the buffer that a block needs.
        host: ledger for the bytes of state before it is copied to a buffer.
        manifest: manifest of the shelf.
        updater: updater of the shelf.
        on_loaded: called after a whole model has been loaded.
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
        layout = self._records.committed[block].layout
        self._records.trace = Trace()  # the last step, whose trace this was, is over
        with self._leased_buffer(block) as buffer:
            self._records.read(block, buffer.flat[: layout.nbytes]).result()
            with bind_record(self._masters, block, layout, buffer.flat):
                yield

    def nbytes(self, block: Block) -> int:
        return self._records.committed[block].layout.nbytes

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
            with self._leased_buffer(block) as buffer:
                states = read_state(block)
                layout, tensors = RecordLayout.of(block.layout, states)
                if layout.nbytes > len(buffer.flat):
                    raise ValueError(
                        f"the state of {block.key} to be loaded has {layout.nbytes - layout.weights_bytes:,} bytes, but a trial "
                        f"with small parameters needed at most {len(buffer.flat) - layout.weights_bytes:,} with this optimizer: "
                        "give the optimizer that the save was made with, or load it into memory (no shelf=)"
                    )
                new = state_bytes(*(each for each in states if each is not None))
                self._host.book("optimizer", "on its way to a record", new)
                weights, params = layout.weights(buffer.flat, block.layout).zero_(), self._masters.params_of(block)
                block.bind(weights, params)
                try:
                    with torch.no_grad():
                        fill(block)
                finally:
                    block.unbind(params)
                layout.write_states(buffer.flat, tensors, layout)
                self._host.release("optimizer", "on its way to a record", new)
                self._records.write(block, layout, buffer.flat[: layout.nbytes], lambda: None)
                self._records.wait_for_writes()

    def snapshot(self) -> Callable[[], None]:
        """See `BlockStorage`; one step may follow, which writes the other copies and is not recorded on the disk."""
        updater, manifest, committed = self._updater, self._updater.manifest, dict(self._records.committed)
        versions = {block: block.version for block in committed}
        restore_optimizer = snapshot_value(vars(self._masters.optimizer))
        updater.manifest = DryRunManifest(manifest.steps)

        def undo() -> None:
            updater.manifest, self._records.committed = manifest, committed
            for block, version in versions.items():
                block.version = version
            restore_optimizer()

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
