"""Execution of a schedule: one training step as a relay of layers.

`l2l_core/plan/relay_schedule.py` decides the order of actions, `ForwardExecutor` and `StepExecutor` run them, with one method
for each kind of action.

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

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field

import torch

from l2l_core.batches import divide_loss, leaves_in
from l2l_core.eps import LayerStore
from l2l_core.eps.blocks import Unit
from l2l_core.plan import Action, ActionResult, Actions, Turn
from l2l_core.step.batch_loss import DetachedOutputs, LoadBatchLoss
from l2l_core.step.graph import run_backward, sequence_number, take_gradients
from l2l_core.step.micro_batch import POLICIES, LayerCall, StepContext, SuspendedForward, suspend_all
from l2l_core.step.step_checks import PerMicroBatch, StepChecks, refuse_frozen_model
from l2l_core.step.traffic import Gradient, GradientSlots, SlotStay, WeightSlots

# By name: bound methods would refer to their executor in a circle, and keep the model until Python's collector runs.
_METHODS = {
    "A": "_announce_or_load",
    "L": "_announce_or_load",
    "V": "_begin_visit",
    "I": "_start_forward",
    "W": "_wait_for_stash",
    "G": "_prefetch_stash",
    "H": "_announce_turns",
    "F": "_forward",
    "X": "_loss",
    "B": "_backward",
    "D": "_drop_graph",
    "S": "_offload",
    "P": "_push",
    "U": "_finish_gradients",
    "E": "_end_visit",
    "T": "_begin_backward",
}


@dataclass(eq=False, slots=True)
class Visit:
    """One visit of a layer in forward, with the calls of all micro-batches."""

    unit: Unit
    index: int
    stay: SlotStay = field(default_factory=SlotStay)  # may be over before backward
    calls: list[LayerCall] = field(default_factory=list)  # not back-propagated yet
    gradient: Gradient | None = None  # accumulated so far


class ForwardExecutor:
    """Runs the actions of a forward pass of all micro-batches."""

    def __init__(
        self, ctx: StepContext, forwards: Sequence[SuspendedForward], layers: Sequence[Unit], slots: WeightSlots
    ) -> None:
        self._ctx, self.forwards, self._weight_slots = ctx, list(forwards), slots
        self._units = {unit.key: unit for unit in layers}
        self.visits: list[Visit] = []
        self._visit: Visit | None = None  # between `V` and `E`
        self._scope = ExitStack()  # of this visit
        self.actions: list[Action] = []

    @property
    def layer_order(self) -> list[Unit]:
        """The layers in the order of their visits."""
        return [visit.unit for visit in self.visits]

    def run(self, schedule: Actions) -> None:
        """Run the actions of a schedule in order, and give it their results."""
        result: ActionResult | None = None
        with self._scope:
            while True:
                try:
                    action = schedule.send(result)
                except StopIteration:
                    return
                self.actions.append(action)
                result = getattr(self, _METHODS[action.kind])(action)

    # -- visits --------------------------------------------------------------------------------------------------------

    def _announce_or_load(self, action: Action) -> None:  # [1]
        self._weight_slots.run(action)

    def _begin_visit(self, action: Action) -> None:
        visit = self._visit_of(action)
        visit.stay = self._scope.enter_context(self._weight_slots.visit(visit.unit))
        self._visit = visit

    def _visit_of(self, action: Action) -> Visit:
        self.visits.append(Visit(self._units[action.layer], len(self.visits)))
        return self.visits[-1]

    def _end_visit(self, action: Action) -> None:
        self._visit = None
        self._scope.close()

    # -- stash ---------------------------------------------------------------------------------------------------------

    def _find_call(self, turn: Turn) -> LayerCall | None:
        """Return the call of a turn, with the number of its visit; None if the micro-batch is not there yet."""
        if turn.is_backward:
            if turn.visit >= len(self.visits):
                return None
            visit = self.visits[turn.visit]
            call = next((call for call in visit.calls if call.k == turn.k), None)
            number = self._backward_number(visit)
        else:
            call, number = self.forwards[turn.k].waiting_call, turn.visit
        if call is None or call.unit.key != turn.layer:
            return None
        call.visit = number
        return call

    def _backward_number(self, visit: Visit) -> int:
        """Return the number of the backward visit: V .. 2V-1, with V visits in forward."""
        return 2 * len(self.visits) - 1 - visit.index

    def _wait_for_stash(self, action: Action) -> None:
        if (call := self._find_call(action.turn)) is not None:
            self._ctx.stash.fetch(call.needed_tensors, call.k, call.unit.key, call.visit)

    def _prefetch_stash(self, action: Action) -> None:
        if (call := self._find_call(action.turn)) is not None:
            self._ctx.stash.prefetch(call.needed_tensors, call.k, call.unit.key, call.visit)

    def _announce_turns(self, action: Action) -> None:
        calls = filter(None, map(self._find_call, action.turns))
        self._ctx.stash.hint_later_turns([(each.needed_tensors, each.unit.key, each.k, each.visit) for each in calls])

    def _offload(self, action: Action) -> None:
        number = action.visit
        if action.is_backward:
            number = self._backward_number(self.visits[number])
        elif self._visit is not None and number >= 0:
            self._drop_graph(action)  # tensors saved by a graph that stays are offloaded with the rest
        self._ctx.stash.offload(action.k, number)

    def _drop_graph(self, action: Action) -> None:
        assert self._visit is not None
        for last in self._visit.calls[-1:]:
            last.suspend(self._ctx)

    # -- forward -------------------------------------------------------------------------------------------------------

    def _start_forward(self, action: Action) -> ActionResult:
        forward = self.forwards[action.k]
        forward.resume()
        return ActionResult(_waits_for(forward))

    def _forward(self, action: Action) -> ActionResult:  # [2]
        """Run the layer on one micro-batch, and the shell up to its next layer call."""
        visit, forward = self._visit, self.forwards[action.k]
        call = forward.waiting_call
        assert visit is not None and call is not None and call.unit is visit.unit, f"{action}"
        call.visit, call.stay = visit.index, visit.stay
        call.buffers = self._ctx.buffers_of(visit.unit)  # before the layer changes them: a recompute starts from these
        call.policy = POLICIES[action.keep]
        forward.resume()
        needs_backward = bool(forward.calls) and forward.calls[-1] is call
        if needs_backward:
            visit.calls.append(call)
        return ActionResult(_waits_for(forward), needs_backward)

    # -- outputs -------------------------------------------------------------------------------------------------------

    def compute_batch_loss(self, load_batch_loss: LoadBatchLoss) -> torch.Tensor:
        """Return one loss over the outputs of all micro-batches after an inference."""
        batch_loss = load_batch_loss()
        outputs = [self.detach_outputs(forward).tree for forward in self.forwards]
        stop = self._ctx.time_event("loss", "shell", -1)
        with self.forwards[-1].resume_after_end(len(self.forwards)), self._ctx.watch_backward():
            loss = batch_loss(outputs)
        stop()
        return loss

    def detach_outputs(self, forward: SuspendedForward, check: Callable[[], object] = lambda: None) -> DetachedOutputs:
        """Take the outputs of a finished forward, and `check` it."""
        ctx, k = self._ctx, forward.k
        ctx.stash.fetch([leaf for leaf in leaves_in(forward.result) if isinstance(leaf, torch.Tensor)], k)
        stop = ctx.time_event("shell", "shell", k)
        with ctx.current_turn.activate(k, "shell"), ctx.watch_backward():
            outputs = DetachedOutputs.take(forward)
            check()
        stop()
        ctx.stash.offload(k)
        return outputs


class StepExecutor(ForwardExecutor):
    """Runs the actions of a training step."""

    def __init__(
        self,
        ctx: StepContext,
        forwards: Sequence[SuspendedForward],
        layers: Sequence[Unit],
        weight_slots: WeightSlots,
        store: LayerStore,
        gradient_slots: GradientSlots,
        shell_gradient: Gradient,
        per_micro_batch: PerMicroBatch,
        checks: StepChecks,
        divisors: Sequence[float],  # the losses divided by them add up to the loss of the step
        load_batch_loss: LoadBatchLoss | None = None,  # with it, micro-batches have no losses
        trains_loss_parameters: bool = True,  # whether parameters that this loss reads get their gradient from it here
    ) -> None:
        super().__init__(ctx, forwards, layers, weight_slots)
        self._store, self._slots, self._shell_gradient = store, gradient_slots, shell_gradient
        self._per_micro_batch, self._checks = per_micro_batch, checks
        self._divisors, self._load_batch_loss = divisors, load_batch_loss
        self._trains_loss_parameters = trains_loss_parameters
        self.losses: list[torch.Tensor] = []  # scaled losses of the micro-batches, which add up to the step's loss
        self._has_gradient = False

    # -- visits --------------------------------------------------------------------------------------------------------

    def _visit_of(self, action: Action) -> Visit:
        if action.is_backward:
            self._store.raise_failure()  # if an update failed, the rest of backward is useless
            return self.visits[action.visit]
        visit = super()._visit_of(action)
        counts = self._per_micro_batch.visit_counts
        counts[action.layer] += 1
        self._checks.check_visit(visit.unit, is_revisit=counts[action.layer] > 1)
        return visit

    def _end_visit(self, action: Action) -> None:
        if not action.is_backward and self._visit is not None:
            suspend_all(self._visit.calls, self._ctx)  # another layer takes the slot: graphs that need it are dropped
        super()._end_visit(action)

    def _begin_backward(self, action: Action) -> None:
        if not self._has_gradient:
            refuse_frozen_model()

    # -- loss ----------------------------------------------------------------------------------------------------------

    def _loss(self, action: Action) -> ActionResult:
        if action.k < 0:
            self._run_batch_loss()
            return ActionResult()
        forward, visit = self.forwards[action.k], self._visit
        self._run_loss(forward, visit)
        last = forward.calls[-1] if forward.calls else None
        return ActionResult(
            has_graph=visit is not None and last is not None and last in visit.calls and last.kept_graph is not None
        )

    def _run_loss(self, forward: SuspendedForward, visit: Visit | None) -> None:
        k, ctx = forward.k, self._ctx
        ctx.stash.fetch([forward.result], k)
        stop = ctx.time_event("loss", "shell", k)
        with ctx.current_turn.activate(k, "shell"), ctx.watch_backward():
            loss = divide_loss(forward.result, self._divisors[k])
            forward.result = None
            tail = self._checks.check_loss(forward, loss)
            segments = self._checks.check_forward(forward, tail, self._is_irregular())
            self._has_gradient |= tail is not None
            if tail is not None:
                run_backward([(tail, torch.ones_like(loss))])
        for grad in segments[-1].pending_gradients():
            ctx.stash.track(grad, k, "stash", "", fresh=True)
        self.losses.append(loss.detach().clone())
        del loss, tail, segments  # they keep the graph of the last segment alive
        stop()
        self._flush(k, visit.index if visit is not None else -1, None)

    def _is_irregular(self) -> bool:
        """Whether micro-batches call layers in different orders, so that the shell's gradients arrive out of order."""
        # Also calls without a gradient, which delay a micro-batch as others do. One that waits will run in the present visit.
        return any(forward.called != self.forwards[0].called for forward in self.forwards)

    def _run_batch_loss(self) -> None:
        """Back-propagate one loss over the outputs of all micro-batches, then the last segment of each, in ascending k."""
        assert self._load_batch_loss is not None
        ctx, forwards = self._ctx, self.forwards
        outputs = [self._detach_outputs(forward) for forward in forwards]  # all are checked before anything is trained
        batch_loss = self._load_batch_loss()
        stop = ctx.time_event("loss", "shell", -1)
        with forwards[-1].resume_after_end(len(forwards)), ctx.watch_backward():
            began = sequence_number()
            loss = batch_loss([each.tree for each in outputs])
            edge = self._checks.check_batch_loss(loss, began)
            self._has_gradient = edge is not None
            if self._trains_loss_parameters:
                self.losses.append(loss.detach().clone())
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
        is_irregular = self._is_irregular()
        return self.detach_outputs(forward, lambda: self._checks.check_forward(forward, None, is_irregular))

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

    def _backward(self, action: Action) -> None:  # [3]
        visit = self._visit
        assert visit is not None
        call = next(call for call in visit.calls if call.k == action.k)
        if visit.gradient is None:  # as late as possible: the buffer may still be copied to the host
            visit.gradient = self._slots.acquire(visit.unit)
        call.visit = self._backward_number(visit)
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

    def _push(self, action: Action) -> None:  # [4]
        visit = self._visit
        if visit is None:
            self._slots.hooks.check_no_stray_grads()
            self._shell_gradient.push(at_once=True)
            return
        gradient, visit.gradient = visit.gradient, None
        assert gradient is not None, f"{action} without a backward"
        if not action.is_backward:
            suspend_all(visit.calls, self._ctx)
        if action.is_backward or (not visit.calls and all(forward.done for forward in self.forwards)):
            gradient.push()
        else:  # not the last visit after all: keep this part apart by micro-batch, so that the sum has its order
            self._per_micro_batch.revisited.add(visit.unit.key)
            self._flush(-1, visit.index, gradient)
            gradient.stop()

    def _finish_gradients(self, action: Action) -> None:
        """Finish the layer's gradients that were pushed by micro-batch; others are finished when they arrive.

        To shared blocks, the shell and other layers may still contribute: those are finished at the end of the step.
        """
        for block in self._units[action.layer].blocks:
            if not block.shared and self._per_micro_batch(block):
                with self._ctx.clock.stalled():  # until the EPS has caught up
                    self._store.finish_block(block)


def _waits_for(forward: SuspendedForward) -> str | None:
    return forward.waiting_call.unit.key if forward.waiting_call is not None else None
