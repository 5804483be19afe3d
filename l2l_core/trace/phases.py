"""The phases of a measured step, and what every lane did in each. Their names and borders are those of `roofline.py`."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence

from l2l_core.trace.events import Event
from l2l_core.trace.intervals import Interval, intersect, measure, merge
from l2l_core.trace.roofline import OVERLAPPING, PHASES, turn_of, visits_of

IDLE = "idle"  # what binds a phase when compute waits and no lane works


def cuts_of(lanes: Mapping[str, Sequence[Event]]) -> Iterator[tuple[str, float, float]]:
    """Give name, start and stop (in seconds) of each phase that takes time."""
    events = [event for lane in lanes.values() for event in lane]
    if not events:
        return
    groups = visits_of(lanes["compute"])
    turn = turn_of(groups)
    times = [min(e.start_s for e in events)]
    times += [groups[i][0].start_s for i in (1, turn) if i < len(groups)]
    if turn < len(groups):  # otherwise nothing says that compute is over: a forward pass, or a step under way
        times.append(max(e.stop_s for e in lanes["compute"]))
    times.append(max(e.stop_s for e in events))
    for name, start_s, stop_s in zip(PHASES, times, times[1:], strict=False):
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
        worked_s = measure(merge(interval for union in self._union.values() for interval in union))
        self.exposed_s[IDLE] = max(0.0, self.span_s - worked_s)
        # a chain has nothing to overlap with, so at best some lane works all the time
        self.floor_s = max(self.busy_s.values()) if name in OVERLAPPING else worked_s

    def _exposed_s(self, union: list[Interval]) -> float:
        return max(0.0, measure(union) - measure(intersect(union, self._union["compute"])))

    def work_for_s(self, lane: str, layers: set[str]) -> float:
        """Add up the seconds of work for these layers."""
        return math.fsum(seconds for event, seconds in self.parts[lane] if event.layer in layers)


def union_of(events: Iterable[Event]) -> list[Interval]:
    return merge((event.start_s, event.stop_s) for event in events)
