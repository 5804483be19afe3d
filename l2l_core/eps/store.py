"""The eager param-server (EPS): masters, gradients, optimizer state and version of every layer, on the host.

It takes gradients, reduces them and updates each block of weights, the lane ``eps``: on a thread of its own, or, where nothing
is to overlap, in the caller's. What it is not: it knows nothing of devices or of the order of layers.

    take ──▶ buffer ──▶ check, reduce ──▶ whole ──▶ update        eager: as soon as a block's gradient is whole
                           │                ▲                     deferred: in `finish`, when all are there
                           └─▶ part of k ──▶ fold, k = 0 .. K-1
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import torch
from torch.optim import Optimizer

from l2l_core.config import RelayConfig
from l2l_core.devices import Copy, Executor, FutureLike, InlineExecutor, Ticket, serial_executor
from l2l_core.eps.block_storage import BlockStorage, MemoryBlockStorage
from l2l_core.eps.blocks import Block, BlockGradient, Unit
from l2l_core.eps.edit_storage import EditStorage, MemoryEditStorage
from l2l_core.eps.eps_clock import EPSClock
from l2l_core.eps.finite import check_finite, joint_norm
from l2l_core.eps.gradient_buffers import GradientBuffers
from l2l_core.eps.gradient_codec import Float32Codec, GradientCodec, make_codec
from l2l_core.eps.masters import Masters
from l2l_core.eps.optimizers import user_hooks
from l2l_core.eps.reducer import LocalReducer, Reducer
from l2l_core.eps.residuals import Residuals
from l2l_core.eps.updater import OptimizerUpdater, Updater
from l2l_core.model import ThreadState
from l2l_core.schedule_rules import MAX_PENDING_GRADIENTS
from l2l_core.trace import Trace

SendFn = Callable[[list[Copy]], Ticket]

_INLINE = InlineExecutor(ThreadState.new_thread)


class LayerStore:
    """Takes the gradients of a step and sees to it that every block is updated by them.

    Invariant: a block is updated at most once per step, after all of its gradient has come, and `Block.version` counts
    those updates. Only what is submitted here writes masters while a step runs, one thing after the other.

    Args:
        masters: the blocks, and the optimizer over them.
        gradients: where gradients wait.
        update: how a block is updated.
        thread: does one thing after the other.
        residuals: what compression leaves out of gradients.
        reducer: what other workers have to say to a gradient.

    Attributes:
        custody: where blocks and their state are between two steps.
        at_hand: how edits get at blocks and state.
    """

    def __init__(
        self,
        masters: Masters,
        gradients: GradientBuffers,
        updater: Updater,
        thread: ThreadPoolExecutor,
        residuals: Residuals,
        reducer: Reducer = LocalReducer(),  # noqa: B008 - without state
    ) -> None:
        self.masters, self.gradients, self.updater = masters, gradients, updater
        self.residuals = residuals
        self._codec: GradientCodec = Float32Codec(residuals)
        self.thread, self.reducer = thread, reducer
        self._executor: Executor = thread
        self.storage: BlockStorage = MemoryBlockStorage(masters)
        self.edit_storage: EditStorage = MemoryEditStorage(masters)
        self._received_parts: set[tuple[Block, int]] = set()  # of which blocks and micro-batches parts were taken
        self._jobs: list[FutureLike] = []
        self._unfinished: deque[FutureLike] = deque()  # updates of blocks whose parts have all come
        self._config, self._clock, self._failed = RelayConfig(), EPSClock(Trace()), False

    @staticmethod
    def create(masters: Masters, gradients: GradientBuffers, residuals: Residuals, cores: int) -> LayerStore:
        """Make the EPS of a relay, in which the user's optimizer updates.

        Args:
            masters, gradients, residuals: as of a store.
            cores: for reducing and updating: one where compute is on the CPU too, most of them beside a GPU. An optimizer that
                adds elements up has as many as in core, since the order in which they are added depends on that.
        """
        thread = serial_executor("eps", cores if masters.findings.elementwise else torch.get_num_threads())
        return LayerStore(masters, gradients, OptimizerUpdater(masters), thread, residuals)

    # -- one step ------------------------------------------------------------------------------------------------------

    def begin(self, config: RelayConfig, trace: Trace) -> None:
        """Open a step.

        Raises:
            ValueError: the optimizer has a step hook and updates are eager, or it would not take a step.
        """
        self._config, self._clock = config, EPSClock(trace)
        self._executor = self.thread if config.ahead else _INLINE  # the serial relay: nothing runs in the background
        self._reset()
        self._codec = make_codec(config, trace.step, self.residuals)
        self._codec.begin(self.masters.blocks)
        self.reducer.begin(self.masters, config, self._clock)
        is_deferred = config.update == "deferred"
        self.updater.begin(undoable=config.rollback or is_deferred, deferred=is_deferred, clock=self._clock)

    def _reset(self) -> None:
        for unit in self.masters.units:
            unit.stats.clear()  # what this step does not tell is not known
        self.gradients.begin(bounded=self._config.update == "eager")
        self._received_parts.clear()
        self._unfinished.clear()
        self._jobs, self._failed = [], False

    def push_gradient(
        self, unit: Unit, block: Block, gradient: BlockGradient, send: SendFn, k: int | None = None
    ) -> Ticket:
        """Take a gradient of `block`: the whole one, to be used now or at the end of the step, or what a visit adds for `k`.

        Args:
            unit: whose backward has made it.
            piece: on the device; its buffer may be used again when the ticket is done.
            send: starts copies to the host.
            k: the micro-batch, where those of a block are kept apart.
        """
        # A part waits for its sum: counted as under way, a few of them would keep the next one waiting for ever
        here = replace(gradient, flat=self.gradients.acquire(gradient.trained.numel, bounded=k is None))
        if k is None:
            packed = self._codec.pack(block, gradient)
            pushed = send([(here.flat[: packed.numel()], packed)])
            if self._config.update == "eager":
                self.updater.prefetch(block)
            self._submit(lambda: self._receive(unit, block, here, pushed))
        else:
            targets, sources = here.views(), gradient.views()
            pushed = send([(targets[i], source) for i, source in sources.items()])
            self._received_parts.add((block, k))  # here, not when it is added: `has_part` must know of one on its way
            self._submit(lambda: self._receive_part(unit, block, k, here, pushed))
        return pushed

    def has_part(self, block: Block, k: int) -> bool:
        """Tell whether a visit has brought a gradient of micro-batch `k` that is kept apart."""
        return (block, k) in self._received_parts

    def withdraw_part(self, block: Block, k: int, wanted: Sequence[int]) -> dict[int, torch.Tensor]:
        """Give out what has come for some of the block's parameters, by index; the next part brings it back, and more."""
        lent: dict[int, torch.Tensor] = {}
        self._submit(lambda: lent.update(self.gradients.take_part(block, k, wanted)))
        self._jobs[-1].exception()  # in order: all parts before are added; an error stays there for `wait`
        return lent

    def finish_block(self, block: Block) -> None:
        """Say that no more parts of `block` will come; eager updates do not wait any longer.

        Where the EPS falls behind, whoever brings parts waits here: its buffers are not bounded otherwise.
        """
        if self._config.update == "eager":
            self.updater.prefetch(block)
            self._submit(lambda: self._reduce_parts(block) or self._update(block))  # `_fold` gives None, so both run
            self._unfinished.append(self._jobs[-1])
            while len(self._unfinished) > MAX_PENDING_GRADIENTS:
                self._unfinished.popleft().exception()  # an error stays there for `wait`

    def finish(self) -> None:
        """Wait for all gradients and updates; deferred updates happen here.

        Raises:
            NonFiniteError, or whatever the optimizer raised.
        """
        self.wait()  # until then the thread may add to what is gone through here
        for block in self.reducer.blocks_to_reduce(self.masters, self.gradients.blocks_with_parts):
            self._submit(lambda block=block: self._reduce_parts(block))  # type: ignore[misc]
        self.wait()
        if self._config.max_grad_norm is not None:  # the norm is of all gradients: folded ones, too
            self._submit(self._clip)
        self.wait()
        if self._config.update == "deferred":
            self.updater.gradients_complete(self.gradients.complete)
        whole = dict(
            self.gradients.complete
        )  # hooks see what updates take out: no buffer is filled before the next step
        for block in whole:
            self.updater.prefetch(block)
            self._submit(lambda block=block: self._update(block))  # type: ignore[misc]
        self.wait()
        self.reducer.finish()  # while it can still be undone: somebody else's last update may have failed
        self.updater.finish(whole)
        self._codec.finish(self.masters.blocks)

    def wait(self) -> None:
        """Wait for the work submitted so far; the first error is raised, the rest of the work was skipped."""
        errors = [error for job in self._jobs if (error := job.exception()) is not None]
        self._jobs = []  # only now: whoever interrupts the wait finds them there, and waits for them before it undoes any
        if errors:
            raise errors[0]

    def raise_failure(self) -> None:
        """Raise an error of the background work if one has happened, without waiting."""
        if self._failed:
            self.wait()

    def rollback(self) -> None:
        """Undo this step's updates where an undo log was kept, and forget its gradients."""
        self._failed = True  # jobs that wait do nothing now, and the one at work must end before its writes are undone
        for job in self._jobs:
            job.exception()
        self.updater.undo()
        self._codec.undo(self.updated)
        for master in self.masters.model_params:
            master.grad = None  # clipping may have set it; the next step's norm must not see it
        self.gradients.clear()
        self._reset()

    @property
    def updated(self) -> list[Block]:
        """Blocks that may hold new weights in this step; after one that failed, those that do."""
        return self.updater.updated

    @property
    def optimizer(self) -> Optimizer:
        """The optimizer, over the masters."""
        return self.masters.optimizer

    @property
    def has_hooks(self) -> bool:
        """Whether the user has registered hooks around a step of the optimizer."""
        return bool(user_hooks(self.optimizer))

    def close(self) -> None:
        """Join the thread and give the optimizer the model's own parameters back."""
        self.thread.shutdown(wait=True)  # first: a job may still step over the masters
        self.masters.restore_model_params()
        for block in self.masters.blocks:
            self.residuals.for_block(block).clear()

    def _submit(self, work: Callable[[], Any]) -> None:
        def guarded() -> None:
            if self._failed:
                return
            try:
                work()
            except BaseException as error:
                self._failed = True
                self.gradients.abort()  # the training thread may wait for room that no update will make
                self.reducer.abort(error)  # and other workers for gradients that will not come
                raise

        self._jobs.append(self._executor.submit(guarded))

    # -- what is submitted --------------------------------------------------------------------------------------------------

    def _receive(self, unit: Unit, block: Block, gradient: BlockGradient, pushed: Ticket) -> None:
        pushed.join()
        self._clock.start()
        self._codec.unpack(gradient)
        self._record_stats(block, grad_norm=check_finite(unit, block, gradient))
        self._reduce(block, {0: gradient})
        if self._config.update == "eager":
            self._update(block)

    def _receive_part(self, unit: Unit, block: Block, k: int, gradient: BlockGradient, pushed: Ticket) -> None:
        pushed.join()
        self._clock.start()
        check_finite(unit, block, gradient)
        self.gradients.add_part(block, k, gradient)
        self._record_event("reduce", block, gradient, k)

    def _reduce_parts(self, block: Block) -> None:
        self._clock.start()
        total = self._reduce(block, self.gradients.take_parts(block))
        if total is not None:
            self._record_stats(block, grad_norm=joint_norm(total.tensors()))

    def _reduce(self, block: Block, parts: dict[int, BlockGradient]) -> BlockGradient | None:
        total = self.reducer.reduce(block, parts, self.gradients)
        if total is not None:
            self.gradients.complete[block] = total
            self._record_event("reduce", block, total)
        return total

    def _clip(self) -> None:
        self._clock.start()
        assert self._config.max_grad_norm is not None
        self.reducer.clip(self.masters, self.gradients.complete, self._config.max_grad_norm)
        self._clock.stop("clip", nbytes=sum(piece.flat.nbytes for piece in self.gradients.complete.values()))

    def _update(self, block: Block) -> None:
        piece = self.gradients.complete.pop(block, None)
        if piece is None:
            self.updater.skip(block)
            return
        self._clock.start()
        self._record_stats(block, **self.updater.update(block, piece))
        self._codec.block_updated(block)
        self.gradients.release(piece.flat)
        self._record_event("update", block, piece)

    def _record_stats(self, block: Block, **stats: float) -> None:
        if block in self.masters.owner:
            self.masters.owner[block].stats.update(stats)

    def _record_event(self, kind: str, block: Block, gradient: BlockGradient, k: int = -1) -> None:
        """Add an event for work on a gradient, with the bytes of its buffer, padding included."""
        self._clock.stop(kind, block.key, k, gradient.flat.nbytes)
