"""The algorithm: one training step as a relay of layers.

    EPS (host)          load            slot (device)                        stash
    ┌─────────┐   ─────[1]────────▶   ┌──────────────────────────┐   ────▶  ┌───────┐
    │ layer l │                       │ forward  k = 0 .. K-1 [2]│          │ (l,k) │
    │ w, m, v │   ◀────[4]─────────   │ backward k = 0 .. K-1 [3]│   ◀────  │  ...  │
    └─────────┘   push, reduce,       └──────────────────────────┘          └───────┘
                  update

    [1] a layer is loaded while the one before it computes
    [2] it runs all micro-batches before it gives way; a graph goes at once, its input stays in the stash
    [3] in reverse: recompute from the stash, back-propagate, sum the gradient over micro-batches
    [4] the gradient is pushed; the EPS reduces it and updates the layer in the background

Two layers, two micro-batches, one layer ahead, the stash on the host. A row is one turn: one micro-batch in one visit. What
it needs arrives while the turn before computes, what it leaves goes while the next one does. `w` are weights, `dw` their
gradient, `x(l,k)` is what layer l reads of micro-batch k, `image k` all that micro-batch k keeps while others are at work.

    visit  k  computes               arrives      leaves
    0      0  forward 0              w0, x(0,0)   image 0
    0      1  forward 0                           image 1
    1, 2   0  forward 1, backward 1  w1           image 0       the last layer turns round at once: it is not run twice
    1, 2   1  forward 1, backward 1               image 1, dw1
    3      0  backward 0             x(0,0)                     w0 is still there
    3      1  backward 0             x(0,1)       dw0

Source: Pudipeddi et al., https://arxiv.org/abs/2002.05645 (L2L and L2L-p).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from itertools import islice

import torch

from l2l_core.eps import LayerStore
from l2l_core.eps.blocks import Unit
from l2l_core.step.graph import run_backward
from l2l_core.step.micro_batch import LayerCall, StepContext, SuspendedForward, suspend_all
from l2l_core.step.pass_plan import PassPlan
from l2l_core.step.per_micro_batch import PerMicroBatch
from l2l_core.step.step_checks import StepChecks, refuse_frozen_model
from l2l_core.step.traffic import Gradient, GradientSlots, Prefetch
from l2l_core.step.visit_scheduler import Visit, VisitScheduler


class ForwardLoop:
    """A forward pass over ready-made parts, without gradients or as the first half of a step.

    Args:
        run: device, stash, trace and hooks of the pass.
        order: which layer is next, and who runs in it.
        plan: what becomes of weights and graphs.
        prefetch: weight slots.
    """

    def __init__(self, ctx: StepContext, scheduler: VisitScheduler, plan: PassPlan, prefetch: Prefetch) -> None:
        self.ctx, self.scheduler, self.plan, self.prefetch = ctx, scheduler, plan, prefetch

    def run_inference(self) -> None:
        """Run forward alone: an inference."""
        self.start_forwards(self.plan.layer_order)
        while (unit := self.scheduler.next_unit()) is not None:
            visit = self.scheduler.begin_visit(unit)
            with self.prefetch.visit(unit) as visit.stay:  # [1]
                for forward, coming in self.scheduler.iter_turns(visit):  # [2]
                    self.run_turn(forward, visit, coming)
                    self.ctx.stash.offload(forward.k, visit.index)

    def start_forwards(self, load_order: Sequence[Unit]) -> None:
        """Let every micro-batch run to its first layer call; `loads` is the order in which weights will be wanted."""
        self.prefetch.begin(load_order)
        for forward in self.scheduler.forwards:
            forward.resume()
            self.ctx.stash.offload(forward.k)

    def run_turn(self, forward: SuspendedForward, visit: Visit, upcoming: Sequence[LayerCall]) -> None:
        """Take one turn: a micro-batch runs the layer, and the shell up to its next layer call."""
        call = forward.waiting_call
        assert call is not None and call.unit is visit.unit, f"{visit.unit.key} k={forward.k}"
        call.visit, call.stay = visit.index, visit.stay
        self.fetch_stash(call, upcoming)
        call.buffers = self.ctx.buffers_of(visit.unit)  # before the run, which may change them; a recompute begins here
        forward.policy = self.plan.policy_for(visit.index)
        forward.resume()
        visit.calls += [last for last in forward.calls[-1:] if last is call]  # if it takes part in backward

    def fetch_stash(self, call: LayerCall, upcoming: Sequence[LayerCall]) -> None:
        """Have what `call` needs on the device, and let what comes after it begin to arrive."""
        stash = self.ctx.stash
        stash.fetch(call.needed_tensors, call.k, call.unit.key, call.visit)
        for after in upcoming[:1]:
            stash.prefetch(after.needed_tensors, after.k, after.unit.key, after.visit)
        later = upcoming[1 : 1 + stash.prefetch_turns]
        stash.hint_later_turns([(each.needed_tensors, each.unit.key, each.k, each.visit) for each in later])


class TrainLoop:
    """A training step over ready-made parts.

    Args:
        forward: the first half.
        store: the EPS.
        slots: for gradients of layers.
        shell: gradient of the shell, which gathers all through the step.
        apart: which blocks' micro-batches are kept apart.
        checks: what is refused before anything is trained.
        divisors: of the micro-batches' losses, so that these add up to the step's loss.
    """

    def __init__(
        self,
        forward_loop: ForwardLoop,
        store: LayerStore,
        slots: GradientSlots,
        shell_gradient: Gradient,
        per_micro_batch: PerMicroBatch,
        checks: StepChecks,
        divisors: Sequence[float],
    ) -> None:
        self._forward_loop, self._ctx, self._scheduler, self._prefetch = (
            forward_loop,
            forward_loop.ctx,
            forward_loop.scheduler,
            forward_loop.prefetch,
        )
        self._store, self._slots, self._shell_gradient, self._per_micro_batch = (
            store,
            slots,
            shell_gradient,
            per_micro_batch,
        )
        self._checks, self._divisors = checks, divisors
        self._losses: list[torch.Tensor] = []
        self._has_gradient = False

    def train(self) -> list[torch.Tensor]:
        """Run the step; return the scaled losses of the micro-batches, which add up to the step's loss."""
        self._forward_loop.start_forwards(self._forward_loop.plan.forward_then_backward)
        self._run_losses()  # a forward that calls no layer is over by now
        while (unit := self._scheduler.next_unit()) is not None:
            visit = self._begin_visit(unit)
            with self._prefetch.visit(unit) as visit.stay:  # [1]
                for forward, coming in self._scheduler.iter_turns(visit):  # [2]
                    self._forward_loop.run_turn(forward, visit, coming)
                    self._run_losses(visit, forward)
                    for last in visit.calls[-1:]:
                        last.suspend(self._ctx)  # what its graph has saved is parked with the rest
                    self._ctx.stash.offload(forward.k, visit.index)
                self._end_visit(visit)

        rest = self._begin_backward()
        # A list made now: as calls are back-propagated, they leave their visits.
        coming = deque(call for visit in rest for call in visit.calls)
        for visit in rest:
            self._store.raise_failure()  # of the EPS: the rest of backward would be in vain
            with self._prefetch.visit(visit.unit):  # [1]
                for call in list(visit.calls):  # [3] in ascending k, as accumulation over micro-batches adds
                    coming.popleft()
                    self._forward_loop.fetch_stash(call, list(islice(coming, 1 + self._ctx.stash.prefetch_turns)))
                    self._backward(call, visit)
                    self._ctx.stash.offload(call.k, call.visit)
                self._push(visit)  # [4]
        self._slots.check_no_stray_grads()
        self._shell_gradient.push(at_once=True)
        return self._losses

    def _begin_visit(self, unit: Unit) -> Visit:
        visit = self._scheduler.begin_visit(unit)
        self._checks.check_visit(unit, is_revisit=self._scheduler.visit_counts[unit.key] > 1)
        return visit

    def _end_visit(self, visit: Visit) -> None:
        suspend_all(visit.calls, self._ctx)  # the slot goes to another layer; whoever is not done is recomputed
        if visit.gradient is None:
            return
        if not visit.calls and all(forward.done for forward in self._scheduler.forwards):
            self._push(visit)
        else:  # it was not the last visit after all: what it gave so far comes before the rest, in order of k
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
        """Run the loss backward of every finished micro-batch whose predecessors are done, in ascending k.

        In another order the shell's gradients, and those of the last layer, would be added up in another one.
        """
        while len(self._losses) < len(self._scheduler.forwards) and self._scheduler.forwards[len(self._losses)].done:
            forward = self._scheduler.forwards[len(self._losses)]
            self._run_loss(forward, visit)
            if forward is not current:  # it had finished and was parked before
                self._ctx.stash.offload(forward.k)

    def _run_loss(self, forward: SuspendedForward, visit: Visit | None) -> None:
        k, run = forward.k, self._ctx
        run.stash.fetch([forward.result], k)
        stop = run.time_event("loss", "shell", k)
        with run.current_turn.activate(k, "shell"), run.watch_backward():
            loss = forward.result / self._divisors[k]
            forward.result = None
            tail = self._checks.check_loss(forward, loss)
            segments = self._checks.check_forward(forward, tail, self._scheduler.is_irregular())
            self._has_gradient |= tail is not None
            if tail is not None:
                run_backward([(tail, torch.ones_like(loss))])
        for grad in segments[-1].pending_gradients():
            run.stash.track(grad, k, "stash", "", fresh=True)
        self._losses.append(loss.detach().clone())
        del loss, tail, segments  # they hold the graph of the shell's last segment
        stop()
        self._flush(k, visit.index if visit is not None else -1, None)
        last = forward.calls[-1] if forward.calls else None
        if (
            visit is not None and last in visit.calls and last.kept_graph is not None
        ):  # the last layer does not run twice
            self._backward(last, visit)

    # -- backward ------------------------------------------------------------------------------------------------------

    def _backward(self, call: LayerCall, visit: Visit) -> None:
        if visit.gradient is None:  # taken as late as possible: the slot may still be on its way to the host
            visit.gradient = self._slots.acquire(visit.unit)
        call.visit = self._scheduler.backward_index(visit)
        call.backward(self._ctx, visit.gradient.partial_sums, self._shell_gradient.partial_sums)
        assert call.segment is not None, f"{call.unit.key} k={call.k} has no segment"
        # The shell's code before the call may read parameters of which this very run has brought a part: sent off first, that
        # part comes back as the first summand of the next run (`priors`) instead of being added to its sum.
        if self._shell_gradient.holds_part_of(call.segment.uses):
            self._flush(call.k, call.visit, visit.gradient)
        call.backward_segment(self._ctx, self._shell_gradient.partial_sums)
        call.release()
        visit.calls.remove(call)
        self._flush(call.k, call.visit, visit.gradient)

    def _flush(self, k: int, visit: int, gradient: Gradient | None) -> None:
        """Send what is kept apart by micro-batch."""
        for each in (self._shell_gradient, gradient):
            if each is not None:
                each.flush(k, visit)

    def _push(self, visit: Visit) -> None:
        if visit.gradient is None:
            return
        visit.gradient.push()
        visit.gradient = None
        # Another visit of the layer, and the shell or another layer with a shared block, may still bring parts; those
        # that are shared wait for the end of the step.
        if not any(other.calls and other.unit is visit.unit for other in self._scheduler.visits):
            for block in visit.unit.blocks:
                if not block.shared and self._per_micro_batch(block):
                    with self._ctx.clock.stalled():  # until the EPS has caught up
                        self._store.finish_block(block)
