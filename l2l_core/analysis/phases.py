"""The phases of a measured step, with the work of every lane in each, and the lane that limits it.

`roofline.py` defines them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from l2l_core.analysis.roofline import ALL_PHASES, SecondsByLane
from l2l_core.analysis.worker_traces import waits_by_worker
from l2l_core.trace import (
    NETWORK_LANES,
    Event,
    Interval,
    find_last_backward_start,
    format_seconds,
    group_by_visit,
    intersect,
    merge,
    total_length,
    turn_of,
)

IDLE = "idle"  # compute waits while no lane works
NEGLIGIBLE_SHARE = 0.05  # smaller shares of a phase are not reported
OTHERS = "others"  # compute waits for other workers


def split_phases(lanes: Mapping[str, Sequence[Event]]) -> Iterator[tuple[str, float, float]]:
    """Yield name, start and stop (in seconds) of each phase that takes time."""
    events = [event for lane in lanes.values() for event in lane]
    if not events:
        return
    groups = group_by_visit(lanes["compute"])
    turn, last_turn = turn_of(groups), find_last_backward_start(groups)
    times = [min(e.start_s for e in events)]
    times += [groups[i][0].start_s for i in (1, turn, last_turn) if i < len(groups)]
    if turn < len(groups):  # else compute may not be over: a forward pass, or a running step
        times.append(max(e.stop_s for e in lanes["compute"] if e.kind != "update"))  # plans update on the device
    times.append(max(e.stop_s for e in events))
    for name, start_s, stop_s in zip(ALL_PHASES, times, times[1:], strict=False):
        if start_s < stop_s:
            yield name, start_s, stop_s


class Phase:
    """One phase of a measured step, with the part of every event inside it."""

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
        busy = {lane: merge((event.start_s, event.stop_s) for event in events) for lane, events in lanes.items()}
        self._busy_intervals = {lane: intersect(union, window) for lane, union in busy.items()}
        self.busy_s = {lane: total_length(union) for lane, union in self._busy_intervals.items()}
        self.idle_s = max(0.0, self.span_s - self.busy_s["compute"])
        self.exposed_s = {lane: self._exposed_s(union) for lane, union in self._busy_intervals.items()}
        worked = merge(interval for union in self._busy_intervals.values() for interval in union)
        worked_s = total_length(worked)
        collectives = [event for lane in NETWORK_LANES for event in lanes.get(lane, ())]
        waits = waits_by_worker(collectives)
        waited = intersect(merge(interval for each in waits.values() for interval in each), window)
        self.exposed_s[OTHERS] = max(0.0, total_length(waited) - total_length(intersect(waited, worked)))
        self.exposed_s[IDLE] = max(0.0, self.span_s - worked_s - self.exposed_s[OTHERS])
        self.waited_s = {last: total_length(intersect(each, window)) for last, each in waits.items()}
        # A chain cannot overlap, so at best some lane works all the time
        self.floor_s = max(self.busy_s.values()) if name in ALL_PHASES[1:-1] else worked_s

    def _exposed_s(self, busy: list[Interval]) -> float:
        return max(0.0, total_length(busy) - total_length(intersect(busy, self._busy_intervals["compute"])))

    def layer_seconds(self, lane: str, layers: set[str]) -> float:
        """Return the seconds of a lane's work for these layers."""
        return math.fsum(seconds for event, seconds in self.clipped_events[lane] if event.layer in layers)


@dataclass(frozen=True)
class Bound:
    """The lane that limits one phase of a step; `str` makes a sentence of it.

    Attributes:
        phase: one of `ALL_PHASES`.
        span_s: length of the phase in seconds.
        busy_s: by lane, its seconds of work in the phase.
        lane: the lane with the most exposed time; "others" if compute mostly waited for other workers, "idle" if it mostly
            waited while no lane worked, "compute" if each of these is at most 5 % of the phase.
        exposed_s: seconds in which that lane worked and compute did not; for "idle" and "others", in which no lane worked.
        idle_s: seconds in which compute did not work.
        floor_s: roofline of the phase: its busiest lane; in fill and tail, which are chains, the time in which any lane
            worked.
        advice: the change that would help, with a number, or the reason why none would.
        settings: the advice as values for `RelayConfig`, empty if no setting helps. "micro_batches" counts micro-batches of
            the present size, so the batch must grow with it.

    Example:
        >>> [bound.phase for bound in relay.step(batch).trace.bound_by()]
        ['fill', 'forward', 'backward', 'tail']
    """

    phase: str
    span_s: float
    busy_s: SecondsByLane
    lane: str
    exposed_s: float
    idle_s: float
    floor_s: float
    advice: str
    settings: Mapping[str, Any]

    def __str__(self) -> str:
        if self.lane == "compute":
            found = f"bound by compute, which works {format_seconds(self.busy_s['compute'])} of {format_seconds(self.span_s)}"
        elif self.lane == OTHERS:
            found = f"compute waits {format_seconds(self.exposed_s)} of {format_seconds(self.span_s)} for other workers"
        elif self.lane == IDLE:
            found = (
                f"compute waits {format_seconds(self.exposed_s)} of {format_seconds(self.span_s)} while no lane works"
            )
        else:
            found = f"{self.lane} exposes {format_seconds(self.exposed_s)} of {format_seconds(self.span_s)}"
        return f"{self.phase}: {found}; {self.advice}"


def binding_lane(phase: Phase) -> str:
    """Return the lane that limits a phase, as in `Bound.lane`."""
    lane = max(phase.exposed_s, key=lambda lane: (phase.exposed_s[lane], phase.busy_s.get(lane, 0.0)))
    return lane if phase.exposed_s[lane] > NEGLIGIBLE_SHARE * phase.span_s else "compute"


def make_bound(phase: Phase, lane: str, floor_s: float, advice: str, settings: Mapping[str, Any]) -> Bound:
    """Return the bound of a phase that this lane limits."""
    exposed_s = phase.exposed_s[lane]
    return Bound(phase.name, phase.span_s, phase.busy_s, lane, exposed_s, phase.idle_s, floor_s, advice, settings)
