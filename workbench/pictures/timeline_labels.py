"""Labels, separators and tooltips of a timeline's bars.

Labels are per unit: on compute a visit with all its micro-batches, on other lanes successive events of one layer.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from l2l_core.analysis import OVERLAPPING
from l2l_core.trace import format_bytes
from workbench.pictures import svg
from workbench.pictures.scale import Scale, format_seconds
from workbench.pictures.theme import KIND_LETTERS, kind_colour, text_colour_on
from workbench.readings import Bars, Columns, LayerNumbers, full_name, has_kind, visit_starts

MIN_LABEL_PX = 7.0  # px, the narrowest bar with a letter
MIN_TIP_PX = 2.0  # px
MAX_UNITS = 400  # per lane
LETTER, SMALL_LETTER = 7.2, 6.2  # px, in wide fonts
_FULL = 0.6  # a unit with a smaller busy share has no label, which would lie between its bars


class EventGroup(NamedTuple):
    """A unit: events that are labelled as one bar."""

    start_s: float
    stop_s: float
    kind: str
    layer: str
    count: int
    nbytes: int
    busy_s: float


def draw_labels(
    units: Sequence[EventGroup], hatched: Bars, axis: Scale, y: float, numbers: LayerNumbers
) -> Iterator[str]:
    """Draw letter and number in the middle of every unit with room for them, in one size.

    `y` is the baseline in px. A halo separates the letters from hatching and, if there is room, from separators.
    """
    fitting, small = [], False
    for unit in units:
        low, high = axis(unit.start_s), axis(min(unit.stop_s, axis.high))
        words = label(unit.kind, unit.layer, numbers)
        full = unit.busy_s >= _FULL * (unit.stop_s - unit.start_s)
        if high - low >= max(MIN_LABEL_PX, SMALL_LETTER * len(words) + 1) and full:
            roomy = unit.count > 1 and high - low >= LETTER * len(words) + 6
            fitting.append(((low + high) / 2, words, kind_colour(unit.kind), roomy))
            small |= high - low < LETTER * len(words) + 3
    for x, words, colour, roomy in fitting:
        half = LETTER * len(words) / 2
        written = svg.text(x, y, words, style="small" if small else "", anchor="middle", fill=text_colour_on(colour))
        if roomy or ((hatched.left < x + half) & (hatched.right > x - half)).any():
            halo = f'stroke="{colour}" stroke-width="4" stroke-linejoin="round" paint-order="stroke"'
            written = f"<g {halo}>{written}</g>"
        yield written


def label(kind: str, layer: str, numbers: LayerNumbers) -> str:
    """Return a label such as "F6" for a forward visit of layer 6; the letter alone without a layer."""
    return KIND_LETTERS.get(kind, kind) + str(numbers.get(layer, ""))


def draw_separators(
    columns: Columns, lane: str, on: NDArray[np.intp], axis: Scale, top: float, height: float
) -> Iterator[str]:
    """Draw thin lines between adjacent units of at least 4 px, and between adjacent events of at least 6 px."""
    px_per_s = (axis.last - axis.first) / axis.high
    start_s, stop_s = columns.start_s[on], columns.stop_s[on]
    if len(on) < 2:
        return
    touching = np.append(False, (start_s[1:] - stop_s[:-1]) * px_per_s < 0.8) & (start_s < axis.high)
    first = visit_starts(columns, on) if lane == "compute" else _group_starts(columns, on)
    wide = (stop_s - start_s) * px_per_s >= 6
    inner = touching & wide & np.append(False, wide[:-1])
    extent = np.diff(np.append(start_s[first], stop_s[-1])) * px_per_s
    outer = first[1:][(extent[1:] >= 4) & (extent[:-1] >= 4)]
    outer = outer[touching[outer]]
    inner[outer] = False
    for events, width in ((np.flatnonzero(inner), 0.7), (outer, 1.4)):
        lines = "".join(f"M{axis(x):.1f} {top:g}v{height:g}" for x in start_s[events].tolist())
        if lines:
            yield svg.path(lines, stroke=svg.PAGE, width=width)


def draw_tips(
    lanes: Sequence[tuple[Sequence[EventGroup], float]],
    height: float,
    axis: Scale,
    numbers: LayerNumbers,
    max_bytes: int,
    keyed: bool = True,
) -> list[str]:
    """Return transparent boxes with a tooltip over every unit; none at all if they exceed `max_bytes`.

    Args:
        lanes: units and upper edge of each lane.
        height: height of a lane.
        axis: seconds to pixels.
        numbers: numbers of the layers.
        max_bytes: maximum total size.
        keyed: True if the boxes carry the key of their layer, so that it can be selected.
    """
    tips: list[str] = []
    if sum(len(units) for units, _ in lanes) >= MAX_UNITS:  # at about 140 bytes each they would exceed any limit
        return tips
    for units, y in lanes:
        for unit in units:
            low, high = axis(unit.start_s), axis(min(unit.stop_s, axis.high))
            tip = _tooltip(unit, numbers)
            key = unit.layer if keyed and unit.layer in numbers else None
            tips.append(svg.rect(low, y, max(0.0, high - low), height, fill="transparent", tip=tip, key=key))
    return tips if sum(len(tip.encode()) for tip in tips) <= max_bytes else []


def draw_pickable(
    units: Sequence[EventGroup], y: float, height: float, axis: Scale, numbers: LayerNumbers
) -> Iterator[str]:
    """Draw transparent boxes over the units of layers, by which a layer can be selected."""
    for unit in units:
        if unit.layer in numbers:
            low, high = axis(unit.start_s), axis(min(unit.stop_s, axis.high))
            yield svg.rect(low, y, max(0.0, high - low), height, fill="transparent", key=unit.layer)


def _tooltip(unit: EventGroup, numbers: LayerNumbers) -> str:
    words = [label(unit.kind, unit.layer, numbers), unit.kind]
    if unit.layer and unit.layer != unit.kind:
        words.append(full_name(unit.layer, numbers))
    facts = [format_seconds(unit.busy_s)]
    facts += [format_bytes(unit.nbytes)] if unit.nbytes else []
    facts += [f"{unit.count} events"] if unit.count > 1 else []
    return f"{' '.join(words)}: {', '.join(facts)}"


def group_events(columns: Columns, lane: str, on: NDArray[np.intp], at_least_s: float) -> list[EventGroup]:
    """Return the units of a lane that last at least `at_least_s`, in order; the longest of more than `MAX_UNITS`.

    Args:
        columns: events of the step.
        lane: name of the lane.
        on: indices of the lane's events, by start.
        at_least_s: minimum duration of a unit.
    """
    if not len(on):
        return []
    units: list[EventGroup] = []
    first = _group_starts(columns, on)
    if lane == "compute":
        units, taken = _visit_groups(columns, on, at_least_s)
        # the remaining events lie between visits, and a visit ends a group
        begins = np.zeros(len(on), bool)
        begins[first] = True
        begins[1:] |= taken[:-1]
        rest = ~taken
        first = np.flatnonzero(begins[rest])
        on = on[rest]
    units += _long_groups(columns, on, first, at_least_s)
    return sorted(sorted(units, key=lambda unit: unit.start_s - unit.stop_s)[:MAX_UNITS])


def _group_starts(columns: Columns, on: NDArray[np.intp]) -> NDArray[np.intp]:
    """Return the positions in `on` at which kind, layer or visit changes."""
    new = np.zeros(len(on), bool)
    new[:1] = True
    for column in (columns.kind, columns.layer, columns.visit):
        values = column[on]
        new[1:] |= values[1:] != values[:-1]
    return np.flatnonzero(new)


def _long_groups(
    columns: Columns, on: NDArray[np.intp], first: NDArray[np.intp], at_least_s: float
) -> list[EventGroup]:
    """Return units of the events from each position in `first` to the next, without short ones."""
    if not len(first):
        return []
    last = np.append(first[1:], len(on)) - 1
    busy_s = np.add.reduceat(columns.stop_s[on] - columns.start_s[on], first)
    nbytes = np.add.reduceat(columns.nbytes[on], first)
    extent_s = columns.stop_s[on[last]] - columns.start_s[on[first]]
    # without units of no duration, even if `at_least_s` is 0
    long = np.flatnonzero(extent_s >= max(at_least_s, 1e-300))
    long = np.sort(long[np.argsort(-extent_s[long], kind="stable")[:MAX_UNITS]])
    return [
        EventGroup(
            float(columns.start_s[on[first[i]]]),
            float(columns.stop_s[on[last[i]]]),
            columns.kinds[int(columns.kind[on[first[i]]])],
            columns.layers[int(columns.layer[on[first[i]]])],
            int(last[i] - first[i]) + 1,
            int(nbytes[i]),
            float(busy_s[i]),
        )
        for i in long
    ]


def _visit_groups(
    columns: Columns, on: NDArray[np.intp], at_least_s: float
) -> tuple[list[EventGroup], NDArray[np.bool_]]:
    """Return units for the visits of one kind, forward or backward, and a mask of their events in `on`."""
    starts = visit_starts(columns, on)
    work = has_kind(columns, on, OVERLAPPING)
    visit = np.searchsorted(starts, np.arange(len(on)), side="right") - 1  # -1 before the first
    taken = work & (visit >= 0)
    if not taken.any():
        return [], taken
    # excludes visits in which forward and backward alternate
    forward = np.bincount(visit[taken], has_kind(columns, on[taken], ("forward",)), len(starts))
    every = np.bincount(visit[taken], minlength=len(starts))
    taken &= ((forward == 0) | (forward == every))[visit]
    chosen = on[taken]
    first = np.flatnonzero(np.append(True, np.diff(visit[taken]) != 0)) if len(chosen) else np.arange(0)
    return _long_groups(columns, chosen, first, at_least_s), taken
