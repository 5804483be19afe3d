"""Going through a whole model on a shelf: a block at a time is read, shown, and let go of; or given other values, and written."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial

import torch

from l2l_core.devices import Ledger
from l2l_core.eps import Known, Masters
from l2l_core.eps.blocks import Block
from l2l_core.eps.optimizers import state_bytes
from l2l_core.model import keep
from l2l_core.shelf.form import Form
from l2l_core.shelf.here import here
from l2l_core.shelf.manifest import Manifest, Tried
from l2l_core.shelf.pool import Buffer, Pool
from l2l_core.shelf.records import Records
from l2l_core.shelf.updates import ThroughFiles
from l2l_core.trace import Trace


class InRecords:
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
        records: Records,
        pool: Pool,
        size_of: Callable[[Block], int],
        host: Ledger,
        manifest: Manifest,
        update: ThroughFiles,
        then: Callable[[], None],
    ) -> None:
        self._masters, self._records, self._pool = masters, records, pool
        self._size_of, self._host, self._manifest = size_of, host, manifest
        self._update, self._then = update, then

    @contextmanager
    def shown(self, block: Block) -> Iterator[None]:
        form = self._records.current[block].form
        self._records.trace = Trace()  # not that of the last step, which is over
        with self._lent(block) as buffer:
            self._records.read(block, buffer.flat[: form.nbytes]).result()
            with here(self._masters, block, form, buffer.flat):
                yield

    def nbytes(self, block: Block) -> int:
        return self._records.current[block].form.nbytes

    def receive(self, blocks: Iterable[Block], read: Callable[[Block], Known], fill: Callable[[Block], None]) -> None:
        """Write the first record of each block.

        Raises:
            ValueError: there is more state than the optimizer keeps, or something that is neither tensor nor plain data.
            OSError: the disk refuses.
        """
        self._masters.optimizer.state.clear()
        for block in blocks:
            with self._lent(block) as buffer:
                known = read(block)
                form, tensors = Form.of(block.layout, known)
                if form.nbytes > len(buffer.flat):
                    raise ValueError(
                        f"{form.nbytes - form.weights_bytes:,} bytes of state of {block.key} are to be taken over, and a trial "
                        f"with small parameters told that the optimizer keeps at most {len(buffer.flat) - form.weights_bytes:,}: "
                        "give the optimizer that the save was made with, or load it into memory (no shelf=)"
                    )
                made = state_bytes(*(each for each in known if each is not None))
                self._host.book("optimizer", "on its way to a record", made)
                weights, twins = form.weights(buffer.flat, block.layout).zero_(), self._masters.params_of(block)
                block.come(weights, twins)
                try:
                    with torch.no_grad():
                        fill(block)
                finally:
                    block.go(twins)
                form.put(buffer.flat, tensors, form)
                self._host.release("optimizer", "on its way to a record", made)
                self._records.write(block, form, buffer.flat[: form.nbytes], lambda: None)
                self._records.settle()

    def snapshot(self) -> Callable[[], None]:
        """See `Custody`: the halves that are current now are left alone by one step, which does not count on the disk."""
        update, manifest, current = self._update, self._update.manifest, dict(self._records.current)
        versions = {block: block.version for block in current}
        put_optimizer_back = keep(vars(self._masters.optimizer))
        update.manifest = Tried(manifest.steps)

        def undo() -> None:
            update.manifest, self._records.current = manifest, current
            for block, version in versions.items():
                block.version = version
            put_optimizer_back()

        return undo

    def received(self, steps: int) -> None:
        self._manifest.begin()
        self._records.commit(partial(self._manifest.prepare, steps), partial(self._manifest.switch, steps))
        self._then()

    @contextmanager
    def _lent(self, block: Block) -> Iterator[Buffer]:
        buffer = self._pool.take(self._size_of(block))
        assert buffer is not None, f"no room for {block.key} between two steps"
        try:
            yield buffer
        finally:
            self._pool.give_back(buffer)
