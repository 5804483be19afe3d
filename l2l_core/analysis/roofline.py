"""The roofline of a step: its shortest possible time if every lane worked whenever it could.

Computed from the events of a trace. `bounds.py` has the limits of the step as measured.

The phases of a step follow one another without gaps::

    fill      until the first layer computes: the shell and the first layer load, the batch is copied
    forward   until backward starts
    middle    depth first, until backward of the last micro-batch starts; otherwise none
    backward  until compute ends
    tail      the last gradients are pushed, the last layers updated

Backward starts with the visit of the last layer, in which micro-batches run forward, loss and backward one after the other.
That visit counts to backward, so both phases consist of whole visits and grow in proportion to the number of micro-batches.

Depth first, every micro-batch has such a visit. Loads can hide only under the forward of the first micro-batch, pushes and
updates only under the backward of the last: these are the phases forward and backward; the middle grows with the number of
micro-batches.

Forward, middle and backward take as long as their busiest lane, which in backward may be the EPS. Fill and tail are chains,
in which every piece waits for the one before. The overlap is that of L2L-p, Pudipeddi et al.,
https://arxiv.org/abs/2002.05645.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from l2l_core.trace import Event, Trace, find_last_backward_start, group_by_visit, turn_of

MIDDLE = "middle"
PHASES = ("fill", "forward", "backward", "tail")  # of any step
ALL_PHASES = ("fill", "forward", MIDDLE, "backward", "tail")
OVERLAPPING = ("forward", "backward")  # fill and tail are chains
SHELL = "shell"

SecondsByLane = Mapping[str, float]


class VisitWork:
    """The work of a step, by the visit that can hide it.

    Groups are the fill, one per visit, and the tail. With one layer ahead, a load belongs to the visit before the one that
    needs it, and a push to the visit after its own. EPS work that can hide belongs to backward as a whole: to the group of
    its last visit.
    """

    def __init__(self, lanes: Mapping[str, Sequence[Event]], settings: Mapping[str, Any]) -> None:
        visits = group_by_visit(lanes["compute"])
        self.backward_start, self.last_backward_start = turn_of(visits), find_last_backward_start(visits)
        self.is_deferred = settings.get("update", "eager") != "eager"
        self._visit_starts = [visit[0].start_s for visit in visits[1:]]
        self._starts_by_layer: dict[str, list[float]] = defaultdict(list)
        for visit in visits[1:]:
            self._starts_by_layer[visit[0].layer].append(visit[0].start_s)
        self._compute_stop_s = max((e.stop_s for e in lanes["compute"]), default=0.0)
        visited = [visit[0].layer for visit in visits[1:]]
        self.early_layers = {*visited} - {*visited[-1:]}  # their gradients are complete before the last layer's
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
        """Return the group before the visit that needs a load; the shell, which every visit needs, is in the first."""
        starts = self._starts_by_layer[load.layer]
        used = bisect_left(starts, load.start_s)
        if load.layer == SHELL or used == len(starts):  # not used yet: its visit is the next
            return 0 if load.layer == SHELL else bisect_right(self._visit_starts, load.start_s)
        return bisect_left(self._visit_starts, starts[used])


@dataclass(frozen=True)
class Roofline:
    """The shortest time of a step whose lanes are serial and never wait for each other.

    Attributes:
        busy_s: by phase and lane, the seconds of work.
        fill_s: before the first layer can compute; never hidden.
        tail_s: from the end of compute until the last update; never hidden.
        visits_s: of forward, middle and backward, the sum over visits of the busiest lane. With one layer ahead, copies
            hide only under the visit before (loads) or after (pushes) their own, so this is at least the phase's time. If
            the device has room for all gradients, as depth first, pushes may be later and a step shorter.
    """

    busy_s: Mapping[str, SecondsByLane]
    fill_s: float
    tail_s: float
    visits_s: Mapping[str, float]

    @property
    def forward_s(self) -> float:
        """Seconds of forward's busiest lane."""
        return max(self.busy_s["forward"].values())

    @property
    def middle_s(self) -> float:
        """Seconds of the middle's busiest lane."""
        return max(self.busy_s[MIDDLE].values())

    @property
    def backward_s(self) -> float:
        """Seconds of backward's busiest lane, the EPS included."""
        return max(self.busy_s["backward"].values())

    @property
    def step_s(self) -> float:
        """Roofline of the step, per phase."""
        return self.fill_s + self.forward_s + self.middle_s + self.backward_s + self.tail_s

    @property
    def by_visit_s(self) -> float:
        """Roofline of the step, per visit."""
        backward_s = max(self.visits_s["backward"], self.busy_s["backward"]["eps"])
        return self.fill_s + self.visits_s["forward"] + self.visits_s[MIDDLE] + backward_s + self.tail_s

    @property
    def serial_s(self) -> float:
        """Seconds of the step without any overlap (`ahead=0`)."""
        return math.fsum(seconds for lanes in self.busy_s.values() for seconds in lanes.values())


def roofline(trace: Trace, figures: Mapping[str, Any] | None = None) -> Roofline:
    """Return the roofline of this trace's work on a link with these figures.

    Compute and EPS take the seconds of their events: for a forecast, record the trace without link limits, so that no event
    contains waiting. Copies take bytes over bandwidth plus one latency per event, or their measured time without a
    bandwidth.

    Args:
        trace: of a whole training step, with the loads of the setting in question: `ahead=0` makes one more.
        figures: "h2d_bytes_per_s", "d2h_bytes_per_s", "latency_s". Default: the trace's settings.

    Raises:
        ValueError: the trace has no visit with a loss or backward, or its step failed.
    """
    trace.check_finished()
    work = VisitWork(trace.lanes, trace.settings)
    cost_s = _EventCost(trace.settings if figures is None else figures)
    if not work.in_phase("backward"):
        raise ValueError(f"{trace!r} is not a whole training step: it has no layer's visit with a loss or backward")
    fill, *_, tail = work.groups
    whole = ALL_PHASES[1:-1]
    visits = {phase: [_cost_by_lane(group, cost_s) for group in work.in_phase(phase)] for phase in whole}
    busy_s = {
        "fill": _cost_by_lane(fill, cost_s),
        **{phase: {lane: math.fsum(v[lane] for v in visits[phase]) for lane in fill} for phase in whole},
        "tail": _cost_by_lane(tail, cost_s),
    }
    visits_s = {p: math.fsum(max(v["compute"], v["h2d"], v["d2h"]) for v in each) for p, each in visits.items()}
    return Roofline(busy_s, _fill_s(fill, cost_s), _tail_s(tail, cost_s, work.is_deferred), visits_s)


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
    """Return the seconds of the fill: the shell loads, then the first layer loads while the shell computes."""
    shell_s = math.fsum(cost_s(e) for e in fill["h2d"] if e.layer == SHELL)
    h2d_s, d2h_s, compute_s = (math.fsum(map(cost_s, fill[lane])) for lane in ("h2d", "d2h", "compute"))
    return shell_s + max(h2d_s - shell_s, d2h_s, compute_s)


def _tail_s(tail: Mapping[str, list[Event]], cost_s: _EventCost, deferred: bool) -> float:
    """Return the seconds of the tail: pushes in a row, each update after its push, deferred ones after all pushes."""
    pushed_s, arrival_s = 0.0, {}
    for push in tail["d2h"]:
        pushed_s += cost_s(push)
        arrival_s[push.layer] = pushed_s
    updated_s = 0.0
    for update in tail["eps"]:
        ready_s = pushed_s if deferred else arrival_s.get(update.layer, pushed_s)
        updated_s = max(updated_s, ready_s) + cost_s(update)
    return max(pushed_s, updated_s)
