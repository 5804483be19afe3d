"""The schedule of a relay: one layer at a time on the device, for all micro-batches.

A schedule is a generator of actions. The value of a `yield` is the `ActionResult` of the executor: the forward of a user's model
decides which layer each micro-batch calls next. While all micro-batches call the layers in the same order, a visit runs all of
them, in ascending k. Where the orders differ, the least advanced micro-batches run first, until the others wait at the same
layer again.

A step of three layers and two micro-batches, with the stash on the device (see `StepPlan` for the notation)::

    plan micro_batches=2 ahead=1 slots=2
    -   -     I0 I1
    0   L000  L:L000>0 L:L001>1 | F0 F1
    1   L001  L:L002>0 | F0 F1
    2   L002  | F0/turn X0 B0 F1/turn X1 B1 P U
    -   -     T
    1'  L001  L:L000>0 | B0 B1 P U
    0'  L000  | B0 B1 P U
    -   -     P:shell

[1] to [4] are the operations in the diagram of `l2l_core/step/loop.py`.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice

from l2l_core.plan.actions import SHELL, Action, ActionResult, Actions, Keep, Turn
from l2l_core.plan.slot_choice import SlotChoice, forward_then_backward

LATER_TURNS = 4  # turns announced after the next one: the most that any stash store reads ahead


@dataclass(frozen=True)
class ScheduleSettings:
    """Settings of a relay's schedule.

    Attributes:
        micro_batches: number of micro-batches.
        ahead: layers that are loaded while another computes.
        slots: weight slots.
        kept_graphs: last visits of forward whose graphs stay until backward.
        loss_per_micro_batch: one loss per micro-batch, else one of the whole batch after all forwards.
        offloads: the stash leaves the device.
        later_turns: turns after the next one that are announced to a stash store that reads ahead.
        announces_loads: loads are announced to a weight store that reads ahead.
    """

    micro_batches: int = 1
    ahead: int = 1
    slots: int = 2
    kept_graphs: int = 0
    loss_per_micro_batch: bool = True
    offloads: bool = False
    later_turns: int = 0
    announces_loads: bool = False


@dataclass(eq=False, slots=True)
class _ScheduledVisit:
    layer: str
    index: int
    keep: Keep
    calls: list[int] = field(default_factory=list)  # micro-batches that are not back-propagated yet
    has_gradient: bool = False


class RelaySchedule:
    """Schedule of one pass.

    Args:
        settings: see `ScheduleSettings`.
        layers: keys of the layers, in the order of the stack.
        expected: keys of the layers in the expected order of visits, that of the last pass.
    """

    name = "plan"  # of the plan that a step by it returns

    def __init__(self, settings: ScheduleSettings, layers: Sequence[str], expected: Sequence[str]) -> None:
        self.settings, self._expected = settings, list(expected)
        self._rank = {layer: position for position, layer in enumerate(layers)}
        self._waits_for: list[str | None] = [None] * settings.micro_batches
        self._finished = [False] * settings.micro_batches
        self._cursors = [0] * settings.micro_batches  # position of each micro-batch in the expected order
        self._visits: list[_ScheduledVisit] = []
        self._pending: Counter[str] = Counter()  # calls that are not back-propagated yet, by layer
        self._losses = 0

    def infer(self) -> Actions:
        """Yield the actions of a forward pass."""
        slots = self._make_slots(self._expected)
        yield from self._start()
        while (layer := self._next_layer()) is not None:
            visit = self._begin_visit(layer)
            yield from self._enter(slots, visit)
            waiting = self._waiting(layer)
            for position, k in enumerate(waiting):
                if self.settings.offloads:
                    yield from self._fetch(self._forward_turns(visit, waiting, position))
                yield from self._forward(k, visit)
                yield from self._end_turn(k, visit)
            slots.end_visit()
            yield Action("E", layer, visit=visit.index)

    def train(self) -> Actions:
        """Yield the actions of a training step."""
        slots = self._make_slots(forward_then_backward(self._expected))
        yield from self._start()
        yield from self._run_losses()  # of micro-batches that call no layer
        while (layer := self._next_layer()) is not None:
            visit = self._begin_visit(layer)
            yield from self._enter(slots, visit)  # [1]
            waiting = self._waiting(layer)
            for position, k in enumerate(waiting):  # [2]
                if self.settings.offloads:
                    yield from self._fetch(self._forward_turns(visit, waiting, position))
                yield from self._forward(k, visit)
                if self._finished[k]:
                    yield from self._run_losses(visit, k)
                yield from self._end_turn(k, visit)
            if visit.has_gradient:
                yield from self._push(visit)
            slots.end_visit()
            yield Action("E", layer, visit=visit.index)
        if not self.settings.loss_per_micro_batch:
            yield Action("X", SHELL)
        rest = [visit for visit in reversed(self._visits) if visit.calls]
        slots.replan([visit.layer for visit in rest])
        yield Action("T")
        turns = deque(Turn(k, visit.layer, visit.index, True) for visit in rest for k in visit.calls)
        for visit in rest:
            yield from self._enter(slots, visit, is_backward=True)  # [1]
            for k in list(visit.calls):  # [3] in ascending k, the order of gradient accumulation
                if self.settings.offloads:
                    yield from self._fetch(list(islice(turns, 2 + self.settings.later_turns)))  # this one is the first
                turns.popleft()
                yield self._backward(k, visit, is_backward=True)
                yield from self._end_turn(k, visit, is_backward=True)
            yield from self._push(visit, is_backward=True)  # [4]
            slots.end_visit()
            yield Action("E", visit.layer, visit=visit.index, is_backward=True)
        yield Action("P", SHELL)

    # -- visits --------------------------------------------------------------------------------------------------------

    def _make_slots(self, expected: Sequence[str]) -> SlotChoice:
        settings = self.settings
        return SlotChoice(settings.ahead, settings.slots, expected, settings.announces_loads)

    def _next_layer(self, excluding: int = -1) -> str | None:
        """Return the layer at which the least advanced micro-batches wait; None if none waits."""
        waiting: dict[str, tuple[int, int]] = {}
        for k, layer in enumerate(self._waits_for):
            if layer is not None and k != excluding:
                progress = self._progress(k, layer)
                waiting[layer] = min(waiting.get(layer, progress), progress)
        # A tie is broken by the order of the stack, so that every run of a model has the same order of visits.
        return min(waiting, key=waiting.__getitem__, default=None)

    def _progress(self, k: int, layer: str) -> tuple[int, int]:
        cursor = self._cursors[k]
        try:
            return self._expected.index(layer, cursor), self._rank[layer]
        except ValueError:
            return cursor, self._rank[layer]

    def _begin_visit(self, layer: str) -> _ScheduledVisit:
        for k, waits_for in enumerate(self._waits_for):
            if waits_for == layer:
                self._cursors[k] = self._progress(k, layer)[0] + 1
        index = len(self._visits)
        self._visits.append(_ScheduledVisit(layer, index, self._keep(index)))
        return self._visits[-1]

    def _keep(self, visit: int) -> Keep:
        remaining = len(self._expected) - 1 - visit  # expected visits after this one
        if 0 <= remaining < self.settings.kept_graphs:
            return "graph"
        return "input" if remaining or not self.settings.loss_per_micro_batch else "turn"

    def _enter(self, slots: SlotChoice, visit: _ScheduledVisit, is_backward: bool = False) -> Iterator[Action]:
        yield from slots.begin_visit(visit.layer)
        yield Action("V", visit.layer, visit=visit.index, is_backward=is_backward)

    # -- forward -------------------------------------------------------------------------------------------------------

    def _start(self) -> Actions:
        for k in range(self.settings.micro_batches):
            self._record_result(k, (yield Action("I", SHELL, k)))
            if self.settings.offloads:
                yield Action("S", SHELL, k)

    def _forward(self, k: int, visit: _ScheduledVisit) -> Actions:
        result = yield Action("F", visit.layer, k, visit.index, False, -1, visit.keep)
        if self._record_result(k, result).needs_backward:
            visit.calls.append(k)
            self._pending[visit.layer] += 1

    def _record_result(self, k: int, result: ActionResult | None) -> ActionResult:
        assert result is not None, f"the forward of micro-batch {k} got no result"
        self._waits_for[k], self._finished[k] = result.waits_for, result.waits_for is None
        return result

    def _waiting(self, layer: str) -> list[int]:
        return [k for k, waits_for in enumerate(self._waits_for) if waits_for == layer]

    def _forward_turns(self, visit: _ScheduledVisit, waiting: Sequence[int], position: int) -> list[Turn]:
        """Return the present turn, that of `waiting[position]`, and those that are expected to follow it."""
        later, k = self.settings.later_turns, waiting[position]
        stop = position + 1 + min(1 + later, LATER_TURNS)
        turns = [Turn(j, visit.layer, visit.index) for j in waiting[position:stop]]
        if len(turns) > 1 + later:
            return turns
        turned = [
            Turn(j, layer, visit.index + 1)
            for j in waiting[: min(position, LATER_TURNS)]
            if (layer := self._waits_for[j]) is not None
        ]
        if position + 1 == len(waiting) and (first := self._first_turn_after(visit, k)) is not None:
            turns.append(first)
            turned = [turn for turn in turned if turn != first]
        return turns + turned

    def _first_turn_after(self, visit: _ScheduledVisit, k: int) -> Turn | None:
        """Return the first turn of the next visit, as far as it is determined before the turn of `k`.

        With one micro-batch it is undetermined, except after the last visit: there it is the first turn of backward.
        """
        if (layer := self._next_layer(excluding=k)) is not None:
            return Turn(next(j for j in self._waiting(layer) if j != k), layer, visit.index + 1)
        if visit.index == len(self._expected) - 1:
            for turned in reversed(self._visits):
                if turned.calls:
                    return Turn(turned.calls[0], turned.layer, turned.index, True)
        return None

    # -- stash ---------------------------------------------------------------------------------------------------------

    def _fetch(self, turns: Sequence[Turn]) -> Iterator[Action]:
        """Wait for the tensors of the first of `turns`, start to fetch those of the second, announce the others."""
        yield _of_turn("W", turns[0])
        if self.settings.ahead:
            for turn in turns[1:2]:
                yield _of_turn("G", turn)
            if self.settings.later_turns:
                yield Action("H", turns=tuple(turns[2 : 2 + self.settings.later_turns]))

    def _end_turn(self, k: int, visit: _ScheduledVisit, is_backward: bool = False) -> Sequence[Action]:
        if self.settings.offloads:
            return (Action("S", visit.layer, k, visit.index, is_backward),)
        if not is_backward and visit.keep == "turn" and k in visit.calls:
            return (Action("D", visit.layer, k, visit.index),)
        return ()

    # -- losses and backward -------------------------------------------------------------------------------------------

    def _run_losses(self, visit: _ScheduledVisit | None = None, current: int = -1) -> Actions:
        """Yield the losses of finished micro-batches, in ascending k, and the backward of a last layer with its graph.

        Another order would add up the gradients of the shell and of the last layer in another order.
        """
        if not self.settings.loss_per_micro_batch:
            return
        while self._losses < len(self._finished) and self._finished[self._losses]:
            k = self._losses
            result = yield Action("X", SHELL, k)
            self._losses += 1
            # No recompute of the last layer, unless an earlier micro-batch needs one
            if visit is not None and result is not None and result.has_graph and visit.calls[:1] == [k]:
                yield self._backward(k, visit)
            if k != current and self.settings.offloads:  # it finished in an earlier turn and was offloaded
                yield Action("S", SHELL, k)

    def _backward(self, k: int, visit: _ScheduledVisit, is_backward: bool = False) -> Action:
        visit.has_gradient = True
        visit.calls.remove(k)
        self._pending[visit.layer] -= 1
        return Action("B", visit.layer, k, visit.index, is_backward)

    def _push(self, visit: _ScheduledVisit, is_backward: bool = False) -> Iterator[Action]:
        yield Action("P", visit.layer, visit=visit.index, is_backward=is_backward)
        # Another visit of the layer may still contribute.
        if not self._pending[visit.layer] and (is_backward or all(self._finished)):
            yield Action("U", visit.layer, visit=visit.index, is_backward=is_backward)


def _of_turn(kind: str, turn: Turn) -> Action:
    return Action(kind, turn.layer, turn.k, turn.visit, turn.is_backward)
