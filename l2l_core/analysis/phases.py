"""The phases of a measured step, and what every lane did in each. Their names and borders are those of `roofline.py`."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence

from l2l_core.analysis.roofline import ALL_PHASES
from l2l_core.analysis.worker_waits import wait_interval
from l2l_core.trace import (
    NETWORK_LANES,
    Event,
    Interval,
    find_last_backward_start,
    group_by_visit,
    intersect,
    merge,
    total_length,
    turn_of,
)

IDLE = "idle"  # what binds a phase when compute waits and no lane works
OTHERS = "others"  # what binds it when compute waits for other workers to come


def split_phases(lanes: Mapping[str, Sequence[Event]]) -> Iterator[tuple[str, float, float]]:
    """Give name, start and stop (in seconds) of each phase that takes time."""
    events = [event for lane in lanes.values() for event in lane]
    if not events:
        return
    groups = group_by_visit(lanes["compute"])
    turn, last_turn = turn_of(groups), find_last_backward_start(groups)
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
        self.clipped_events = {
            lane: [
                (event, min(event.stop_s, stop_s) - max(event.start_s, start_s))
                for event in events
                if max(event.start_s, start_s) < min(event.stop_s, stop_s)
            ]
            for lane, events in lanes.items()
        }
        window = [(start_s, stop_s)]
        self._busy_intervals = {lane: intersect(busy_intervals(events), window) for lane, events in lanes.items()}
        self.busy_s = {lane: total_length(union) for lane, union in self._busy_intervals.items()}
        self.idle_s = max(0.0, self.span_s - self.busy_s["compute"])
        self.exposed_s = {lane: self._exposed_s(union) for lane, union in self._busy_intervals.items()}
        worked = merge(interval for union in self._busy_intervals.values() for interval in union)
        worked_s = total_length(worked)
        waits = [wait_interval(event) for lane in lanes if lane in NETWORK_LANES for event in lanes[lane]]
        waited = intersect(merge(waits), window)
        # Of the time in which no lane works, the rest is nobody's
        self.exposed_s[OTHERS] = max(0.0, total_length(waited) - total_length(intersect(waited, worked)))
        self.exposed_s[IDLE] = max(0.0, self.span_s - worked_s - self.exposed_s[OTHERS])
        self.waited_s = self._waits_by_worker(lanes, window)
        # a chain has nothing to overlap with, so at best some lane works all the time
        self.floor_s = max(self.busy_s.values()) if name in ALL_PHASES[1:-1] else worked_s

    def _exposed_s(self, busy: list[Interval]) -> float:
        return max(0.0, total_length(busy) - total_length(intersect(busy, self._busy_intervals["compute"])))

    def _waits_by_worker(self, lanes: Mapping[str, Sequence[Event]], window: list[Interval]) -> dict[int, float]:
        """By worker that came last, the seconds in which it was waited for."""
        by_last = defaultdict(list)
        for event in (event for lane in lanes if lane in NETWORK_LANES for event in lanes[lane] if event.stalled_s):
            by_last[event.last].append(wait_interval(event))
        return {last: total_length(intersect(merge(waits), window)) for last, waits in by_last.items()}

    def layer_seconds(self, lane: str, layers: set[str]) -> float:
        """Add up the seconds of work for these layers."""
        return math.fsum(seconds for event, seconds in self.clipped_events[lane] if event.layer in layers)


def busy_intervals(events: Iterable[Event]) -> list[Interval]:
    return merge((event.start_s, event.stop_s) for event in events)
