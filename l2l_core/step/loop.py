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
from l2l_core.step.apart import Apart
from l2l_core.step.checks import Checks, refuse_idle
from l2l_core.step.graph import run_backward
from l2l_core.step.micro_batch import Call, Forward, Pass, all_give_way
from l2l_core.step.order import Order, Visit
from l2l_core.step.plan import Plan
from l2l_core.step.traffic import Gradient, GradientSlots, Prefetch


class ForwardLoop:
    """A forward pass over ready-made parts, without gradients or as the first half of a step.

    Args:
        run: device, stash, trace and hooks of the pass.
        order: which layer is next, and who runs in it.
        plan: what becomes of weights and graphs.
        prefetch: weight slots.
    """

    def __init__(self, run: Pass, order: Order, plan: Plan, prefetch: Prefetch) -> None:
        self.run, self.order, self.plan, self.prefetch = run, order, plan, prefetch

    def forward(self) -> None:
        """Run forward alone: an inference."""
        self.begin(self.plan.order)
        while (unit := self.order.next_unit()) is not None:
            visit = self.order.open(unit)
            with self.prefetch.visit(unit) as visit.stay:  # [1]
                for forward, coming in self.order.in_turn(visit):  # [2]
                    self.advance(forward, visit, coming)
                    self.run.stash.park(forward.k, visit.index)

    def begin(self, loads: Sequence[Unit]) -> None:
        """Let every micro-batch run to its first layer call; `loads` is the order in which weights will be wanted."""
        self.prefetch.begin(loads)
        for forward in self.order.forwards:
            forward.advance()
            self.run.stash.park(forward.k)

    def advance(self, forward: Forward, visit: Visit, coming: Sequence[Call]) -> None:
        """Take one turn: a micro-batch runs the layer, and the shell up to its next layer call."""
        call = forward.waiting
        assert call is not None and call.unit is visit.unit, f"{visit.unit.key} k={forward.k}"
        call.visit, call.stay = visit.index, visit.stay
        self.relay(call, coming)
        call.buffers = self.run.buffers_of(visit.unit)  # before the run, which may change them; a recompute begins here
        forward.keeper = self.plan.keeper(visit.index)
        forward.advance()
        visit.calls += [last for last in forward.calls[-1:] if last is call]  # if it takes part in backward

    def relay(self, call: Call, coming: Sequence[Call]) -> None:
        """Have what `call` needs on the device, and let what comes after it begin to arrive."""
        stash = self.run.stash
        stash.fetch(call.awaited, call.k, call.unit.key, call.visit)
        for after in coming[:1]:
            stash.expect(after.awaited, after.k, after.unit.key, after.visit)
        later = coming[1 : 1 + stash.looks_ahead]
        stash.foresee([(each.awaited, each.unit.key, each.k, each.visit) for each in later])


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
        forward: ForwardLoop,
        store: LayerStore,
        slots: GradientSlots,
        shell: Gradient,
        apart: Apart,
        checks: Checks,
        divisors: Sequence[float],
    ) -> None:
        self._forward, self._run, self._order, self._prefetch = forward, forward.run, forward.order, forward.prefetch
        self._store, self._slots, self._shell, self._apart = store, slots, shell, apart
        self._checks, self._divisors = checks, divisors
        self._losses: list[torch.Tensor] = []
        self._learns = False

    def train(self) -> list[torch.Tensor]:
        """Run the step; return the scaled losses of the micro-batches, which add up to the step's loss."""
        self._forward.begin(self._forward.plan.there_and_back)
        self._lose_in_order()  # a forward that calls no layer is over by now
        while (unit := self._order.next_unit()) is not None:
            visit = self._open(unit)
            with self._prefetch.visit(unit) as visit.stay:  # [1]
                for forward, coming in self._order.in_turn(visit):  # [2]
                    self._forward.advance(forward, visit, coming)
                    self._lose_in_order(visit, forward)
                    for last in visit.calls[-1:]:
                        last.gives_way(self._run)  # what its graph has saved is parked with the rest
                    self._run.stash.park(forward.k, visit.index)
                self._close(visit)

        rest = self._turn()
        # A list made now: as calls are back-propagated, they leave their visits.
        coming = deque(call for visit in rest for call in visit.calls)
        for visit in rest:
            self._store.raise_failure()  # of the EPS: the rest of backward would be in vain
            with self._prefetch.visit(visit.unit):  # [1]
                for call in list(visit.calls):  # [3] in ascending k, as accumulation over micro-batches adds
                    coming.popleft()
                    self._forward.relay(call, list(islice(coming, 1 + self._run.stash.looks_ahead)))
                    self._backward(call, visit)
                    self._run.stash.park(call.k, call.visit)
                self._push(visit)  # [4]
        self._slots.check_none_left()
        self._shell.push(at_once=True)
        return self._losses

    def _open(self, unit: Unit) -> Visit:
        visit = self._order.open(unit)
        self._checks.visit(unit, again=self._order.visits_of[unit.key] > 1)
        return visit

    def _close(self, visit: Visit) -> None:
        all_give_way(visit.calls, self._run)  # the slot goes to another layer; whoever is not done is recomputed
        if visit.gradient is None:
            return
        if not visit.calls and all(forward.done for forward in self._order.forwards):
            self._push(visit)
        else:  # it was not the last visit after all: what it gave so far comes before the rest, in order of k
            self._apart.parted.add(visit.unit.key)
            self._flush(-1, visit.index, visit.gradient)
            visit.gradient.stop()
            visit.gradient = None

    def _turn(self) -> list[Visit]:
        if not self._learns:
            refuse_idle()
        rest = self._order.turn()
        self._prefetch.replan([visit.unit for visit in rest])
        return rest

    # -- loss ----------------------------------------------------------------------------------------------------------

    def _lose_in_order(self, visit: Visit | None = None, at_work: Forward | None = None) -> None:
        """Run the loss backward of every finished micro-batch whose predecessors are done, in ascending k.

        In another order the shell's gradients, and those of the last layer, would be added up in another one.
        """
        while len(self._losses) < len(self._order.forwards) and self._order.forwards[len(self._losses)].done:
            forward = self._order.forwards[len(self._losses)]
            self._lose(forward, visit)
            if forward is not at_work:  # it had finished and was parked before
                self._run.stash.park(forward.k)

    def _lose(self, forward: Forward, visit: Visit | None) -> None:
        k, run = forward.k, self._run
        run.stash.fetch([forward.result], k)
        stop = run.timed("loss", "shell", k)
        with run.at_work.turn(k, "shell"), run.watched():
            loss = forward.result / self._divisors[k]
            forward.result = None
            tail = self._checks.loss(forward, loss)
            segments = self._checks.forward(forward, tail, self._order.is_irregular())
            self._learns |= tail is not None
            if tail is not None:
                run_backward([(tail, torch.ones_like(loss))])
        for grad in segments[-1].gradients():
            run.stash.hold(grad, k, "stash", "", fresh=True)
        self._losses.append(loss.detach().clone())
        del loss, tail, segments  # they hold the graph of the shell's last segment
        stop()
        self._flush(k, visit.index if visit is not None else -1, None)
        last = forward.calls[-1] if forward.calls else None
        if visit is not None and last in visit.calls and last.kept is not None:  # the last layer does not run twice
            self._backward(last, visit)

    # -- backward ------------------------------------------------------------------------------------------------------

    def _backward(self, call: Call, visit: Visit) -> None:
        if visit.gradient is None:  # taken as late as possible: the slot may still be on its way to the host
            visit.gradient = self._slots.take(visit.unit)
        call.visit = self._order.number_of_backward(visit)
        call.backward(self._run, visit.gradient.priors, self._shell.priors)
        assert call.segment is not None, f"{call.unit.key} k={call.k} has no segment"
        # The shell's code before the call may read parameters of which this very run has brought a part: sent off first, that
        # part comes back as the first summand of the next run (`priors`) instead of being added to its sum.
        if self._shell.holds_part_of(call.segment.uses):
            self._flush(call.k, call.visit, visit.gradient)
        call.backward_before(self._run, self._shell.priors)
        call.release()
        visit.calls.remove(call)
        self._flush(call.k, call.visit, visit.gradient)

    def _flush(self, k: int, visit: int, gradient: Gradient | None) -> None:
        """Send what is kept apart by micro-batch."""
        for each in (self._shell, gradient):
            if each is not None:
                each.flush(k, visit)

    def _push(self, visit: Visit) -> None:
        if visit.gradient is None:
            return
        visit.gradient.push()
        visit.gradient = None
        # Another visit of the layer, and the shell or another layer with a shared block, may still bring parts; those
        # that are shared wait for the end of the step.
        if not any(other.calls and other.unit is visit.unit for other in self._order.visits):
            for block in visit.unit.blocks:
                if not block.shared and self._apart(block):
                    with self._run.clock.stalled():  # until the EPS has caught up
                        self._store.complete(block)
