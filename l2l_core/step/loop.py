"""The algorithm: one training step as a relay of layers.

    EPS (host)          load            slot (device)                        stash
    ┌─────────┐   ─────[1]────────▶   ┌──────────────────────────┐   ────▶  ┌───────┐
    │ layer l │                       │ forward  k = 0 .. K-1 [2]│          │ (l,k) │
    │ w, m, v │   ◀────[4]─────────   │ backward k = 0 .. K-1 [3]│   ◀────  │  ...  │
    └─────────┘   push, reduce,       └──────────────────────────┘          └───────┘
                  update

    [1] a layer is loaded while the layer before it computes
    [2] it runs all micro-batches before the next layer; each graph is freed at once, its input stays in the stash
    [3] in reverse order: recompute from the stash, backward, sum the gradient over micro-batches
    [4] the gradient is pushed; the EPS reduces it and updates the layer in the background

Two layers, two micro-batches, `ahead=1`, `stash="host"`. A row is one turn: one micro-batch in one visit. Its inputs arrive
during the turn before, its stash leaves during the turn after. `w` are weights, `dw` their gradient, `x(l,k)` is the input of
layer l for micro-batch k, `stash k` all tensors that micro-batch k keeps while it is suspended.

    visit  k  computes               arrives      leaves
    0      0  forward 0              w0, x(0,0)   stash 0
    0      1  forward 0                           stash 1
    1, 2   0  forward 1, backward 1  w1           stash 0       the last layer is not recomputed
    1, 2   1  forward 1, backward 1               stash 1, dw1
    3      0  backward 0             x(0,0)                     w0 is still in its slot
    3      1  backward 0             x(0,1)       dw0

Source: Pudipeddi et al., https://arxiv.org/abs/2002.05645 (L2L and L2L-p).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from itertools import islice

import torch

from l2l_core.batches import divide_loss, leaves_in
from l2l_core.eps import LayerStore
from l2l_core.eps.blocks import Unit
from l2l_core.step.batch_loss import DetachedOutputs, LoadBatchLoss
from l2l_core.step.graph import run_backward, sequence_number, take_gradients
from l2l_core.step.micro_batch import LayerCall, StepContext, SuspendedForward, suspend_all
from l2l_core.step.pass_inputs import PassPlan
from l2l_core.step.step_checks import PerMicroBatch, StepChecks, refuse_frozen_model
from l2l_core.step.traffic import Gradient, GradientSlots, Prefetch
from l2l_core.step.visit_scheduler import Visit, VisitScheduler


class ForwardLoop:
    """Forward pass of all micro-batches: an inference, or the first half of a training step."""

    def __init__(self, ctx: StepContext, scheduler: VisitScheduler, plan: PassPlan, prefetch: Prefetch) -> None:
        self.ctx, self.scheduler, self.plan, self.prefetch = ctx, scheduler, plan, prefetch

    def run_inference(self) -> None:
        """Run the forward pass alone."""
        self.start_forwards(self.plan.layer_order)
        while (unit := self.scheduler.next_unit()) is not None:
            visit = self.scheduler.begin_visit(unit)
            with self.prefetch.visit(unit) as visit.stay:  # [1]
                for forward, upcoming in self.scheduler.iter_turns(visit):  # [2]
                    self.run_turn(forward, visit, upcoming)
                    self.ctx.stash.offload(forward.k, visit.index)

    def compute_batch_loss(self, load_batch_loss: LoadBatchLoss) -> torch.Tensor:
        """Return one loss over the outputs of all micro-batches after an inference."""
        forwards, batch_loss = self.scheduler.forwards, load_batch_loss()
        outputs = [self.detach_outputs(forward).tree for forward in forwards]
        stop = self.ctx.time_event("loss", "shell", -1)
        with forwards[-1].resume_after_end(len(forwards)), self.ctx.watch_backward():
            loss = batch_loss(outputs)
        stop()
        return loss

    def detach_outputs(self, forward: SuspendedForward, check: Callable[[], object] = lambda: None) -> DetachedOutputs:
        """Take the outputs of a finished forward, and `check` it."""
        ctx, k = self.ctx, forward.k
        ctx.stash.fetch([leaf for leaf in leaves_in(forward.result) if isinstance(leaf, torch.Tensor)], k)
        stop = ctx.time_event("shell", "shell", k)
        with ctx.current_turn.activate(k, "shell"), ctx.watch_backward():
            outputs = DetachedOutputs.take(forward)
            check()
        stop()
        ctx.stash.offload(k)
        return outputs

    def start_forwards(self, load_order: Sequence[Unit]) -> None:
        """Run every micro-batch up to its first layer call; prefetch weights in `load_order`."""
        self.prefetch.begin(load_order)
        for forward in self.scheduler.forwards:
            forward.resume()
            self.ctx.stash.offload(forward.k)

    def run_turn(self, forward: SuspendedForward, visit: Visit, upcoming: Sequence[LayerCall]) -> None:
        """Run the layer on one micro-batch, and the shell up to its next layer call."""
        call = forward.waiting_call
        assert call is not None and call.unit is visit.unit, f"{visit.unit.key} k={forward.k}"
        call.visit, call.stay = visit.index, visit.stay
        self.fetch_stash(call, upcoming)
        call.buffers = self.ctx.buffers_of(visit.unit)  # before the layer changes them: a recompute starts from these
        call.policy = self.plan.policy_for(visit.index)
        forward.resume()
        visit.calls += [last for last in forward.calls[-1:] if last is call]  # if it takes part in backward

    def fetch_stash(self, call: LayerCall, upcoming: Sequence[LayerCall]) -> None:
        """Fetch the tensors of `call`, and start to fetch those of the `upcoming` calls."""
        stash = self.ctx.stash
        stash.fetch(call.needed_tensors, call.k, call.unit.key, call.visit)
        for after in upcoming[:1]:
            stash.prefetch(after.needed_tensors, after.k, after.unit.key, after.visit)
        later = upcoming[1 : 1 + stash.prefetch_turns]
        stash.hint_later_turns([(each.needed_tensors, each.unit.key, each.k, each.visit) for each in later])


class TrainLoop:
    """One training step."""

    def __init__(
        self,
        forward_loop: ForwardLoop,
        store: LayerStore,
        slots: GradientSlots,
        shell_gradient: Gradient,
        per_micro_batch: PerMicroBatch,
        checks: StepChecks,
        divisors: Sequence[float],  # the losses divided by them add up to the loss of the step
        load_batch_loss: LoadBatchLoss | None = None,  # with it, micro-batches have no losses
        trains_loss_parameters: bool = True,  # whether parameters that this loss reads get their gradient from it here
    ) -> None:
        self._forward_loop, self._ctx = forward_loop, forward_loop.ctx
        self._scheduler, self._prefetch = forward_loop.scheduler, forward_loop.prefetch
        self._store, self._slots, self._shell_gradient = store, slots, shell_gradient
        self._per_micro_batch, self._checks = per_micro_batch, checks
        self._divisors, self._load_batch_loss = divisors, load_batch_loss
        self._trains_loss_parameters = trains_loss_parameters
        self._losses: list[torch.Tensor] = []
        self._has_gradient = False

    def train(self) -> list[torch.Tensor]:
        """Run the step; return the scaled losses of the micro-batches, which add up to the step's loss."""
        self._forward_loop.start_forwards(self._forward_loop.plan.forward_then_backward)
        self._run_losses()  # of forwards that call no layer
        while (unit := self._scheduler.next_unit()) is not None:
            visit = self._begin_visit(unit)
            with self._prefetch.visit(unit) as visit.stay:  # [1]
                for forward, upcoming in self._scheduler.iter_turns(visit):  # [2]
                    self._forward_loop.run_turn(forward, visit, upcoming)
                    self._run_losses(visit, forward)
                    for last in visit.calls[-1:]:
                        last.suspend(self._ctx)  # tensors saved by its graph are offloaded with the rest
                    self._ctx.stash.offload(forward.k, visit.index)
                self._end_visit(visit)

        if self._load_batch_loss is not None:
            self._run_batch_loss(self._load_batch_loss)
        rest = self._begin_backward()
        # A copy: calls are removed from their visits as they are back-propagated.
        upcoming = deque(call for visit in rest for call in visit.calls)
        for visit in rest:
            self._store.raise_failure()  # if an update failed, the rest of backward is useless
            with self._prefetch.visit(visit.unit):  # [1]
                for call in list(visit.calls):  # [3] in ascending k, the order of gradient accumulation
                    upcoming.popleft()
                    self._forward_loop.fetch_stash(call, list(islice(upcoming, 1 + self._ctx.stash.prefetch_turns)))
                    self._backward(call, visit)
                    self._ctx.stash.offload(call.k, call.visit)
                self._push(visit)  # [4]
        self._slots.hooks.check_no_stray_grads()
        self._shell_gradient.push(at_once=True)
        return self._losses

    def _begin_visit(self, unit: Unit) -> Visit:
        visit = self._scheduler.begin_visit(unit)
        self._checks.check_visit(unit, is_revisit=self._scheduler.visit_counts[unit.key] > 1)
        return visit

    def _end_visit(self, visit: Visit) -> None:
        suspend_all(visit.calls, self._ctx)  # another layer takes the slot: graphs that need these weights are dropped
        if visit.gradient is None:
            return
        if not visit.calls and all(forward.done for forward in self._scheduler.forwards):
            self._push(visit)
        else:  # not the last visit after all: keep this part apart by micro-batch, so that the sum has its order
            self._per_micro_batch.revisited.add(visit.unit.key)
            self._flush(-1, visit.index, visit.gradient)
            visit.gradient.stop()
            visit.gradient = None

    def _begin_backward(self) -> list[Visit]:
        if not self._has_gradient:
            refuse_frozen_model()
        rest = self._scheduler.begin_backward()
        self._prefetch.replan([visit.unit for visit in rest])
        return rest

    # -- loss ----------------------------------------------------------------------------------------------------------

    def _run_losses(self, visit: Visit | None = None, current: SuspendedForward | None = None) -> None:
        """Back-propagate the loss of every finished micro-batch whose predecessors are done, in ascending k.

        Another order would add up the gradients of the shell and of the last layer in another order.
        """
        if self._load_batch_loss is not None:
            return
        while len(self._losses) < len(self._scheduler.forwards) and self._scheduler.forwards[len(self._losses)].done:
            forward = self._scheduler.forwards[len(self._losses)]
            self._run_loss(forward, visit)
            if forward is not current:  # it finished in an earlier turn and was offloaded
                self._ctx.stash.offload(forward.k)

    def _run_loss(self, forward: SuspendedForward, visit: Visit | None) -> None:
        k, ctx = forward.k, self._ctx
        ctx.stash.fetch([forward.result], k)
        stop = ctx.time_event("loss", "shell", k)
        with ctx.current_turn.activate(k, "shell"), ctx.watch_backward():
            loss = divide_loss(forward.result, self._divisors[k])
            forward.result = None
            tail = self._checks.check_loss(forward, loss)
            segments = self._checks.check_forward(forward, tail, self._scheduler.is_irregular())
            self._has_gradient |= tail is not None
            if tail is not None:
                run_backward([(tail, torch.ones_like(loss))])
        for grad in segments[-1].pending_gradients():
            ctx.stash.track(grad, k, "stash", "", fresh=True)
        self._losses.append(loss.detach().clone())
        del loss, tail, segments  # they keep the graph of the last segment alive
        stop()
        self._flush(k, visit.index if visit is not None else -1, None)
        last = forward.calls[-1] if forward.calls else None
        if visit is not None and last in visit.calls and last.kept_graph is not None:  # no recompute of the last layer
            self._backward(last, visit)

    def _run_batch_loss(self, load_batch_loss: LoadBatchLoss) -> None:
        """Back-propagate one loss over the outputs of all micro-batches, then the last segment of each, in ascending k."""
        ctx, forwards = self._ctx, self._scheduler.forwards
        outputs = [self._detach_outputs(forward) for forward in forwards]  # all are checked before anything is trained
        batch_loss = load_batch_loss()
        stop = ctx.time_event("loss", "shell", -1)
        with forwards[-1].resume_after_end(len(forwards)), ctx.watch_backward():
            began = sequence_number()
            loss = batch_loss([each.tree for each in outputs])
            edge = self._checks.check_batch_loss(loss, began)
            self._has_gradient = edge is not None
            if self._trains_loss_parameters:
                self._losses.append(loss.detach().clone())
                run_backward([] if edge is None else [(edge, torch.ones_like(loss))])
            elif edge is not None:
                torch.autograd.backward(loss, inputs=[leaf for each in outputs for leaf, _ in each.leaves])
            del loss, edge, batch_loss
        stop()
        # Of parameters that the loss reads; the micro-batches' parts of their gradient follow.
        self._flush(-1, -1, None)
        for forward, own in zip(forwards, outputs, strict=True):
            self._backward_last_segment(forward, own)

    def _detach_outputs(self, forward: SuspendedForward) -> DetachedOutputs:
        is_irregular = self._scheduler.is_irregular()
        return self._forward_loop.detach_outputs(
            forward, lambda: self._checks.check_forward(forward, None, is_irregular)
        )

    def _backward_last_segment(self, forward: SuspendedForward, outputs: DetachedOutputs) -> None:
        ctx, k, segments = self._ctx, forward.k, forward.segmenter.segments
        last = segments[-1]
        outputs.pass_gradients()
        ctx.stash.fetch(last.pending_gradients(), k)
        if last.has_gradient:
            stop = ctx.time_event("shell", "shell", k)
            with ctx.current_turn.activate(k, "shell"), ctx.watch_backward():
                run_backward(take_gradients(last.boundaries) + self._shell_gradient.partial_sums(k, lambda: last.uses))
            stop()
        for grad in (grad for segment in segments for grad in segment.pending_gradients()):
            ctx.stash.track(grad, k, "stash", "", fresh=True)
        self._flush(k, -1, None)
        ctx.stash.offload(k)

    # -- backward ------------------------------------------------------------------------------------------------------

    def _backward(self, call: LayerCall, visit: Visit) -> None:
        if visit.gradient is None:  # as late as possible: the buffer may still be copied to the host
            visit.gradient = self._slots.acquire(visit.unit)
        call.visit = self._scheduler.backward_index(visit)
        call.backward(self._ctx, visit.gradient.partial_sums, self._shell_gradient.partial_sums)
        # The segment before the call may use parameters to which this run has just contributed. Flushed now, that part is
        # the first summand of the next run (`partial_sums`), as in plain training, and not added to its sum afterwards.
        if self._shell_gradient.holds_part_of(call.segment.uses):
            self._flush(call.k, call.visit, visit.gradient)
        call.backward_segment(self._ctx, self._shell_gradient.partial_sums)
        call.release()
        visit.calls.remove(call)
        self._flush(call.k, call.visit, visit.gradient)

    def _flush(self, k: int, visit: int, gradient: Gradient | None) -> None:
        """Push the per-micro-batch gradients of micro-batch `k`."""
        for each in (self._shell_gradient, gradient):
            if each is not None:
                each.flush(k, visit)

    def _push(self, visit: Visit) -> None:
        if visit.gradient is None:
            return
        visit.gradient.push()
        visit.gradient = None
        # Another visit of the layer may still contribute; to shared blocks, the shell and other layers too, so those are
        # finished at the end of the step.
        if not any(other.calls and other.unit is visit.unit for other in self._scheduler.visits):
            for block in visit.unit.blocks:
                if not block.shared and self._per_micro_batch(block):
                    with self._ctx.clock.stalled():  # until the EPS has caught up
                        self._store.finish_block(block)
