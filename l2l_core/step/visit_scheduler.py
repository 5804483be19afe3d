"""Which layer is visited next, which micro-batches run in a visit, and how visits are numbered.

The order is not given, it is found: every micro-batch waits at the layer that its own forward has come to. As long as all
take the same way, a visit serves all of them, in ascending k. Where their ways part, the least advanced go first, so that
the others are caught up with and gather again.

Visits are numbered 0 .. V-1 in forward; backward goes on counting: the last layer's is V, the first one's 2V-1.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from l2l_core.eps.blocks import Unit
from l2l_core.step.micro_batch import LayerCall, SuspendedForward
from l2l_core.step.traffic import Gradient, SlotStay

_LOOKAHEAD = 4  # calls told of that come after one: as many as any waiting room asks for


@dataclass(eq=False, slots=True)
class Visit:
    """One stay of a layer on the device during forward.

    Attributes:
        stay: of the layer in its slot, which may be over before backward comes.
        calls: those made there that are not back-propagated yet.
        gradient: what backward has brought so far.
    """

    unit: Unit
    index: int
    stay: SlotStay = field(default_factory=SlotStay)
    calls: list[LayerCall] = field(default_factory=list)
    gradient: Gradient | None = None


class VisitScheduler:
    """The way of one pass through the layers.

    Args:
        forwards: one paused forward per micro-batch.
        layers: the stack.
        expected: the order of visits that the pass will probably take.

    Attributes:
        visits: so far.
        visits_of: how often each layer, by key, was visited so far.
    """

    def __init__(self, forwards: Sequence[SuspendedForward], layers: Sequence[Unit], expected: Sequence[Unit]) -> None:
        self.forwards, self._expected = list(forwards), list(expected)
        self.visits: list[Visit] = []
        self.visit_counts: Counter[str] = Counter()
        self._rank = {unit: position for position, unit in enumerate(layers)}
        self._cursors = [0] * len(self.forwards)  # how far each micro-batch has come in the expected order

    @property
    def layer_order(self) -> list[Unit]:
        """The layers in the order in which they were visited."""
        return [visit.unit for visit in self.visits]

    def next_unit(self, excluding: SuspendedForward | None = None) -> Unit | None:
        """Find the layer that the least advanced micro-batches wait for; None if none waits."""
        waiting: dict[Unit, tuple[int, int]] = {}
        for forward in self.forwards:
            if forward.waiting_call is not None and forward is not excluding:
                unit = forward.waiting_call.unit
                waiting[unit] = min(waiting.get(unit, (1 << 60, 0)), self._progress(forward, unit))
        # Of several that are as far along, the first one in the stack: every run of the same model takes the same way.
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
        """Go through the micro-batches that wait for the layer, each with the calls that come after, as far as they are known.

        The input of the first of these may arrive meanwhile.
        """
        waiting = self._waiting_for(visit.unit)
        for at, forward in enumerate(waiting):
            here = [
                each.waiting_call for each in waiting[at + 1 : at + 1 + _LOOKAHEAD] if each.waiting_call is not None
            ]
            next_one = [self._first_call_after(visit, forward)] if at + 1 == len(waiting) else []
            there = [
                call for each in waiting[: min(at, _LOOKAHEAD)] if (call := each.waiting_call) not in (None, *next_one)
            ]
            for call in here:
                call.visit = visit.index  # its fetch begins before its turn does, and is recorded with the visit
            for call in filter(None, there):
                call.visit = visit.index + 1
            yield forward, [call for call in (*here, *next_one, *there) if call is not None]

    def _first_call_after(self, visit: Visit, current: SuspendedForward) -> LayerCall | None:
        """Find the first call of the next visit, as far as is known before `last` has had its turn in this one.

        With one micro-batch nothing is known; at the turn the first call of backward is.
        """
        if (unit := self.next_unit(excluding=current)) is not None:
            call = next(forward.waiting_call for forward in self._waiting_for(unit) if forward is not current)
            assert call is not None
            call.visit = visit.index + 1
            return call
        for turned in reversed(self.visits) if self.is_last(visit) else ():
            if turned.calls:
                turned.calls[0].visit = self.backward_index(turned)
                return turned.calls[0]
        return None

    def is_last(self, visit: Visit) -> bool:
        """Whether no visit is expected after this one."""
        return visit.index == len(self._expected) - 1

    def begin_backward(self) -> list[Visit]:
        """Turn round, forward being over; return the visits that backward makes, the last one first."""
        rest = [visit for visit in reversed(self.visits) if visit.calls]
        for visit in rest:
            for call in visit.calls:
                call.visit = self.backward_index(visit)
        return rest

    def backward_index(self, visit: Visit) -> int:
        """Return the number of the visit that back-propagates what this one has run."""
        return 2 * len(self.visits) - 1 - visit.index

    def is_irregular(self) -> bool:
        """Whether micro-batches take different ways, so that their gradients reach the shell out of order."""
        # Whoever still waits in this visit has its layer ahead: that alone is no other way.
        ways = [[c.unit for c in f.calls] + ([f.waiting_call.unit] if f.waiting_call else []) for f in self.forwards]
        return any(way != ways[0] for way in ways)

    def _waiting_for(self, unit: Unit) -> list[SuspendedForward]:
        return [f for f in self.forwards if f.waiting_call is not None and f.waiting_call.unit is unit]
