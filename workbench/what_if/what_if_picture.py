"""Picture of two simulated steps on one time axis, the settings of the last step above: lanes, and device memory.

The step with other settings has a dashed frame.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from l2l_core.trace import CATEGORIES, LANES, format_bytes
from workbench.pictures import (
    KIND_COLOURS,
    LANE_NAMES,
    Scale,
    category_colour,
    draw_compact_bars,
    kind_colour,
    round_up,
    svg,
    ticks,
)
from workbench.pictures.step_axis import draw_time_axis
from workbench.readings import Columns, MemoryLevels, make_bars, make_hatched, summarize_timeline
from workbench.what_if.answer import Answer
from workbench.what_if.forecast_margin import HIDDEN, SECONDS, ComparedAnswer, ForecastMargin, with_margin

STYLE = """
.l2l-what-if{gap:1px}
.l2l-forecast{padding-left:4px;font-size:12px;line-height:1.5;min-height:36px;font-variant-numeric:tabular-nums}
.l2l-what-if-answer{align-items:flex-start;gap:18px;overflow:visible}
.l2l-what-if .l2l-what-if-answer>.widget-html{flex:0 0 660px;width:660px;max-width:100%}
.l2l-what-if .l2l-what-if-answer>.widget-html.l2l-words{flex:1 1 220px;min-width:0;max-height:374px;overflow:auto}
.l2l-what-if-answer .widget-html-content{white-space:normal}
.l2l-figures p{font-size:12px;opacity:.75;margin:4px 0;white-space:normal;max-width:540px}
.l2l-figures td,.l2l-figures th{white-space:nowrap}
.l2l-what-if .l2l-settings .widget-readout{min-width:4.4em}
.l2l-what-if .l2l-settings .l2l-count .widget-readout{min-width:2.6em}
.l2l-what-if-words{font-size:13px;line-height:1.45}
.l2l-what-if-words ul{margin:4px 0 0;padding-left:18px}
"""

WIDTH, LEFT, RIGHT = 660, 92, 648  # px, so that controls, picture and text fit on a screen
LANE, PITCH, ROW = 12, 14, 78  # px: height of a lane, distance between lanes, distance between steps
LANES_TOP, MEMORY_TOP, CHART, CHART_PITCH = 40, 238, 38, 60
HEIGHT = MEMORY_TOP + 2 * CHART_PITCH - 6
STACK = ("weights", "optimizer", "gradients", "stash", "activations", "other")  # from the bottom up
_TEXTURES = {"gradients": 8, "stash": 5}  # px between vertical lines
_BARS, _COLUMN = 90, 2.0  # largest number of bars per lane; px per column of the memory chart
_FAR_BUDGET = 4.0  # times the bytes in use; a larger budget is written above the chart


@dataclass(frozen=True, eq=False)
class PicturedStep:
    """A row of the picture.

    Attributes:
        columns: events and samples of the step.
        title: for example "settings of step 3, simulated".
        figures: short text on the right of the title.
        framed: True for a row with a frame.
        budget_bytes: device memory.
    """

    columns: Columns
    title: str
    figures: str
    framed: bool
    budget_bytes: float | None = None


def pictured_steps(found: ComparedAnswer) -> tuple[PicturedStep | None, PicturedStep]:
    """Return both rows of a comparison; the upper one is None before the first measured step."""
    was = None if found.was is None else _pictured_step(found.was, found.was_title, False, found.margin)
    return was, _pictured_step(found.now, "what if, simulated", True, found.margin)


def _pictured_step(answer: Answer, title: str, framed: bool, margin: ForecastMargin | None) -> PicturedStep:
    figures = f"{with_margin(SECONDS, answer, margin)} · {with_margin(HIDDEN, answer, margin)} of copies hidden"
    return PicturedStep(answer.columns, title, figures, framed, answer.question.memory_bytes)


def draw_what_if(before: PicturedStep | None, changed: PicturedStep, span_s: float | None = None) -> str:
    """Draw both steps as SVG, smaller than 60 kB for any number of events.

    Args:
        before: upper row; None before the first measured step.
        changed: lower row.
        span_s: end of the time axis; by default the later end of both steps, rounded up.
    """
    rows = [before, changed]
    steps = [row for row in rows if row is not None]
    time = Scale(0.0, span_s or round_up(max(row.columns.end_s for row in steps)), LEFT, RIGHT)
    levels = [MemoryLevels.of(row.columns, "device", row.columns.events_on("compute")) if row else None for row in rows]
    parts = [*_kinds(steps)]
    for i, row in enumerate(rows):
        parts += _lanes(row, time, LANES_TOP + i * ROW)
    parts += [
        *draw_time_axis(time, LANES_TOP + ROW + 4 * PITCH + 3, 11, style="small dim"),
        *_categories(MEMORY_TOP - 36),
    ]
    top = _top([level for level in levels if level is not None], steps)
    for i, (row, level) in enumerate(zip(rows, levels, strict=True)):
        parts += _memory(row, level, time, top, MEMORY_TOP + i * CHART_PITCH)
    return svg.document(
        WIDTH, HEIGHT, "What if: two simulated steps, the settings of the last step above", _describe(steps), parts
    )


def draw_lanes(upper: PicturedStep, lower: PicturedStep, span_s: float, title: str) -> str:
    """Draw the lanes of two steps as SVG, without memory, on a time axis that ends at `span_s`."""
    time = Scale(0.0, span_s, LEFT, RIGHT)
    axis_y = LANES_TOP + ROW + 4 * PITCH + 3
    parts = [*_kinds([upper, lower]), *_lanes(upper, time, LANES_TOP), *_lanes(lower, time, LANES_TOP + ROW)]
    parts += draw_time_axis(time, axis_y, 11, style="small dim")
    return svg.document(WIDTH, axis_y + 24, title, _describe([upper, lower]), parts)


def lower_lane(lane: str) -> tuple[float, float]:
    """Return top and bottom of a lane of the lower step, in px of the picture."""
    top = LANES_TOP + ROW + LANES.index(lane) * PITCH
    return top, top + LANE


# -- lanes -----------------------------------------------------------------------------------------------------------


def _lanes(row: PicturedStep | None, time: Scale, top: float) -> Iterator[str]:
    bottom = top + 3 * PITCH + LANE
    for i, lane in enumerate(LANES):
        y = top + i * PITCH
        yield svg.rect(LEFT, y, RIGHT - LEFT, LANE, style="well")
        yield svg.text(LEFT - 8, y + LANE - 3.5, LANE_NAMES[lane], anchor="end", style="small")
    yield from _title(row, top - 8, "no step measured yet")
    if row is None:
        return
    exposed = summarize_timeline(row.columns).exposed
    for i, lane in enumerate(LANES):
        y = top + i * PITCH
        yield from _bars(row.columns, lane, time, y)
        starts_s, stops_s = exposed[lane]
        hatched = make_hatched(_place(starts_s, time), _place(stops_s, time), (LEFT, RIGHT))
        boxes = zip(hatched.left.tolist(), hatched.right.tolist(), strict=True)
        lines = "".join(svg.hatch(x, y, to - x, LANE, 5) for x, to in boxes)
        if lines:
            yield svg.path(lines, style="hatch")
    end = time(min(row.columns.end_s, time.high))
    yield svg.path(f"M{end:.1f} {top - 3:g}V{bottom + 3:g}", style="axis", width=1.5)
    if row.framed:
        yield _frame(top - 4, bottom + 4)


def _bars(columns: Columns, lane: str, time: Scale, y: float) -> Iterator[str]:
    on = columns.events_on(lane)
    on = on[columns.start_s[on] < time.high]
    left, right = _place(columns.start_s[on], time), _place(columns.stop_s[on], time)
    bars = make_bars(left, right, columns.kind[on], _BARS, within=(LEFT, RIGHT))
    yield from draw_compact_bars(bars, columns.kinds, y, LANE)


def _place(times_s: NDArray[np.float64], time: Scale) -> NDArray[np.float64]:
    return np.clip(LEFT + (RIGHT - LEFT) * times_s / time.high, LEFT, RIGHT)


def _title(row: PicturedStep | None, y: float, missing: str) -> Iterator[str]:
    if row is None:
        yield svg.text(LEFT, y, missing, style="dim")
        return
    yield svg.text(LEFT, y, row.title, style="strong")
    yield svg.text(RIGHT, y, row.figures, anchor="end")


def _frame(top: float, bottom: float) -> str:
    return svg.path(f"M{LEFT - 3} {top:g}H{RIGHT + 3}V{bottom:g}H{LEFT - 3}Z", style="axis", dash="6 4")


# -- memory ----------------------------------------------------------------------------------------------------------


def _top(levels: Sequence[MemoryLevels], rows: Sequence[PicturedStep]) -> float:
    """Return the upper end of the byte axis, common to both steps; it includes budgets that are near."""
    used = max((int(level.totals.max(initial=0)) for level in levels), default=0)
    near = [row.budget_bytes for row in rows if row.budget_bytes and row.budget_bytes <= _FAR_BUDGET * used]
    return round_up(1.06 * max([used, *near, 1]))


def _memory(
    row: PicturedStep | None, levels: MemoryLevels | None, time: Scale, top_bytes: float, top: float
) -> Iterator[str]:
    bottom = top + CHART
    scale = Scale(0.0, top_bytes, bottom, top)
    yield svg.rect(LEFT, top, RIGHT - LEFT, CHART, style="well")
    marks = ticks(0.0, top_bytes, 4)
    yield svg.path("".join(f"M{LEFT} {scale(mark):.1f}H{RIGHT}" for mark in marks), style="rule")
    for mark in marks:
        yield svg.text(LEFT - 8, scale(mark) + 4, format_bytes(mark) if mark else "0", style="small dim", anchor="end")
    if row is None or levels is None:
        return
    end = max(time(min(row.columns.end_s, time.high)), LEFT + 1)
    yield from _areas(levels, time, scale, end)
    peak = int(levels.totals.max(initial=0))
    yield svg.text(LEFT, top - 7, f"device, {row.title}: at most {format_bytes(peak)}", style="strong")
    yield from _budget(row, scale, top, peak)
    if row.framed:
        yield _frame(top - 3, bottom + 3)


def _areas(levels: MemoryLevels, time: Scale, scale: Scale, end: float) -> Iterator[str]:
    if not len(levels.totals):
        return
    edges = np.append(np.arange(LEFT, end, _COLUMN), end)
    edges_s = time.low + (edges - LEFT) * time.high / (RIGHT - LEFT)
    edges_s[-1] = np.inf
    order = [CATEGORIES.index(category) for category in STACK]
    stacked = np.cumsum(levels.column_maxima(edges_s)[:, order], axis=1)
    ys = np.round(2 * (scale.first + (scale.last - scale.first) * stacked / scale.high)) / 2
    for index in reversed(range(len(STACK))):
        below = ys[:, index - 1] if index else np.full(len(ys), scale.first)
        if not (ys[:, index] < below).any():
            continue
        yield svg.path(_outline(edges, ys[:, index], scale.first), fill=category_colour(STACK[index]))
    for index, category in enumerate(STACK):
        if category in _TEXTURES:
            below = ys[:, index - 1] if index else np.full(len(ys), scale.first)
            yield from _texture(edges, ys[:, index], below, _TEXTURES[category])


def _outline(edges: NDArray[np.float64], ys: NDArray[np.float64], bottom: float) -> str:
    turns = np.flatnonzero(np.diff(ys)) + 1
    steps = "".join(f"H{x:g}V{y:g}" for x, y in zip(np.round(edges[turns], 1), ys[turns], strict=True))
    return f"M{edges[0]:.4g} {bottom:g}V{ys[0]:g}{steps}H{edges[-1]:.1f}V{bottom:g}Z"


def _texture(
    edges: NDArray[np.float64], upper: NDArray[np.float64], lower: NDArray[np.float64], pitch: int
) -> Iterator[str]:
    """Draw vertical lines in an area, so that it can be identified without colour."""
    xs = np.arange(edges[0] + pitch, edges[-1], pitch)
    at = np.searchsorted(edges, xs, "right") - 1
    high = lower[at] - upper[at] > 2
    d = "".join(f"M{x:g} {a:g}V{b:g}" for x, a, b in zip(xs[high], upper[at][high], lower[at][high], strict=True))
    if d:
        yield svg.path(d, style="hatch", dash="2 2" if pitch < 8 else "")


def _budget(row: PicturedStep, scale: Scale, top: float, peak: int) -> Iterator[str]:
    if row.budget_bytes is None:
        return
    words = f"budget {format_bytes(row.budget_bytes)}"
    if row.budget_bytes > scale.high:
        yield svg.text(RIGHT - 2, top - 7, f"{words}, far above ▲", anchor="end", style="dim")
        return
    full = "" if peak <= row.budget_bytes else ", too little"
    yield svg.path(f"M{LEFT} {scale(row.budget_bytes):.1f}H{RIGHT}", style="axis", width=1.5)
    yield svg.text(RIGHT - 2, top - 7, f"― {words}{full}", anchor="end", style="strong" if full else "dim")


# -- legends ---------------------------------------------------------------------------------------------------------


def _kinds(rows: Sequence[PicturedStep]) -> Iterator[str]:
    """Draw the legend of the lanes: colours of kinds, and the hatching of exposed time."""
    present = {kind for row in rows for kind in row.columns.kinds}
    x = 0.0
    for kind in [kind for kind in KIND_COLOURS if kind in present]:
        yield svg.rect(x, 4, 11, 11, fill=kind_colour(kind))
        yield svg.text(x + 15, 14, kind, style="small")
        x += 19 + 6.2 * len(kind)
    yield svg.rect(x, 4, 16, 11, fill=kind_colour("shell"))
    yield svg.path(svg.hatch(x, 4, 16, 11, 5), style="hatch")
    yield svg.text(x + 20, 14, "exposed", style="small")


def _categories(y: float) -> Iterator[str]:
    x = float(LEFT)
    for category in STACK:
        yield svg.rect(x, y, 16, 11, fill=category_colour(category))
        if category in _TEXTURES:
            dash = "2 2" if _TEXTURES[category] < 8 else ""
            yield svg.path(f"M{x + 5:g} {y:g}v11M{x + 11:g} {y:g}v11", style="hatch", dash=dash)
        yield svg.text(x + 20, y + 10, category, style="small")
        x += 34 + 5.8 * len(category)


def _describe(rows: Sequence[PicturedStep]) -> str:
    return (
        " ".join(f"{row.title}: {row.figures}." for row in rows) + " Hatched: copies and updates while compute waits."
    )
