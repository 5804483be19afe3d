"""Storage of blocks and their optimizer state: between steps, and as a source of loads.

The classes are those of blocks in memory, and the bases of other storage, such as files. A pass over a whole model leases one
block after another, each as briefly as possible, so that it also works if only one block at a time fits into memory.

A GPU's copy engine cannot cast: to load bfloat16 weights at 2 bytes per parameter, the host casts them once per pass, on a
separate thread, in the order of the layers and ahead of their loads. This costs 2 bytes of pinned host memory per parameter, and
4 bytes read and 2 written per pass. A cast per pass, rather than per update, includes weights that were changed between steps,
and is done before backward, when the EPS is busy.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping, MutableMapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal, NamedTuple

import torch
from torch import nn

from l2l_core.devices import Device, Ledger, Ticket, serial_executor
from l2l_core.eps.blocks import Block, Unit
from l2l_core.eps.masters import Masters, OptimizerEntry
from l2l_core.trace import Trace

BlockStates = list[dict[str, Any] | None]  # optimizer state of each parameter of a block, or None
BlockContents = tuple[torch.Tensor, BlockStates]  # weights and state
Notes = dict[str, Any]
LeaseMode = Literal["read", "load", "write"]


class StateView(NamedTuple):
    """The optimizer's parameters of a block, and a mapping with their state (and possibly that of others)."""

    masters: Sequence[nn.Parameter]
    state: MutableMapping[nn.Parameter, dict[str, Any]]


class BlockStorage:
    """Storage of the blocks of an EPS between two steps: saves, loads, comparisons and edits go through it.

    This class has blocks in memory, where an edit takes effect at once. With other storage a block is in memory while it is
    leased, and all changes of an edit, from the first one to `commit` or `rollback`, take effect together.

    Attributes:
        notes: plain data given to the last `commit`, also by an earlier process.
    """

    def __init__(self, masters: Masters) -> None:
        self._masters = masters
        self.notes: Notes = {}

    def views(self, blocks: Iterable[Block]) -> dict[Block, StateView]:
        """Return the arguments of `lease` for blocks that are not of detached layers."""
        state: Any = self._masters.optimizer.state
        return {block: StateView(self._masters.params_of(block), state) for block in blocks}

    def lease(self, blocks: Mapping[Block, StateView], mode: LeaseMode) -> AbstractContextManager[None]:
        """Keep weights and state of blocks in memory inside the context.

        "read" is for `values` and the optimizer's state, of blocks in the stack; "load" for the parameters of modules too; with
        "write", changes take effect at `commit`.
        """
        return nullcontext()

    def read(self, block: Block, view: StateView) -> BlockContents:
        """Return weights and state of a block, read-only; files are memory-mapped."""
        return block.values, [view.state.get(master) for master in view.masters]

    def nbytes(self, blocks: Iterable[Block]) -> int:
        """Return the bytes of weights and optimizer state of blocks."""
        return sum(block.nbytes + self._masters.entry_of(block).nbytes for block in blocks)

    def snapshot(self) -> Callable[[], None]:
        """Copy all weights, versions and optimizer state; call the result to restore them exactly."""
        return self._masters.snapshot()

    def require_all_in_memory(self, what: str, remedy: str) -> None:
        """Prepare for an operation that needs all weights at once, or raise ValueError."""

    # -- loading a save ------------------------------------------------------------------------------------------------

    def load(
        self, blocks: Iterable[Block], read_state: Callable[[Block], BlockStates], fill: Callable[[Block], None]
    ) -> None:
        """Replace weights and state of blocks; the optimizer state of all others is dropped.

        `blocks` are all of them, each once; `fill` writes the weights of a block into `values`. In memory, everything is read
        before any block changes, so that it cannot fail half-way.
        """
        masters, state = self._masters, self._masters.optimizer.state
        states = {block: read_state(block) for block in blocks}
        with torch.no_grad():
            for block in states:
                fill(block)
        state.clear()
        for block, of_params in states.items():
            pairs = zip(masters.params_of(block), of_params, strict=True)
            state.update((param, each) for param, each in pairs if each is not None)
        masters.book_state()

    def commit_load(self, steps: int) -> None:
        """Commit a load after everything else (settings, versions, buffers, random states) is that of step `steps`."""

    # -- edits ---------------------------------------------------------------------------------------------------------

    def store_unit(self, unit: Unit, entries: Mapping[Block, OptimizerEntry]) -> None:
        """Store a new layer, in memory so far, before it joins the stack.

        Raises:
            ValueError, OSError: there is no room for it.
        """

    def commit(self, units: Sequence[Unit], notes: Notes) -> None:
        """Commit the edit; `units` are the shell and the layers now.

        Raises:
            ValueError, OSError: the commit failed, and the state before the edit is in force.
        """

    def rollback(self) -> None:
        """Discard changes since the last `commit`; memory has been restored by the caller."""

    def undo_for(self, undo: Callable[[], object]) -> Callable[[], object]:
        """Return the function that restores changed values before `commit`: `undo`, unless `rollback` does so."""
        return undo

    def delete(self, blocks: Iterable[Block]) -> None:
        """Delete blocks that can no longer be restored."""


class WeightSource:
    """Lends weights for loads; this class, masters in memory, or casts of them for devices whose copies cannot cast.

    One pass lasts from `begin` to `end`; a block is acquired before each load. Casts are booked in the ledger `host`.

    Attributes:
        reads_ahead: whether `prefetch` has an effect.
    """

    reads_ahead = False

    def __init__(self, device: Device, host: Ledger) -> None:
        self._device, self._host, self._dtype = device, host, torch.float32
        self._thread: ThreadPoolExecutor | None = None
        self._cast_jobs: dict[Block, Future[torch.Tensor]] = {}

    def begin(self, units: Sequence[Unit], dtype: torch.dtype, trace: Trace) -> None:
        """Begin a pass that will load these units, in about this order, as `dtype`; events are added to `trace`."""
        self.end()
        self._dtype = dtype
        every = dict.fromkeys(block for unit in units for block in unit.blocks)
        blocks = [block for block in every if not block.in_bytes and block.master.dtype != dtype]
        if self._device.in_host_memory or not blocks:
            return
        if self._thread is None:
            self._thread = serial_executor("wire", max(1, torch.get_num_threads() // 2))
        for block in blocks:
            if block.cast is None or block.cast.dtype != dtype:
                block.cast = self._device.host_empty(block.master.numel(), dtype)
                self._host.book("weights", "wire", block.cast.nbytes)
                weakref.finalize(block.cast, self._host.release, "weights", "wire", block.cast.nbytes)
            self._cast_jobs[block] = self._thread.submit(block.cast.copy_, block.master)

    def prefetch(self, units: Sequence[Unit]) -> None:
        """Announce the units that will probably be acquired next, in order."""

    def acquire(self, block: Block) -> torch.Tensor:
        """Return a host buffer, (slot_numel,), with the block's weights as of `begin`; bytes are shown in the pass's dtype."""
        if block.in_bytes:
            return block.master.view(self._dtype)  # so that a load is of one dtype
        cast = self._cast_jobs.get(block)
        return block.master if cast is None else cast.result()

    def release(self, block: Block, load: Ticket | None) -> None:
        """Return the buffer of a block, after compute has waited for `load`.

        A GPU may still be reading: abandon the ticket before writing to the buffer.
        """

    def end(self) -> None:
        """End the pass, also after an error."""
        jobs, self._cast_jobs = self._cast_jobs, {}
        for job in jobs.values():  # all before the first wait, during which the next would begin
            job.cancel()
        for job in jobs.values():
            if not job.cancelled():
                job.exception()  # waits; `acquire` has raised the error

    def close(self) -> None:
        """Release threads and files."""
        self.end()
        if self._thread is not None:
            self._thread.shutdown(wait=True)
            self._thread = None
