"""The eager param-server (EPS): masters, gradients, optimizer state and version of every layer, on the host.

It receives gradients, reduces them and updates each block: the lane ``eps``, on a separate thread, or in the caller's thread if
nothing is to overlap. It is independent of devices and of the order of layers.

    push_gradient ──▶ buffer ──▶ check, reduce ──▶ complete ──▶ update     eager: as soon as a block's gradient is complete
                                    │                 ▲                    deferred: in `finish`, when all are complete
                                    └─▶ part of k ──▶ sum, k = 0 .. K-1
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch.optim import Optimizer

from l2l_core.config import RelayConfig
from l2l_core.devices import Copy, InlineExecutor, Ticket
from l2l_core.eps.block_storage import BlockStorage
from l2l_core.eps.blocks import Block, BlockGradient, Unit, check_no_stray_grads
from l2l_core.eps.gradient_buffers import GradientBuffers, Reducer, check_finite, joint_norm
from l2l_core.eps.gradient_codec import GradientCodec, Residuals, make_codec
from l2l_core.eps.masters import Masters
from l2l_core.eps.optimizers import hooks_take_turns, user_hooks
from l2l_core.eps.updater import EPSClock, Updater, clear_grads
from l2l_core.model import ThreadState
from l2l_core.schedule_rules import MAX_PENDING_GRADIENTS
from l2l_core.trace import Trace

SendFn = Callable[[list[Copy]], Ticket]

_INLINE = InlineExecutor(ThreadState.new_thread)


class LayerStore:
    """Receives the gradients of a step and updates every block with them.

    Invariant: a block is updated at most once per step, after all of its gradient has arrived; `Block.version` counts the
    updates. During a step, only work submitted here writes masters, one job after another.
    Updater, reducer and storage may be replaced before the first step. `thread` runs jobs in order.

    Attributes:
        grad_norm: norm of all gradients of the last step, before clipping; of this worker's own ones without clipping.

    Example:
        >>> result = relay.step(batch)
        >>> relay.store.grad_norm == result.grad_norm
        True
    """

    def __init__(
        self, masters: Masters, gradients: GradientBuffers, residuals: Residuals, thread: ThreadPoolExecutor
    ) -> None:
        self.masters, self.gradients, self.residuals, self.thread = masters, gradients, residuals, thread
        self.updater, self.reducer = Updater(masters), Reducer()
        self.storage = BlockStorage(masters)
        self._codec = GradientCodec(residuals)
        self._executor: Executor = thread
        self._received_parts: set[tuple[Block, int]] = set()  # (block, k) of parts pushed in this step
        self._jobs: list[Future[None]] = []
        self._unfinished: deque[Future[None]] = deque()  # updates of blocks with all parts
        self._config, self._clock, self._failed = RelayConfig(), EPSClock(Trace()), False
        self._norms: dict[Block, float] = {}  # of the gradients of this step
        self.grad_norm = 0.0

    # -- one step ------------------------------------------------------------------------------------------------------

    def begin(self, config: RelayConfig, trace: Trace) -> None:
        """Begin a step.

        Raises:
            ValueError: the optimizer has a step hook and updates are eager, or it refuses to step.
        """
        if config.update == "deferred" and hooks_take_turns(self.optimizer):
            config = replace(config, update="whole")  # a hook may see what an earlier optimizer's step has changed
        self._config, self._clock = config, EPSClock(trace)
        self._executor = self.thread if config.ahead else _INLINE  # the serial relay: nothing runs in the background
        self._reset()
        self._codec = make_codec(config, trace.step, self.residuals)
        self._codec.begin(self.masters.blocks)
        self.reducer.begin(self.masters, config, self._clock)
        self.updater.begin(config, self._clock)

    def _reset(self) -> None:
        for unit in self.masters.units:
            unit.stats.clear()
        self.gradients.begin(bounded=self._config.update == "eager")
        self._received_parts.clear()
        self._unfinished.clear()
        self._norms.clear()
        self._jobs, self._failed = [], False

    def push_gradient(
        self, unit: Unit, block: Block, gradient: BlockGradient, send: SendFn, k: int | None = None
    ) -> Ticket:
        """Push a gradient of `block`, made by the backward of `unit`: the complete one, or a part of micro-batch `k`.

        `gradient` is on the device; its buffer may be reused when the ticket is done. `send` starts copies to the host.
        """
        # Parts are not bounded: they wait for their sum, and a few of them would block the next one for ever
        on_host = replace(gradient, flat=self.gradients.acquire(gradient.trained.numel, bounded=k is None))
        if k is None:
            packed = self._codec.pack(block, gradient)
            pushed = send([(on_host.flat[: packed.numel()], packed)])
            if self._config.update == "eager":
                self.masters.return_params(block)
                self.updater.prefetch(block)
            self._submit(lambda: self._receive(unit, block, on_host, pushed))
        else:
            targets, sources = on_host.views(), gradient.views()
            pushed = send([(targets[i], source) for i, source in sources.items()])
            self._received_parts.add((block, k))  # now, since `has_part` includes parts in transit
            self._submit(lambda: self._receive_part(unit, block, k, on_host, pushed))
        return pushed

    def has_part(self, block: Block, k: int) -> bool:
        """Return whether a visit has pushed a part of micro-batch `k`."""
        return (block, k) in self._received_parts

    def withdraw_part(self, block: Block, k: int, wanted: Sequence[int]) -> dict[int, torch.Tensor]:
        """Remove and return gradients of some of the block's parameters, by index; the next part must contain them."""
        taken: dict[int, torch.Tensor] = {}
        self._submit(lambda: taken.update(self.gradients.take_part(block, k, wanted)))
        self._jobs[-1].exception()  # in order, so all earlier parts are added; `wait` raises errors
        return taken

    def finish_block(self, block: Block) -> None:
        """Reduce the parts of `block`, which are complete; eager updates follow.

        Waits if the EPS falls behind, since the buffers of parts are not bounded otherwise.
        """
        if self._config.update == "eager":
            self.masters.return_params(block)
            self.updater.prefetch(block)
            self._submit(partial(self._reduce_and_update, block))
            self._unfinished.append(self._jobs[-1])
            while len(self._unfinished) > MAX_PENDING_GRADIENTS:
                self._unfinished.popleft().exception()  # `wait` raises errors

    def _reduce_and_update(self, block: Block) -> None:
        self._reduce_parts(block)
        self._update(block)

    def finish(self) -> None:
        """Wait for all gradients and updates; deferred updates run now.

        Raises:
            NonFiniteError, or the optimizer's error.
        """
        self.wait()  # the thread may still add parts
        for block in self.masters.blocks:
            self.masters.return_params(block)
        for block in self.reducer.blocks_to_reduce(self.masters, list(self.gradients.parts)):
            self._submit(partial(self._reduce_parts, block))
        self.wait()
        if self._config.max_grad_norm is not None:  # after the sums, since the norm is of all gradients
            self._submit(self._clip)
        self.wait()
        if self._config.max_grad_norm is None:
            self.grad_norm = math.hypot(*self._norms.values())
        if self._config.update == "deferred":
            self.updater.gradients_complete(self.gradients.complete)
        complete = dict(
            self.gradients.complete
        )  # for hooks: updates remove entries, but buffers stay until the next step
        if self._config.update == "whole":
            self._submit(partial(self._update_whole, complete))
        else:
            for block in complete:
                self.updater.prefetch(block)
                self._submit(partial(self._update, block))
        self.wait()
        for block in self.masters.blocks:  # set after its update
            check_no_stray_grads(block, block.trained.indices)
        self.reducer.finish()  # before the step is final: another worker's update may have failed
        self.updater.finish(complete)
        self._codec.finish(self.masters.blocks)
        self._norms.clear()  # else it would keep blocks that are dropped next in memory
        self._release_params()

    def _release_params(self) -> None:
        for block in self.masters.blocks:
            block.points_to_master = False

    def wait(self) -> None:
        """Wait for all submitted work; raise the first error (work after it is skipped)."""
        errors = [error for job in self._jobs if (error := job.exception()) is not None]
        self._jobs = []  # after the wait: if that is interrupted, `rollback` must wait for the jobs
        if errors:
            raise errors[0]

    def raise_failure(self) -> None:
        """Raise an error of the background work, if any, without waiting for the rest."""
        if self._failed:
            self.wait()

    def rollback(self) -> None:
        """Undo this step's updates if they are undoable, and drop its gradients."""
        self._failed = True  # queued jobs do nothing; the running one must end before the undo
        for job in self._jobs:
            job.exception()
        self._release_params()
        for block in self.masters.blocks:
            self.masters.return_params(block)  # an optimizer that failed may have set their data
        self.updater.undo()
        self._codec.undo(self.updated)
        clear_grads(self.masters.model_params)  # clipping may have set them; the next norm must not include them
        self._release_params()
        self.gradients.clear()
        self._reset()

    @property
    def updated(self) -> list[Block]:
        """Blocks that may have new weights in this step; after a failed step, those that do."""
        return self.updater.updated

    @property
    def optimizer(self) -> Optimizer:
        """The optimizer, over the masters."""
        return self.masters.optimizer

    @property
    def has_hooks(self) -> bool:
        """True if the user has registered step hooks."""
        return bool(user_hooks(self.optimizer))

    def close(self) -> None:
        """Join the thread and give the optimizer the model's parameters again."""
        self.thread.shutdown(wait=True)  # first, since a job may still update masters
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
                self.gradients.abort()  # the training thread may wait for a buffer that no update will release
                self.reducer.abort(error)  # and other workers for gradients that will not be sent
                raise

        self._jobs.append(self._executor.submit(guarded))

    # -- jobs ----------------------------------------------------------------------------------------------------------

    def _receive(self, unit: Unit, block: Block, gradient: BlockGradient, pushed: Ticket) -> None:
        pushed.join()
        self._clock.start()
        self._codec.unpack(gradient)
        self._record_norm(block, check_finite(unit, block, gradient))
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
        total = self._reduce(block, self.gradients.parts.pop(block, {}))
        if total is not None:
            self._record_norm(block, joint_norm(total.tensors()))

    def _reduce(self, block: Block, parts: dict[int, BlockGradient]) -> BlockGradient | None:
        total = self.reducer.reduce(block, parts, self.gradients)
        if total is not None:
            self.gradients.complete[block] = total
            self._record_event("reduce", block, total)
        return total

    def _clip(self) -> None:
        self._clock.start()
        assert self._config.max_grad_norm is not None
        self.grad_norm = self.reducer.clip(self.masters, self.gradients.complete, self._config.max_grad_norm)
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

    def _update_whole(self, gradients: dict[Block, BlockGradient]) -> None:
        self._clock.start()
        for block, stats in self.updater.update_whole(gradients).items():  # the first event has the time of all
            self._record_stats(block, **stats)
            self._codec.block_updated(block)
            self._record_event("update", block, gradients[block])
            self._clock.start()
        for piece in gradients.values():
            self.gradients.release(piece.flat)
        self.gradients.complete.clear()

    def _record_norm(self, block: Block, norm: float) -> None:
        self._norms[block] = norm
        self._record_stats(block, grad_norm=norm)

    def _record_stats(self, block: Block, **stats: float) -> None:
        if block in self.masters.owner:
            self.masters.owner[block].stats.update(stats)

    def _record_event(self, kind: str, block: Block, gradient: BlockGradient, k: int = -1) -> None:
        """Add an event for work on a gradient, with the bytes of its buffer, padding included."""
        self._clock.stop(kind, block.key, k, gradient.flat.nbytes)
