"""Order of visits and turns: the next layer, and the micro-batches that it runs.

The order follows from the model's own forward: each micro-batch waits at its next layer call. While all micro-batches call the
layers in the same order, a visit runs all of them, in ascending k. Where the orders differ, the least advanced micro-batches
run first, until the others wait at the same layer again.

Visits are numbered 0 .. V-1 in forward and V .. 2V-1 in backward: V is the last layer, 2V-1 the first one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from l2l_core.eps.blocks import Unit
from l2l_core.step.micro_batch import LayerCall, SuspendedForward
from l2l_core.step.traffic import Gradient, SlotStay

_LOOKAHEAD = 4  # calls announced after the next one: the most that any stash store prefetches


@dataclass(eq=False, slots=True)
class Visit:
    """One stay of a layer on the device during forward."""

    unit: Unit
    index: int
    stay: SlotStay = field(default_factory=SlotStay)  # may be over before backward
    calls: list[LayerCall] = field(default_factory=list)  # not back-propagated yet
    gradient: Gradient | None = None  # accumulated so far


class VisitScheduler:
    """Order of visits of one pass."""

    def __init__(self, forwards: Sequence[SuspendedForward], layers: Sequence[Unit], expected: Sequence[Unit]) -> None:
        self.forwards, self._expected = list(forwards), list(expected)
        self.visits: list[Visit] = []
        self.visit_counts: Counter[str] = Counter()  # so far, by key of the layer
        self._rank = {unit: position for position, unit in enumerate(layers)}
        self._cursors = [0] * len(self.forwards)  # position of each micro-batch in the expected order

    @property
    def layer_order(self) -> list[Unit]:
        """The layers in the order of their visits."""
        return [visit.unit for visit in self.visits]

    def next_unit(self, excluding: SuspendedForward | None = None) -> Unit | None:
        """Return the layer at which the least advanced micro-batches wait; None if none waits."""
        waiting: dict[Unit, tuple[int, int]] = {}
        for forward in self.forwards:
            if forward.waiting_call is not None and forward is not excluding:
                unit = forward.waiting_call.unit
                waiting[unit] = min(waiting.get(unit, (1 << 60, 0)), self._progress(forward, unit))
        # A tie is broken by the order of the stack, so that every run of a model has the same order of visits.
        return min(waiting, key=waiting.__getitem__, default=None)

    def _progress(self, forward: SuspendedForward, unit: Unit) -> tuple[int, int]:
        cursor = self._cursors[forward.k]
        if unit in self._expected[cursor:]:
            return self._expected.index(unit, cursor), self._rank[unit]
        return cursor, self._rank[unit]

    def begin_visit(self, unit: Unit) -> Visit:
        """Begin a visit of the layer."""
        for forward in self._waiting_for(unit):
            self._cursors[forward.k] = self._progress(forward, unit)[0] + 1
        self.visit_counts[unit.key] += 1
        self.visits.append(Visit(unit, len(self.visits)))
        return self.visits[-1]

    def iter_turns(self, visit: Visit) -> Iterator[tuple[SuspendedForward, list[LayerCall]]]:
        """Yield the micro-batches that wait for the layer, each with the calls that are expected to follow."""
        waiting = self._waiting_for(visit.unit)
        for turn, forward in enumerate(waiting):
            following = [f.waiting_call for f in waiting[turn + 1 : turn + 1 + _LOOKAHEAD]]
            first_after = [self._first_call_after(visit, forward)] if turn + 1 == len(waiting) else []
            turned = [f.waiting_call for f in waiting[: min(turn, _LOOKAHEAD)] if f.waiting_call not in first_after]
            # A fetch begins before its turn, and is recorded with the visit of that turn.
            this_visit, next_visit = [c for c in following if c is not None], [c for c in turned if c is not None]
            for call in this_visit:
                call.visit = visit.index
            for call in next_visit:
                call.visit = visit.index + 1
            yield forward, [*this_visit, *(c for c in first_after if c is not None), *next_visit]

    def _first_call_after(self, visit: Visit, current: SuspendedForward) -> LayerCall | None:
        """Find the first call of the next visit, as far as it is determined before the turn of `current`.

        With one micro-batch it is undetermined, except after the last visit: there it is the first call of backward.
        """
        if (unit := self.next_unit(excluding=current)) is not None:
            call = next(forward.waiting_call for forward in self._waiting_for(unit) if forward is not current)
            assert call is not None
            call.visit = visit.index + 1
            return call
        is_last = visit.index == len(self._expected) - 1
        for turned in reversed(self.visits) if is_last else ():
            if turned.calls:
                turned.calls[0].visit = self.backward_index(turned)
                return turned.calls[0]
        return None

    def begin_backward(self) -> list[Visit]:
        """Return the visits of backward, the last one of forward first."""
        rest = [visit for visit in reversed(self.visits) if visit.calls]
        for visit in rest:
            for call in visit.calls:
                call.visit = self.backward_index(visit)
        return rest

    def backward_index(self, visit: Visit) -> int:
        """Return the number of the backward visit that back-propagates the calls of a forward visit."""
        return 2 * len(self.visits) - 1 - visit.index

    def is_irregular(self) -> bool:
        """Whether micro-batches call layers in different orders, so that the shell's gradients arrive out of order."""
        # The call at which a micro-batch waits counts: it will run in the present visit.
        orders = [[c.unit for c in f.calls] + ([f.waiting_call.unit] if f.waiting_call else []) for f in self.forwards]
        return any(order != orders[0] for order in orders)

    def _waiting_for(self, unit: Unit) -> list[SuspendedForward]:
        return [f for f in self.forwards if f.waiting_call is not None and f.waiting_call.unit is unit]
