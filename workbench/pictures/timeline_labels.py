"""Words on a timeline's bars: letters with a layer's number where they fit, separators, and tooltips.

A visit on compute is one unit, whatever the number of its micro-batches; elsewhere events of one layer in a row are.
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

MIN_LABEL_PX = 7.0  # px, the narrowest bar that can carry a letter
MIN_TIP_PX = 2.0  # px
LETTER, SMALL_LETTER = 7.2, 6.2  # px, of wide fonts
_FULL = 0.6  # a unit that was busy for a smaller share of its extent has no label: it would stand in the void
_SURFACE = "var(--jp-layout-color1,Canvas)"


class EventGroup(NamedTuple):
    """Sums up events that a reader sees as one bar."""

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
    """Write letter and number in the middle of every unit that has room for them, in one size; `y` is the baseline, in px.

    A halo keeps hatching off the letters, and separators where there is room for it.
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
            written = (
                f'<g stroke="{colour}" stroke-width="4" stroke-linejoin="round" paint-order="stroke">{written}</g>'
            )
        yield written


def label(kind: str, layer: str, numbers: LayerNumbers) -> str:
    """Return "F6" for a forward visit of layer 6; the letter alone for what is no layer's."""
    return KIND_LETTERS.get(kind, kind) + str(numbers.get(layer, ""))


def draw_separators(
    columns: Columns, lane: str, on: NDArray[np.intp], axis: Scale, top: float, height: float
) -> Iterator[str]:
    """Draw thin lines between bars that touch: between units of 4 px or more, and between events of 6 px or more."""
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
    for at, width in ((np.flatnonzero(inner), 0.7), (outer, 1.4)):
        lines = "".join(f"M{axis(x):.1f} {top:g}v{height:g}" for x in start_s[at].tolist())
        if lines:
            yield svg.path(lines, stroke=_SURFACE, width=width)


def draw_tips(
    lanes: Sequence[tuple[Sequence[EventGroup], float]],
    height: float,
    axis: Scale,
    numbers: LayerNumbers,
    max_bytes: int,
    keyed: bool = True,
) -> list[str]:
    """Put a tooltip over every unit of 2 px or more, by invisible boxes; none at all if they need more than `room` bytes.

    Args:
        lanes: units and y of each.
        height: of a lane.
        numbers: of the layers.
        room: in bytes.
        keyed: whether they say of which layer they are, so that it can be chosen there.
    """
    tips: list[str] = []
    # at some 140 bytes each they would have no room, so they are not even made
    if sum(len(units) for units, _ in lanes) >= 400:
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
    """Put invisible boxes over units that are a layer's, by which it can be chosen; they are tips without words."""
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


def group_events(
    columns: Columns, lane: str, on: NDArray[np.intp], at_least_s: float, at_most: int = 400
) -> list[EventGroup]:
    """Return units of a lane that last `at_least_s` or longer, in order; the longest ones if there are too many.

    Args:
        on: the events of the lane, by start.
    """
    if not len(on):
        return []
    units: list[EventGroup] = []
    first = _group_starts(columns, on)
    if lane == "compute":
        units, taken = _visit_groups(columns, on, at_least_s, at_most)
        # what no visit takes lies between those that do, which therefore end a run
        begins = np.zeros(len(on), bool)
        begins[first] = True
        begins[1:] |= taken[:-1]
        rest = ~taken
        first = np.flatnonzero(begins[rest])
        on = on[rest]
    units += _long_groups(columns, on, first, at_least_s, at_most)
    units = sorted(sorted(units, key=lambda unit: unit.start_s - unit.stop_s)[:at_most])
    return units


def _group_starts(columns: Columns, on: NDArray[np.intp]) -> NDArray[np.intp]:
    """Positions in `on` where another kind, layer or visit begins."""
    new = np.zeros(len(on), bool)
    new[:1] = True
    for column in (columns.kind, columns.layer, columns.visit):
        values = column[on]
        new[1:] |= values[1:] != values[:-1]
    return np.flatnonzero(new)


def _long_groups(
    columns: Columns, on: NDArray[np.intp], first: NDArray[np.intp], at_least_s: float, at_most: int
) -> list[EventGroup]:
    """Units made of the events from each position in `first` to the next."""
    if not len(first):
        return []
    last = np.append(first[1:], len(on)) - 1
    busy_s = np.add.reduceat(columns.stop_s[on] - columns.start_s[on], first)
    nbytes = np.add.reduceat(columns.nbytes[on], first)
    extent_s = columns.stop_s[on[last]] - columns.start_s[on[first]]
    # what takes no time has no unit, even if `at_least_s` is 0
    long = np.flatnonzero(extent_s >= max(at_least_s, 1e-300))
    long = np.sort(long[np.argsort(-extent_s[long], kind="stable")[:at_most]])
    return [
        EventGroup(
            float(columns.start_s[on[first[i]]]),
            float(columns.stop_s[on[last[i]]]),
            columns.kinds[columns.kind[on[first[i]]]],
            columns.layers[columns.layer[on[first[i]]]],
            int(last[i] - first[i]) + 1,
            int(nbytes[i]),
            float(busy_s[i]),
        )
        for i in long
    ]


def _visit_groups(
    columns: Columns, on: NDArray[np.intp], at_least_s: float, at_most: int
) -> tuple[list[EventGroup], NDArray[np.bool_]]:
    """Visits of one kind, forward or backward, and which events they take; not the visit in which both take turns."""
    starts = visit_starts(columns, on)
    work = has_kind(columns, on, OVERLAPPING)
    visit = np.searchsorted(starts, np.arange(len(on)), side="right") - 1  # -1 before the first
    taken = work & (visit >= 0)
    if not taken.any():
        return [], taken
    # a visit of one kind has as many forwards as events, or none
    forward = np.bincount(visit[taken], has_kind(columns, on[taken], ("forward",)), len(starts))
    every = np.bincount(visit[taken], minlength=len(starts))
    taken &= ((forward == 0) | (forward == every))[visit]
    chosen = on[taken]
    first = np.flatnonzero(np.append(True, np.diff(visit[taken]) != 0)) if len(chosen) else np.arange(0)
    return _long_groups(columns, chosen, first, at_least_s, at_most), taken
