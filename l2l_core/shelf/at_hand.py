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
from l2l_core.eps import Contents, InOptimizer, Masters, Notes, Side
from l2l_core.eps.blocks import Block, Unit
from l2l_core.shelf.form import Form
from l2l_core.shelf.manifest import Manifest
from l2l_core.shelf.pool import Pool
from l2l_core.shelf.records import Records
from l2l_core.shelf.room import Room
from l2l_core.trace import Trace

_NO_LIMIT = 1 << 62  # an edit holds what it must, a few blocks; the ledger has it


class OneEditAtATime:
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
        records: Records,
        manifest: Manifest,
        room: Room,
        device: Device,
        host: Ledger,
        guard: Callable[[nn.Module], None],
    ) -> None:
        self._masters, self._records, self._manifest, self._room = masters, records, manifest, room
        self._pool = Pool(_NO_LIMIT, device.host_empty, host, "weights")
        self._guard = guard
        self._brought: set[Block] = set()
        self._changed: set[Block] = set()

    @property
    def notes(self) -> Notes:
        """What the folder's last commit was told."""
        return self._manifest.notes

    @contextmanager
    def bring(self, blocks: Mapping[Block, InOptimizer], changes: bool) -> Iterator[None]:
        mine = {block: known for block, known in blocks.items() if block.away}
        self._begin()
        buffers = []
        try:
            for block, known in mine.items():
                form = self._records.latest(block).form
                buffer = self._pool.take(form.nbytes)
                assert buffer is not None
                buffers.append(buffer)
                self._records.read(block, buffer.flat).result()
                self._hold(block, known, form, buffer.flat)
            if changes:
                self._changed.update(self._brought & blocks.keys())
            yield
            for block in mine:
                if block in self._changed:
                    self._write(block, mine[block])
        finally:
            for block, known in mine.items():
                self._let_go(block, known)
            for buffer in buffers:
                self._pool.give_back(buffer)
            self._pool.close()
            if mine:
                self._masters.book_state()

    def seen(self, block: Block, held: InOptimizer) -> Contents:
        record = self._records.latest(block)
        path, nbytes = str(self._records.path(record)), record.form.nbytes
        flat = torch.from_file(path, shared=True, size=nbytes, dtype=torch.uint8)
        return record.form.weights(flat, block.layout), record.form.known(flat)

    def _hold(self, block: Block, known: InOptimizer, form: Form, flat: torch.Tensor) -> None:
        self._brought.add(block)
        block.away = False
        block.hold(form.weights(flat, block.layout), known.masters)
        pairs = zip(known.masters, form.known(flat), strict=True)
        known.state.update((master, each) for master, each in pairs if each is not None)

    def _let_go(self, block: Block, known: InOptimizer) -> None:
        self._brought.discard(block)
        self._changed.discard(block)
        block.send_away(known.masters)
        for master in known.masters:
            known.state.pop(master, None)

    def put_away(self, unit: Unit, sides: Mapping[Block, Side]) -> None:
        self._room.check(unit, sides)
        self._check_disk(sides)
        self._begin()
        for block, side in sides.items():
            known = InOptimizer(side.masters, side.state)
            self._write(block, known)
            self._let_go(block, known)
        self._guard(unit.module)
        self._pool.close()

    def _write(self, block: Block, known: InOptimizer) -> None:
        form, tensors = Form.of(block.layout, [known.state.get(master) for master in known.masters])
        buffer = self._pool.take(form.nbytes)
        assert buffer is not None
        form.weights(buffer.flat, block.layout).copy_(block.values)
        form.put(buffer.flat, tensors, form)
        self._records.write(block, form, buffer.flat, partial(self._pool.give_back, buffer))
        self._records.settle()

    def _check_disk(self, sides: Mapping[Block, Side]) -> None:
        """See whether two halves of a new layer have room, and the second ones of those before it."""
        halves = {block: self._room.size_of(block) for block in sides}
        new = {block for block in self._records.coming if block not in self._records.current} - halves.keys()
        needed = 2 * sum(halves.values()) + sum(self._room.size_of(block) for block in new)
        folder = self._records.folder
        if needed > (free := shutil.disk_usage(folder).free):
            raise OSError(
                errno.ENOSPC,
                f"two halves of the new layers with their state take {needed:,} bytes more, and {free:,} are free there: make "
                "room, or drop layers for good first (Drop(..., park=None)). The stack is as it was",
                str(folder),
            )

    def commit(self, units: Sequence[Unit], notes: Notes) -> None:
        share = self._room.shared_out(units)
        self._begin()
        put_back, steps = self._manifest.follow(units, notes), self._manifest.steps
        self._manifest.begin()
        try:
            self._records.commit(partial(self._manifest.prepare, steps), partial(self._manifest.switch, steps))
        except BaseException:
            put_back()
            raise
        share()

    def abandon(self) -> None:
        self._records.forget()
        self._room.forget()

    def way_back(self, rewrite: Callable[[], object]) -> Callable[[], object]:
        return lambda: None  # and the disk, which may have failed, is not asked

    def free(self, blocks: Iterable[Block]) -> None:
        blocks = tuple(blocks)
        self._records.free(blocks)
        self._room.free(blocks)

    def nbytes(self, blocks: Iterable[Block]) -> int:
        held = [(block, self._records.latest(block).form) for block in blocks]
        return sum(4 * block.layout.numel + form.state_bytes for block, form in held)

    def need_all(self, what: str, remedy: str) -> NoReturn:
        raise ValueError(
            f"{what} needs all weights in memory at once, and they are in {self._records.folder}: {remedy}. Nothing was changed"
        )

    def _begin(self) -> None:
        """Let pools of steps give up what they keep, and the last step's trace be."""
        self._room.clear()
        self._records.trace = Trace()
