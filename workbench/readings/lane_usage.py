"""Busy and exposed time of lanes, phases of a step, and compute time of layers.

The results equal those of `Trace` and `l2l_core.analysis.phases` (tested), but are computed by numpy, fast enough to redraw
100,000 events ten times a second.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from l2l_core.analysis import ALL_PHASES, OVERLAPPING
from workbench.readings.memory_levels import MemoryLevels
from workbench.readings.trace_columns import Columns

Intervals = tuple[
    NDArray[np.float64], NDArray[np.float64]
]  # starts and stops; sorted, apart from each other, not empty


@dataclass(frozen=True)
class TimelineSummary:
    """Figures of a timeline.

    Attributes:
        span_s: seconds from the first start to the last stop.
        overlap: share in [0, 1] of copy time hidden under compute; 1.0 without copies.
        busy_s: by lane, seconds with work.
        exposed_s: by lane, seconds with work while compute had none.
        exposed: by lane, the intervals of `exposed_s`.
    """

    span_s: float
    overlap: float
    busy_s: Mapping[str, float]
    exposed_s: Mapping[str, float]
    exposed: Mapping[str, Intervals]


def summarize_timeline(columns: Columns) -> TimelineSummary:
    """Return overlap, busy and exposed seconds, as `Trace` computes them."""
    busy = {
        lane: union(columns.start_s[on], columns.stop_s[on])
        for lane in columns.lanes
        for on in (columns.events_on(lane),)
    }
    exposed = {lane: subtract(busy[lane], busy["compute"]) for lane in columns.lanes[1:]}
    exposed["compute"] = (np.empty(0), np.empty(0))
    copied_s, exposed_copy_s = (
        length_s(union(*(np.concatenate(edges) for edges in zip(lanes["h2d"], lanes["d2h"], strict=True))))
        for lanes in (busy, exposed)
    )
    return TimelineSummary(
        span_s=columns.end_s - float(columns.start_s.min()) if len(columns.start_s) else 0.0,
        overlap=min(1.0, max(0.0, 1.0 - exposed_copy_s / copied_s)) if copied_s else 1.0,
        busy_s={lane: length_s(intervals) for lane, intervals in busy.items()},
        exposed_s={lane: length_s(intervals) for lane, intervals in exposed.items()},
        exposed=exposed,
    )


def union(start_s: NDArray[np.float64], stop_s: NDArray[np.float64]) -> Intervals:
    """Return the union of intervals; touching ones are joined, empty ones dropped."""
    nonempty = start_s < stop_s
    start_s, stop_s = start_s[nonempty], stop_s[nonempty]
    if (start_s[1:] < start_s[:-1]).any():
        order = np.argsort(start_s, kind="stable")
        start_s, stop_s = start_s[order], stop_s[order]
    reach_s = np.maximum.accumulate(stop_s)
    first = np.flatnonzero(np.concatenate([[True], start_s[1:] > reach_s[:-1]])) if len(start_s) else np.arange(0)
    return start_s[first], reach_s[np.append(first[1:], len(start_s)) - 1] if len(first) else reach_s


def subtract(a: Intervals, b: Intervals) -> Intervals:
    """Return the parts of `a` outside `b`."""
    edges = np.concatenate([*a, *b])
    order = np.argsort(edges, kind="stable")  # four sorted runs, which a stable sort only merges
    # 1 inside `a`, 2 inside `b`; the order of equal edges does not matter, since nothing lies between them.
    steps = np.repeat(np.array([1, -1, 2, -2], np.int8), [len(a[0]), len(a[1]), len(b[0]), len(b[1])])
    only_a = np.cumsum(steps[order], dtype=np.int8)[:-1] == 1
    edges = edges[order]
    return union(edges[:-1][only_a], edges[1:][only_a])


def length_s(intervals: Intervals) -> float:
    """Return the total length of intervals in seconds."""
    return float((intervals[1] - intervals[0]).sum())


def find_phases(columns: Columns) -> list[tuple[str, float, float]]:
    """Return name, start and stop of each nonempty phase, as `l2l_core.analysis.phases`; also for a running step."""
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
        continues = has_kind(columns, compute[visits[stays]], ("forward",))  # stays with forward and backward
        last = stays[continues][-1] if continues.any() else stays[0]
        times += [float(start_s[visits[stay]]) for stay in (stays[0], last)]
        times.append(float(columns.stop_s[compute[~has_kind(columns, compute, ("update",))]].max()))
    times.append(columns.end_s)
    return [cut for cut in zip(ALL_PHASES, times, times[1:], strict=False) if cut[1] < cut[2]]


def visit_starts(columns: Columns, compute: NDArray[np.intp]) -> NDArray[np.intp]:
    """Return the positions in `compute` of the first event of each visit."""
    at = np.flatnonzero(has_kind(columns, compute, OVERLAPPING))
    stay = columns.stay[compute[at]]
    return at[np.append(True, stay[1:] != stay[:-1])] if len(at) else at


def has_kind(columns: Columns, on: NDArray[np.intp], kinds: Collection[str]) -> NDArray[np.bool_]:
    """Return a mask of the events `on` that have one of the kinds."""
    selected = np.array([kind in kinds for kind in columns.kinds] or [False])
    return selected[columns.kind[on]]


class LayerUsage(NamedTuple):
    """Figures of one layer in one step, over all visits and micro-batches.

    Attributes:
        key: key of the layer.
        compute_s: seconds of its forward and backward.
        waiting_s: seconds for which compute waited just before, for copies or for the EPS.
        device_bytes: peak of all device bytes while the layer computed; 0 without samples.
    """

    key: str
    compute_s: float
    waiting_s: float
    device_bytes: int


def layer_usage(columns: Columns, keys: Iterable[str]) -> Sequence[LayerUsage]:
    """Return the figures of layers in the order of `keys`; zeros for a layer that has not run."""
    compute = columns.events_on("compute")
    start_s, stop_s = columns.start_s[compute], columns.stop_s[compute]
    edges_s = np.maximum.accumulate(np.column_stack([start_s, stop_s]).ravel())  # sorted, because a lane is serial
    levels = MemoryLevels.of(columns, "device", compute)
    peaks = levels.column_maxima(edges_s)[::2].sum(axis=1) if len(compute) else np.zeros(0, np.int64)
    indices = {key: i for i, key in enumerate(columns.layers)}
    found = []
    for key in keys:
        mask = columns.layer[compute] == indices.get(key, -1)
        compute_s, waiting_s = float((stop_s - start_s)[mask].sum()), float(columns.stalled_s[compute][mask].sum())
        found.append(LayerUsage(key, compute_s, waiting_s, int(peaks[mask].max(initial=0))))
    return found
