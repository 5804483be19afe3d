"""When lanes were busy, exposed, and in which phase, from a trace's columns.

The numbers are those of `Trace` and of `l2l_core.analysis.phases`, by numpy, so that a picture of a hundred thousand events can
show them ten times a second. A test compares the two.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from l2l_core.analysis import ALL_PHASES, OVERLAPPING
from workbench.readings.trace_columns import Columns

Intervals = tuple[
    NDArray[np.float64], NDArray[np.float64]
]  # starts and stops; sorted, apart from each other, not empty


@dataclass(frozen=True)
class TimelineSummary:
    """What a timeline says in numbers.

    Attributes:
        span_s: from the first start to the last stop.
        overlap: share in [0, 1] of copy time hidden under compute; 1.0 if nothing was copied.
        busy_s: by lane, seconds in which it had work.
        exposed_s: by lane, seconds in which it had work while compute had none.
        exposed: by lane, when that was.
    """

    span_s: float
    overlap: float
    busy_s: Mapping[str, float]
    exposed_s: Mapping[str, float]
    exposed: Mapping[str, Intervals]


def summarize_timeline(columns: Columns) -> TimelineSummary:
    """Find overlap, busy and exposed seconds as `Trace` does, fast for 100,000 events."""
    busy = {
        lane: union(columns.start_s[on], columns.stop_s[on])
        for lane in columns.lanes
        for on in (columns.events_on(lane),)
    }
    exposed = {lane: subtract(busy[lane], busy["compute"]) for lane in columns.lanes[1:]}
    exposed["compute"] = (np.empty(0), np.empty(0))
    copied_s, shown_s = (
        length_s(union(*(np.concatenate(edges) for edges in zip(lanes["h2d"], lanes["d2h"], strict=True))))
        for lanes in (busy, exposed)
    )
    return TimelineSummary(
        span_s=columns.end_s - float(columns.start_s.min()) if len(columns.start_s) else 0.0,
        overlap=min(1.0, max(0.0, 1.0 - shown_s / copied_s)) if copied_s else 1.0,
        busy_s={lane: length_s(intervals) for lane, intervals in busy.items()},
        exposed_s={lane: length_s(intervals) for lane, intervals in exposed.items()},
        exposed=exposed,
    )


def union(start_s: NDArray[np.float64], stop_s: NDArray[np.float64]) -> Intervals:
    """Unite intervals; touching ones are joined, empty ones dropped."""
    real = start_s < stop_s
    start_s, stop_s = start_s[real], stop_s[real]
    if (start_s[1:] < start_s[:-1]).any():
        order = np.argsort(start_s, kind="stable")
        start_s, stop_s = start_s[order], stop_s[order]
    reach_s = np.maximum.accumulate(stop_s)
    first = np.flatnonzero(np.concatenate([[True], start_s[1:] > reach_s[:-1]])) if len(start_s) else np.arange(0)
    return start_s[first], reach_s[np.append(first[1:], len(start_s)) - 1] if len(first) else reach_s


def subtract(a: Intervals, b: Intervals) -> Intervals:
    """Find the parts of `a` that lie outside `b`."""
    edges = np.concatenate([*a, *b])
    order = np.argsort(edges, kind="stable")  # four sorted runs, which a stable sort only merges
    # in `a` counts 1, in `b` 2; where edges coincide the count may be anything, for no time at all
    steps = np.repeat(np.array([1, -1, 2, -2], np.int8), [len(a[0]), len(a[1]), len(b[0]), len(b[1])])
    only_a = np.cumsum(steps[order], dtype=np.int8)[:-1] == 1
    edges = edges[order]
    return union(edges[:-1][only_a], edges[1:][only_a])


def length_s(intervals: Intervals) -> float:
    """Add up the length of intervals, in seconds."""
    return float((intervals[1] - intervals[0]).sum())


def find_phases(columns: Columns) -> list[tuple[str, float, float]]:
    """Give name, start and stop of each phase that takes time, as `l2l_core.analysis.phases.cuts_of`; also of a running step."""
    if not len(columns.start_s):
        return []
    compute = columns.events_on("compute")
    start_s = columns.start_s[compute]
    visits = visit_starts(columns, compute)
    turns = np.flatnonzero(has_kind(columns, compute, ("loss", "backward")))
    turns = turns[turns >= visits[0]] if len(visits) else turns[:0]
    times = [float(columns.start_s.min())]
    times += [float(start_s[visits[0]])] if len(visits) else []
    if len(turns):
        stays = np.searchsorted(visits, turns, side="right") - 1
        goes_on = has_kind(columns, compute[visits[stays]], ("forward",))  # as `last_turn_of` has it
        last = stays[goes_on][-1] if goes_on.any() else stays[0]
        times += [float(start_s[visits[stay]]) for stay in (stays[0], last)]
        times.append(float(columns.stop_s[compute[~has_kind(columns, compute, ("update",))]].max()))
    times.append(columns.end_s)
    return [cut for cut in zip(ALL_PHASES, times, times[1:], strict=False) if cut[1] < cut[2]]


def visit_starts(columns: Columns, compute: NDArray[np.intp]) -> NDArray[np.intp]:
    """Find the positions in `compute` where visits begin: the first event of a layer in each stay on the device."""
    at = np.flatnonzero(has_kind(columns, compute, OVERLAPPING))
    stay = columns.stay[compute[at]]
    return at[np.append(True, stay[1:] != stay[:-1])] if len(at) else at


def has_kind(columns: Columns, on: NDArray[np.intp], kinds: Collection[str]) -> NDArray[np.bool_]:
    """Say which of the events `on` are of one of these kinds."""
    among = np.array([kind in kinds for kind in columns.kinds] or [False])
    return among[columns.kind[on]]
