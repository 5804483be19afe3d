"""The phases of a measured step, and what every lane did in each. Their names and borders are those of `roofline.py`."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence

from l2l_core.analysis.roofline import ALL_PHASES
from l2l_core.analysis.waits import wait_before
from l2l_core.trace import NETWORK, Event, Interval, intersect, last_turn_of, measure, merge, turn_of, visits_of

IDLE = "idle"  # what binds a phase when compute waits and no lane works
OTHERS = "others"  # what binds it when compute waits for other workers to come


def cuts_of(lanes: Mapping[str, Sequence[Event]]) -> Iterator[tuple[str, float, float]]:
    """Give name, start and stop (in seconds) of each phase that takes time."""
    events = [event for lane in lanes.values() for event in lane]
    if not events:
        return
    groups = visits_of(lanes["compute"])
    turn, last_turn = turn_of(groups), last_turn_of(groups)
    times = [min(e.start_s for e in events)]
    times += [groups[i][0].start_s for i in (1, turn, last_turn) if i < len(groups)]
    if turn < len(groups):  # otherwise nothing says that compute is over: a forward pass, or a step under way
        times.append(max(e.stop_s for e in lanes["compute"] if e.kind != "update"))  # a plan updates on the device
    times.append(max(e.stop_s for e in events))
    for name, start_s, stop_s in zip(ALL_PHASES, times, times[1:], strict=False):
        if start_s < stop_s:
            yield name, start_s, stop_s


class Phase:
    """One phase of a measured step: the part of every event that lies in it."""

    def __init__(self, name: str, start_s: float, stop_s: float, lanes: Mapping[str, Sequence[Event]]) -> None:
        self.name, self.span_s = name, stop_s - start_s
        self.parts = {
            lane: [
                (event, min(event.stop_s, stop_s) - max(event.start_s, start_s))
                for event in events
                if max(event.start_s, start_s) < min(event.stop_s, stop_s)
            ]
            for lane, events in lanes.items()
        }
        window = [(start_s, stop_s)]
        self._union = {lane: intersect(union_of(events), window) for lane, events in lanes.items()}
        self.busy_s = {lane: measure(union) for lane, union in self._union.items()}
        self.idle_s = max(0.0, self.span_s - self.busy_s["compute"])
        self.exposed_s = {lane: self._exposed_s(union) for lane, union in self._union.items()}
        worked = merge(interval for union in self._union.values() for interval in union)
        worked_s = measure(worked)
        waits = [wait_before(event) for lane in lanes if lane in NETWORK for event in lanes[lane]]
        waited = intersect(merge(waits), window)
        # Of the time in which no lane works, the rest is nobody's
        self.exposed_s[OTHERS] = max(0.0, measure(waited) - measure(intersect(waited, worked)))
        self.exposed_s[IDLE] = max(0.0, self.span_s - worked_s - self.exposed_s[OTHERS])
        self.waited_s = self._waits_by_last(lanes, window)
        # a chain has nothing to overlap with, so at best some lane works all the time
        self.floor_s = max(self.busy_s.values()) if name in ALL_PHASES[1:-1] else worked_s

    def _exposed_s(self, union: list[Interval]) -> float:
        return max(0.0, measure(union) - measure(intersect(union, self._union["compute"])))

    def _waits_by_last(self, lanes: Mapping[str, Sequence[Event]], window: list[Interval]) -> dict[int, float]:
        """By worker that came last, the seconds in which it was waited for."""
        by_last = defaultdict(list)
        for event in (event for lane in lanes if lane in NETWORK for event in lanes[lane] if event.stalled_s):
            by_last[event.last].append(wait_before(event))
        return {last: measure(intersect(merge(waits), window)) for last, waits in by_last.items()}

    def work_for_s(self, lane: str, layers: set[str]) -> float:
        """Add up the seconds of work for these layers."""
        return math.fsum(seconds for event, seconds in self.parts[lane] if event.layer in layers)


def union_of(events: Iterable[Event]) -> list[Interval]:
    return merge((event.start_s, event.stop_s) for event in events)
