"""The roofline of a step: how short it could be if every lane worked whenever it could.

Pure arithmetic on the events of a trace; it runs and measures nothing. What binds a step as it was is in `bounds.py`.

The phases of a step follow one another without gaps::

    fill      until the first layer computes: the shell and the first layer load, the batch is copied
    forward   until the turn
    middle    depth first, until the last micro-batch turns; otherwise there is none
    backward  until compute ends
    tail      the last gradients are pushed, the last layers updated

The turn is where the visit of the layer begins that back-propagates first. In that visit forward, loss and backward of the
micro-batches take turns; counted to backward, both phases consist of whole visits, and so grow in proportion to the
number of micro-batches.

Depth first every micro-batch has a turn. Loads can hide under the forward of the first one alone, pushes and updates under the
backward of the last: these are the phases forward and backward, and what is between them is the middle, which grows with the
number of micro-batches.

The formula: forward, middle and backward take as long as their busiest lane, backward also counts the EPS; fill and tail are
chains, in which every piece waits for the one before it. The overlap assumed is that of L2L-p, Pudipeddi et al.,
https://arxiv.org/abs/2002.05645.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from l2l_core.trace import Event, TraceLike, find_last_backward_start, group_by_visit, turn_of

MIDDLE = "middle"
PHASES = ("fill", "forward", "backward", "tail")  # of any step
ALL_PHASES = ("fill", "forward", MIDDLE, "backward", "tail")
OVERLAPPING = ("forward", "backward")  # fill and tail are chains
SHELL = "shell"

SecondsByLane = Mapping[str, float]  # by lane


class VisitWork:
    """The work of a step by the visit where it belongs, whenever it was done.

    Groups are the fill, one per visit, the tail. One layer ahead, a load can hide under the visit before the one that it is
    for, and a push under the visit after: there they belong. What the EPS can hide belongs to backward as a whole, and is in
    the group of its last visit.

    Attributes:
        groups: events by lane.
        turn, last_turn: index of the visit that back-propagates first, and of the one in which the last micro-batch turns; that
            of the tail if none does.
        early: layers whose gradients come before the last.
    """

    def __init__(self, lanes: Mapping[str, Sequence[Event]], settings: Mapping[str, Any]) -> None:
        visits = group_by_visit(lanes["compute"])
        self.backward_start, self.last_backward_start = turn_of(visits), find_last_backward_start(visits)
        self.is_deferred = settings.get("update") == "deferred"
        self._visit_starts = [visit[0].start_s for visit in visits[1:]]
        self._starts_by_layer = defaultdict(list)  # the same by layer
        for visit in visits[1:]:
            self._starts_by_layer[visit[0].layer].append(visit[0].start_s)
        self._compute_stop_s = max((e.stop_s for e in lanes["compute"]), default=0.0)
        visited = [visit[0].layer for visit in visits[1:]]
        self.early_layers = {*visited} - {*visited[-1:]}
        self.groups: list[dict[str, list[Event]]] = [{lane: [] for lane in lanes} for _ in range(len(visits) + 1)]
        for index, visit in enumerate(visits):
            self.groups[index]["compute"] += visit
        for event in (event for lane, events in lanes.items() if lane != "compute" for event in events):
            self.groups[self._group_of(event)][event.lane].append(event)

    def in_phase(self, name: str) -> list[dict[str, list[Event]]]:
        """Return the visits of "forward", the middle or "backward"."""
        spans = {
            "forward": (1, self.backward_start),
            MIDDLE: (self.backward_start, self.last_backward_start),
            "backward": (self.last_backward_start, -1),
        }
        return self.groups[slice(*spans[name])]

    def _group_of(self, event: Event) -> int:
        last = len(self._visit_starts)  # visit, from 1; the next group is the tail
        if event.lane in ("eps", "reduce"):
            hides = not self.is_deferred and (event.layer in self.early_layers or event.start_s < self._compute_stop_s)
            return last if hides else last + 1
        if event.kind in ("load", "gather"):
            return self._group_before_visit(event)
        if event.start_s >= self._compute_stop_s:
            return last if event.layer in self.early_layers else last + 1
        if event.kind == "push":
            return min(1 + bisect_left(self._visit_starts, event.start_s), last)
        return bisect_right(self._visit_starts, event.start_s)

    def _group_before_visit(self, load: Event) -> int:
        """Find the group before the visit that a load is for. The shell is for every visit, hence for the first."""
        starts = self._starts_by_layer[load.layer]
        used = bisect_left(starts, load.start_s)
        if load.layer == SHELL or used == len(starts):  # or not used yet: its visit is the next
            return 0 if load.layer == SHELL else bisect_right(self._visit_starts, load.start_s)
        return bisect_left(self._visit_starts, starts[used])


@dataclass(frozen=True)
class Roofline:
    """The least seconds a step can take with lanes that are serial, never wait for each other, and know what comes.

    Attributes:
        busy_s: by phase and lane, the seconds of work.
        fill_s: before the first layer can compute; nothing hides it.
        tail_s: from the end of compute until the last update; nothing hides it.
        visits_s: of forward, middle and backward, the sum over visits of the busiest lane. One layer ahead, copies can hide only
            under the visit before (loads) or after (pushes) the one they are for, so this is at least the phase's own. Where
            the device has room for all gradients, as depth first, pushes may come later, and a step may be shorter.
    """

    busy_s: Mapping[str, SecondsByLane]
    fill_s: float
    tail_s: float
    visits_s: Mapping[str, float]

    @property
    def forward_s(self) -> float:
        """The busiest lane of forward."""
        return max(self.busy_s["forward"].values())

    @property
    def middle_s(self) -> float:
        """The busiest lane of the middle."""
        return max(self.busy_s[MIDDLE].values())

    @property
    def backward_s(self) -> float:
        """The busiest lane of backward, the EPS among them."""
        return max(self.busy_s["backward"].values())

    @property
    def step_s(self) -> float:
        """The roofline of the step, per phase."""
        return self.fill_s + self.forward_s + self.middle_s + self.backward_s + self.tail_s

    @property
    def by_visit_s(self) -> float:
        """The roofline of the step, per visit."""
        backward_s = max(self.visits_s["backward"], self.busy_s["backward"]["eps"])
        return self.fill_s + self.visits_s["forward"] + self.visits_s[MIDDLE] + backward_s + self.tail_s

    @property
    def serial_s(self) -> float:
        """The step if nothing overlaps (`ahead=0`): all the work in a row."""
        return math.fsum(seconds for lanes in self.busy_s.values() for seconds in lanes.values())


def roofline(trace: TraceLike, figures: Mapping[str, Any] | None = None) -> Roofline:
    """Say how short a step with this trace's work could be on a link with these figures.

    Compute and EPS take the seconds that their events took: for a forecast, record the trace without link limits, so that
    compute did not wait inside its own events. Copies take bytes over bandwidth plus one latency per event; where there is
    no bandwidth given, they take what they took.

    Args:
        trace: of a whole training step. Its loads must be those of the setting in question: `ahead=0` makes one more.
        figures: "h2d_bytes_per_s", "d2h_bytes_per_s", "latency_s"; default the trace's own settings.

    Raises:
        ValueError: the trace has no visit with a loss or backward, or its step failed.
    """
    trace.check_finished()
    work = VisitWork(trace.lanes, trace.settings)
    price = _EventCost(trace.settings if figures is None else figures)
    if not work.in_phase("backward"):
        raise ValueError(f"{trace!r} is not a whole training step: it has no layer's visit with a loss or backward")
    fill, *_, tail = work.groups
    whole = ALL_PHASES[1:-1]
    visits = {phase: [_cost_by_lane(group, price) for group in work.in_phase(phase)] for phase in whole}
    busy_s = {
        "fill": _cost_by_lane(fill, price),
        **{phase: {lane: math.fsum(v[lane] for v in visits[phase]) for lane in fill} for phase in whole},
        "tail": _cost_by_lane(tail, price),
    }
    visits_s = {p: math.fsum(max(v["compute"], v["h2d"], v["d2h"]) for v in each) for p, each in visits.items()}
    return Roofline(busy_s, _fill_s(fill, price), _tail_s(tail, price, work.is_deferred), visits_s)


def _cost_by_lane(group: Mapping[str, list[Event]], cost_s: _EventCost) -> dict[str, float]:
    return {lane: math.fsum(map(cost_s, events)) for lane, events in group.items()}


class _EventCost:
    """Seconds of an event."""

    def __init__(self, figures: Mapping[str, Any]) -> None:
        self._bytes_per_s = {lane: figures.get(f"{lane}_bytes_per_s") for lane in ("h2d", "d2h")}
        self._latency_s = figures.get("latency_s") or 0.0

    def __call__(self, event: Event) -> float:
        bytes_per_s = self._bytes_per_s.get(event.lane)
        return self._latency_s + event.nbytes / bytes_per_s if bytes_per_s else event.stop_s - event.start_s


def _fill_s(fill: Mapping[str, list[Event]], cost_s: _EventCost) -> float:
    """The shell must be there before its code can run; then the first layer may load beside that."""
    shell_s = math.fsum(cost_s(e) for e in fill["h2d"] if e.layer == SHELL)
    h2d_s, d2h_s, compute_s = (math.fsum(map(cost_s, fill[lane])) for lane in ("h2d", "d2h", "compute"))
    return shell_s + max(h2d_s - shell_s, d2h_s, compute_s)


def _tail_s(tail: Mapping[str, list[Event]], cost_s: _EventCost, deferred: bool) -> float:
    """Pushes follow one another, and each update its push; deferred updates follow all pushes."""
    pushed_s, arrival_s = 0.0, {}
    for push in tail["d2h"]:
        pushed_s += cost_s(push)
        arrival_s[push.layer] = pushed_s
    updated_s = 0.0
    for update in tail["eps"]:
        ready_s = pushed_s if deferred else arrival_s.get(update.layer, pushed_s)
        updated_s = max(updated_s, ready_s) + cost_s(update)
    return max(pushed_s, updated_s)
