"""The algorithm: one training step as a relay of layers.

    EPS (host)          load            slot (device)                        stash
    ┌─────────┐   ─────[1]────────▶   ┌──────────────────────────┐   ────▶  ┌───────┐
    │ layer l │                       │ forward  k = 0 .. K-1    │          │ (l,k) │
    │ w, m, v │   ◀────[3]─────────   │ backward k = 0 .. K-1 [2]│   ◀────  │  ...  │
    └─────────┘   push, reduce,       └──────────────────────────┘          └───────┘
                  update

    [1] a layer is loaded while the one before it computes, and runs all micro-batches before it gives way
    [2] in reverse: recompute from the stash, back-propagate, sum the gradient over micro-batches
    [3] the gradient is pushed; the EPS reduces it and updates the layer in the background

Source: Pudipeddi et al., https://arxiv.org/abs/2002.05645 (L2L and L2L-p).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import islice, zip_longest

import torch
from torch.autograd.graph import GradientEdge, get_gradient_edge

from l2l_core.eps import LayerStore, NonFiniteError
from l2l_core.eps.blocks import Block, Unit, check_stamps, hooked, stamps_of
from l2l_core.step.graph import Segment, nested, run_backward
from l2l_core.step.micro_batch import Call, Forward, Pass
from l2l_core.step.traffic import Gradient, GradientSlots, Link, Prefetch


@dataclass(eq=False, slots=True)
class Visit:
    """One stay of a layer on the device during forward, and the calls it made there."""

    unit: Unit
    index: int
    calls: list[Call] = field(default_factory=list)
    gradient: Gradient | None = None


class Loop:
    """One step, or one forward pass, over ready-made parts.

    Args:
        run: device, stash, trace and hooks of the pass.
        forwards: one paused forward per micro-batch.
        layers: the stack; `predicted` is the expected order of visits.
        prefetch: weight slots.
    """

    def __init__(
        self,
        run: Pass,
        forwards: Sequence[Forward],
        layers: Sequence[Unit],
        predicted: Sequence[Unit],
        prefetch: Prefetch,
    ) -> None:
        self.run, self.forwards, self.prefetch = run, list(forwards), prefetch
        self.visits: list[Visit] = []
        self._rank = {unit: position for position, unit in enumerate(layers)}
        self._predicted = list(predicted)
        self._cursors = [0] * len(self.forwards)  # how far each micro-batch has come in the predicted order

    def forward(self) -> None:
        """A forward pass without gradients."""
        self.prefetch.begin(self._predicted)
        self._start()
        while (unit := self._next_unit()) is not None:
            visit = self._open(unit)
            with self.prefetch.visit(unit):
                for forward, after in self._in_turn(visit):
                    self._advance(forward, visit, after)
                    self.run.stash.park(forward.k, visit.index)

    # -- which layer is next -------------------------------------------------------------------------------------------

    def _start(self) -> None:
        for forward in self.forwards:
            forward.advance()
            self.run.stash.park(forward.k)

    def _open(self, unit: Unit) -> Visit:
        for forward in self._waiting_for(unit):
            self._cursors[forward.k] = self._progress(forward, unit)[0] + 1
        self.visits.append(Visit(unit, len(self.visits)))
        return self.visits[-1]

    def _in_turn(self, visit: Visit) -> Iterator[tuple[Forward, Call | None]]:
        """The micro-batches that wait for the visit's layer, each with the call that comes after its own."""
        waiting = self._waiting_for(visit.unit)
        for forward, following in zip_longest(waiting, waiting[1:]):
            if following is None:
                yield forward, self._after(visit, forward)
            else:
                assert following.waiting is not None
                following.waiting.visit = visit.index
                yield forward, following.waiting

    def _after(self, visit: Visit, last: Forward) -> Call | None:
        """The first call of the next visit, as far as is known before `last` has had its turn in this one."""
        if (unit := self._next_unit(besides=last)) is None:
            return None
        call = next(forward.waiting for forward in self._waiting_for(unit) if forward is not last)
        assert call is not None
        call.visit = visit.index + 1
        return call

    def _relay(self, call: Call, after: Call | None) -> None:
        """What `call` needs is on the device, and what comes `after` it begins to arrive."""
        self.run.stash.fetch(call.awaited, call.k, call.unit.key, call.visit)
        if after is not None:
            self.run.stash.expect(after.awaited, after.k, after.unit.key, after.visit)

    def _advance(self, forward: Forward, visit: Visit, after: Call | None) -> None:
        assert forward.waiting is not None and forward.waiting.unit is visit.unit, f"{visit.unit.key} k={forward.k}"
        forward.waiting.visit = visit.index
        self._relay(forward.waiting, after)
        forward.waiting.buffers = self.run.buffers_of(visit.unit)
        forward.advance()

    def _waiting_for(self, unit: Unit) -> list[Forward]:
        return [f for f in self.forwards if f.waiting is not None and f.waiting.unit is unit]

    def _next_unit(self, besides: Forward | None = None) -> Unit | None:
        """The layer that the least advanced micro-batches wait for, so that the others can gather."""
        waiting: dict[Unit, tuple[int, int]] = {}
        for forward in self.forwards:
            if forward.waiting is not None and forward is not besides:
                unit = forward.waiting.unit
                waiting[unit] = min(waiting.get(unit, (1 << 60, 0)), self._progress(forward, unit))
        return min(waiting, key=waiting.__getitem__, default=None)

    def _progress(self, forward: Forward, unit: Unit) -> tuple[int, int]:
        cursor = self._cursors[forward.k]
        if unit in self._predicted[cursor:]:
            return self._predicted.index(unit, cursor), self._rank[unit]
        return cursor, self._rank[unit]


class TrainLoop(Loop):
    """A training step."""

    def train(
        self,
        store: LayerStore,
        slots: GradientSlots,
        shell: Gradient,
        push: Link,
        divisors: Sequence[float],
        inside: dict[torch.Tensor, str],
    ) -> list[torch.Tensor]:
        """Run the step; return the scaled losses of the micro-batches, which add up to the step's loss."""
        self._store, self._slots, self._shell, self._push = store, slots, shell, push
        self._divisors, self._inside = divisors, inside
        self._losses: list[torch.Tensor] = []
        self._learns = False
        self._shell_apart = False
        self._visits_of: Counter[str] = Counter()
        self._parted: set[str] = set()
        shell.apart = self._is_apart
        self._stamps = stamps_of(shell.unit.params)

        self.prefetch.begin([*self._predicted, *reversed(self._predicted[:-1])])
        self._start()
        self._lose_in_order()
        while (unit := self._next_unit()) is not None:  # [1]
            visit = self._open(unit)
            with self.prefetch.visit(unit):
                for forward, after in self._in_turn(visit):
                    forward.keep, call = self._is_last(visit), forward.waiting
                    self._advance(forward, visit, after)
                    visit.calls += [last for last in forward.calls[-1:] if last is call]
                    self._lose_in_order(visit, forward)
                    for last in visit.calls[-1:]:
                        last.drop_graph(self.run)  # what it has saved is parked with the rest
                    self.run.stash.park(forward.k, visit.index)
                self._close(visit)

        rest = self._turn()
        coming = islice([call for visit in rest for call in visit.calls], 1, None)
        for visit in rest:
            self._store.raise_failure()
            with self.prefetch.visit(visit.unit):
                for call in list(visit.calls):  # [2]
                    self._relay(call, next(coming, None))
                    self._backward(call, visit)
                    self.run.stash.park(call.k, call.visit)
                self._push_gradient(visit)  # [3]
        shell.push(store, push)
        push.lane.flush()
        return self._losses

    def _open(self, unit: Unit) -> Visit:
        self._visits_of[unit.key] += 1
        if self._visits_of[unit.key] > 1:
            self._refuse_hooks(unit, unit.params)
            if unit in self.run.nesting:
                raise RuntimeError(nested(f"layer {unit.name}"))
        return super()._open(unit)

    def _turn(self) -> list[Visit]:
        """Forward is over: the visits that backward makes, the last one first."""
        if not self._learns:
            raise RuntimeError("no loss depends on a parameter that requires a gradient: is the whole model frozen?")
        rest = [visit for visit in reversed(self.visits) if visit.calls]
        for visit in rest:
            for call in visit.calls:
                call.visit = self._number_of_backward(visit)
        self.prefetch.replan([visit.unit for visit in rest])
        return rest

    def _number_of_backward(self, visit: Visit) -> int:
        """Numbers of visits go on in backward: the last layer's is V, the first one's 2V - 1."""
        return 2 * len(self.visits) - 1 - visit.index

    def _after(self, visit: Visit, last: Forward) -> Call | None:
        if (call := super()._after(visit, last)) is not None or not self._is_last(visit):
            return call
        for turned in reversed(self.visits):
            if turned.calls:
                turned.calls[0].visit = self._number_of_backward(turned)
                return turned.calls[0]
        return None

    def _is_last(self, visit: Visit) -> bool:
        return visit.index == len(self._predicted) - 1

    def _close(self, visit: Visit) -> None:
        for call in visit.calls:
            call.drop_graph(self.run)  # the slot goes to another layer; whoever is not done is recomputed
        if visit.gradient is None:
            return
        if not visit.calls and all(forward.done for forward in self.forwards):
            self._push_gradient(visit)
        else:  # it was not the last visit after all: what it gave so far comes before the rest, in order of k
            self._parted.add(visit.unit.key)
            self._flush(-1, visit.index, visit.gradient)
            visit.gradient.stop()
            visit.gradient = None

    # -- loss ----------------------------------------------------------------------------------------------------------

    def _lose_in_order(self, visit: Visit | None = None, at_work: Forward | None = None) -> None:
        """Run the loss backward of every finished micro-batch whose predecessors are done, in ascending k."""
        while len(self._losses) < len(self.forwards) and self.forwards[len(self._losses)].done:
            forward = self.forwards[len(self._losses)]
            self._lose(forward, visit)
            if forward is not at_work:  # it had finished and was parked before
                self.run.stash.park(forward.k)

    def _lose(self, forward: Forward, visit: Visit | None) -> None:
        k = forward.k
        self.run.stash.fetch([forward.result], k)
        stop = self.run.timed("loss", "shell", k)
        with self.run.stash.working(k, "shell"), self.run.watched():
            loss = forward.result / self._divisors[k]
            forward.result = None
            if not torch.isfinite(loss):
                raise NonFiniteError(self._explain_loss(loss, forward))
            tail = get_gradient_edge(loss) if loss.requires_grad else None
            segments = self._check(forward, tail)
            self._learns |= tail is not None
            if tail is not None:
                run_backward([(tail, torch.ones_like(loss))])
        for grad in segments[-1].gradients():
            self.run.stash.hold(grad, k, "stash", "", fresh=True)
        self._losses.append(loss.detach().clone())
        del loss, tail, segments
        stop()
        self._flush(k, visit.index if visit is not None else -1, None)
        last = forward.calls[-1] if forward.calls else None
        if visit is not None and last is not None and last.kept is not None:
            self._backward(last, visit)

    def _check(self, forward: Forward, tail: GradientEdge | None) -> list[Segment]:
        """Refuse what would be trained wrong, before any of it is; returns the segments of the micro-batch's shell code.

        Parameters of the shell that several of them read are kept apart from now on.
        """
        for call in forward.calls:
            call.check_unchanged()
        check_stamps(self._shell.unit.params, self._stamps, "the model's own code")
        forward.crossing.check(tail, self._inside)
        segments = forward.crossing.segments
        several = _read_in_several(segments, self._shell.unit.params)
        self._shell_apart |= self._is_irregular() or bool(several)
        self._refuse_hooks(self._shell.unit, several)
        if any(segment.is_nested for segment in segments):
            raise RuntimeError(nested("the model's own code"))
        return segments

    def _is_irregular(self) -> bool:
        """Whether micro-batches take different ways, so that their gradients reach the shell out of order."""
        ways = [[c.unit for c in f.calls] + ([f.waiting.unit] if f.waiting else []) for f in self.forwards]
        return any(way != ways[0] for way in ways)

    def _refuse_hooks(self, unit: Unit, params: Sequence[torch.Tensor]) -> None:
        names = {param: name for block in unit.blocks for param, name in zip(block.params, block.names, strict=True)}
        for param in params:
            if param._backward_hooks:
                raise RuntimeError(hooked(names[param]))

    def _explain_loss(self, loss: torch.Tensor, forward: Forward) -> str:
        producer = "the batch or the code before the first layer"
        for call in forward.calls:
            self.run.stash.fetch(call.tensors, forward.k)
            if not all(bool(torch.isfinite(t).all()) for t in call.tensors if t.is_floating_point()):
                break
            producer = f"layer {call.unit.name} ({call.unit.key})"
        else:
            producer = f"{producer}, or the loss after it"
        return (
            f"the loss of micro-batch {forward.k} is {loss.item()}; first produced by {producer}. Nothing was updated"
        )

    # -- backward ------------------------------------------------------------------------------------------------------

    def _backward(self, call: Call, visit: Visit) -> None:
        if visit.gradient is None:
            visit.gradient = self._slots.take(visit.unit, self._is_apart)
        call.visit = self._number_of_backward(visit)
        shell_priors = partial(self._shell.priors, self._store, self._push)
        call.backward(self.run, partial(visit.gradient.priors, self._store, self._push), shell_priors)
        assert call.segment is not None, f"{call.unit.key} k={call.k} has no segment"
        if self._shell.holds_part_of(call.segment.uses):  # each run's contribution is added by itself
            self._flush(call.k, call.visit, visit.gradient)
        call.backward_before(self.run, shell_priors)
        call.release()
        visit.calls.remove(call)
        self._flush(call.k, call.visit, visit.gradient)

    def _is_apart(self, block: Block) -> bool:
        """Whether several visits or segments contribute to a block, so that its micro-batches are kept apart."""
        if block.shared:
            return True
        if block in self._shell.unit.blocks:
            return self._shell_apart
        return self._visits_of[block.key] > 1 or block.key in self._parted

    def _flush(self, k: int, visit: int, gradient: Gradient | None) -> None:
        for each in (self._shell, gradient):
            if each is not None:
                each.flush(k, visit, self._store, self._push)

    def _push_gradient(self, visit: Visit) -> None:
        if visit.gradient is None:
            return
        visit.gradient.push(self._store, self._push)
        visit.gradient = None
        if not any(other.calls and other.unit is visit.unit for other in self.visits):
            for block in visit.unit.blocks:
                if not block.shared and self._is_apart(block):
                    self._store.complete(block)


def _read_in_several(segments: Sequence[Segment], params: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Which of these parameters get gradients from several segments."""
    reads = Counter(leaf for segment in segments for leaf in segment.uses)
    return [param for param in params if reads[param] > 1]
