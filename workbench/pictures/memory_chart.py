"""Memory over a step, device above host, by category: a picture on the timeline's axis, and the table behind it.

Between the two, a strip says which layer computes. The budget is a line; so is what in-core training would need, unless
it lies so far above that it would flatten the rest: then it is named above the upper edge, with a factor. A step that failed
is drawn up to that moment, with the allocation that the device had no room for.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from html import escape
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from l2l_core import Trace
from l2l_core.trace import StepFailure, format_bytes
from workbench.pictures.layer_strip import HEIGHT as STRIP_HEIGHT
from workbench.pictures.layer_strip import draw_strip
from workbench.pictures.memory_areas import CATEGORY_ORDER, TEXTURES, stacked_areas
from workbench.pictures.memory_failure import draw_failure, reach_bytes
from workbench.pictures.memory_peaks import describe_peak, memory_table, undo_bytes
from workbench.pictures.picture import Picture
from workbench.pictures.scale import Scale, format_seconds, round_up, ticks
from workbench.pictures.svg import document, group, outlined_text, path, rect, text
from workbench.pictures.theme import category_colour
from workbench.readings import Columns, LayerNumbers, MemoryLevels, Peak, find_peak, number_layers

WIDTH, HEIGHT, LEFT, RIGHT = 960, 388, 96, 944
NEAR_FACTOR = 1.6  # what is needed in core is a line to scale up to so many times the axis
FAR_FACTOR, FAR_FACTOR_AT_FIRST = (
    4.0,
    20.0,
)  # and the budget up to so many times the bytes in use; in a first step, which only begins


class MemoryPlot(NamedTuple):
    """Says where one place is drawn."""

    place: str
    name: str
    top: float  # px
    bottom: float
    title: float  # px above its top
    marks: int  # on its axis, at most


PLOTS = DEVICE, HOST = MemoryPlot("device", "Device", 70, 230, 30, 6), MemoryPlot("host", "Host", 294, 358, 9, 3)
STRIP = 237.0  # px, its upper edge


def draw_memory(
    now: Columns,
    *,
    before: Columns | None = None,
    now_s: float | None = None,
    span_s: float | None = None,
    keys: Iterable[str] = (),
    budget_bytes: int | None = None,
    in_core_bytes: int | None = None,
    top_bytes: float | None = None,
    failed: StepFailure | None = None,
) -> str:
    """Draw what fills device and host over a step, as an SVG.

    Args:
        now: the step, or as much of it as there is.
        before: the step before, shown faintly to the right of the cursor.
        now_s: where the cursor stands, seconds since the step began; None: the step is over.
        span_s: end of the time axis, default a round value after the last event.
        keys: as of `draw_timeline`.
        budget_bytes: memory of the device.
        in_core_bytes: what in-core training would need.
        top_bytes: end of the device's axis, default from budget, `before` and `now`.
        failed: how the step ended if it failed; the cursor then stands there.
    """
    now_s = now_s if failed is None else failed.t_s
    numbers = number_layers(keys)
    steps = [_StepMemory.of(now, np.inf if now_s is None or failed is not None else now_s)] + (
        [_finished_step(before)] if before is not None and now_s is not None else []
    )
    ends = [step.columns.end_s for step in steps]
    time = Scale(0.0, span_s or round_up(max(*ends, now_s or 0.0, 0.0)), LEFT, RIGHT)
    used = [max(step.peak_bytes(plot.place) for step in steps) for plot in PLOTS]
    reach = max(used[0], reach_bytes(failed))
    top = top_bytes or _device_top(reach, budget_bytes, in_core_bytes, starting=now_s is not None and len(steps) == 1)
    scales = [Scale(0.0, top, DEVICE.bottom, DEVICE.top), Scale(0.0, round_up(1.05 * used[1]), HOST.bottom, HOST.top)]
    cursor = RIGHT if now_s is None else min(max(time(now_s), LEFT), RIGHT)
    parts = [*_legend(bool(undo_bytes(steps[0].levels["host"])))]
    for plot, scale in zip(PLOTS, scales, strict=True):
        parts += _draw_previous(plot, scale, time, steps, cursor)
        parts += _frame(plot, scale, time, sampled=any(len(step.levels[plot.place].totals) for step in steps))
        parts += _draw_areas(plot, scale, time, steps[0], cursor)
        if failed is None or plot is HOST:
            parts += _draw_peak(
                plot, scale, time, steps[0], "" if now_s is None or failed is not None else " so far", numbers
            )
    parts += draw_strip([(step.columns, step.compute) for step in steps], time, cursor, STRIP, numbers)
    right = RIGHT if failed is None or cursor < RIGHT - 120 else cursor - 8  # clear of the mark
    parts += [
        *_draw_limits(scales[0], steps[-1], len(steps) > 1, budget_bytes, in_core_bytes, right),
        *_time_axis(time),
    ]
    if now_s is not None:
        d = f"M{cursor:.1f} {DEVICE.top:g}V{STRIP + STRIP_HEIGHT:g}M{cursor:.1f} {HOST.top:g}V{HOST.bottom:g}"
        parts.append(path(d, style="axis", width=1.5))
    if failed is not None:
        parts += draw_failure(failed, scales[0], cursor, LEFT, DEVICE.top - DEVICE.title)
    title = "Memory over a step" if failed is None else "Memory over a step that failed"
    return document(WIDTH, HEIGHT, title, _describe(steps[0], budget_bytes, in_core_bytes, failed, numbers), parts)


def show_memory(trace: Trace, in_core_bytes: int | None = None, span_s: float | None = None) -> Picture:
    """Return picture and table of a step that is over, or of one that failed, up to that moment.

    Args:
        trace: of the step.
        in_core_bytes: what in-core training would need.
        span_s: end of the time axis, for pictures that are compared; see `common_span_s`.
    """
    budget = trace.settings.get("memory_bytes")
    svg = draw_memory(
        Columns.of(trace),
        span_s=span_s,
        keys=trace.names,
        budget_bytes=budget,
        in_core_bytes=in_core_bytes,
        failed=trace.failed,
    )
    return Picture(svg, memory_table(trace, in_core_bytes))


@dataclass(frozen=True)
class _StepMemory:
    """A step, its compute events by start, and its samples by place."""

    columns: Columns
    compute: NDArray[np.intp]
    levels: dict[str, MemoryLevels]

    @staticmethod
    def of(columns: Columns, until_s: float = np.inf) -> _StepMemory:
        compute = columns.events_on("compute")
        return _StepMemory(
            columns, compute, {p.place: MemoryLevels.of(columns, p.place, compute, until_s) for p in PLOTS}
        )

    def peak(self, place: str) -> Peak | None:
        return find_peak(self.levels[place], self.columns, self.compute)

    def peak_bytes(self, place: str) -> int:
        return int(self.levels[place].totals.max(initial=0))


def _device_top(used: int, budget: int | None, in_core: int | None, starting: bool) -> float:
    """End of the axis: room for what is used, and for budget and in-core need where they are near."""
    top = round_up(1.1 * used)
    if budget and budget <= (FAR_FACTOR_AT_FIRST if starting else FAR_FACTOR) * used:
        top = max(top, round_up(1.08 * budget))
    if in_core and used and in_core <= NEAR_FACTOR * top:
        top = max(top, round_up(1.08 * in_core))
    return top


# Areas ---------------------------------------------------------------------------------------------------------------


def _plot_background(plot: MemoryPlot, left: float, right: float) -> str:
    return rect(left, plot.top, right - left, plot.bottom - plot.top, style="well")


def _draw_previous(
    plot: MemoryPlot, scale: Scale, time: Scale, steps: Sequence[_StepMemory], cursor: float
) -> Iterator[str]:
    """What lies behind the areas: from the cursor on, the step before."""
    yield _plot_background(plot, LEFT, RIGHT)
    for step in steps[1:]:
        yield _whole_previous(step.columns, plot, scale, time)
        # covers what of the ghost is left of the cursor
        yield rect(LEFT, plot.top - 2, cursor - LEFT, plot.bottom - plot.top + 2, style="page")
        yield _plot_background(plot, LEFT, cursor)


@lru_cache(maxsize=4)
def _finished_step(columns: Columns) -> _StepMemory:
    return _StepMemory.of(columns)


@lru_cache(maxsize=8)
def _whole_previous(columns: Columns, plot: MemoryPlot, scale: Scale, time: Scale) -> str:
    """The whole step before: it stays the same while the cursor moves over it, so it is drawn once."""
    end, levels = min(RIGHT, time(columns.end_s)), _finished_step(columns).levels[plot.place]
    return group(stacked_areas(levels, scale, time, LEFT, end, plain=True), style="ghost")


def _draw_areas(plot: MemoryPlot, scale: Scale, time: Scale, step: _StepMemory, cursor: float) -> Iterator[str]:
    """The step, up to the cursor."""
    end = cursor if cursor < RIGHT else min(RIGHT, max(time(step.columns.end_s), LEFT + 1))
    yield group(stacked_areas(step.levels[plot.place], scale, time, LEFT, end))


# Around them ---------------------------------------------------------------------------------------------------------


def _legend(keeps: bool) -> Iterator[str]:
    """`keeps`: whether the host keeps something for undo and branches."""
    x = float(LEFT)
    for category in CATEGORY_ORDER:
        yield rect(x, 6, 16, 12, fill=category_colour(category))
        if category in TEXTURES:
            pitch, dash = TEXTURES[category]
            marks = [x + 8] if pitch > 8 else [x + 4, x + 12]
            yield path("".join(f"M{mark:g} 6V18" for mark in marks), style="hatch", dash=dash)
        yield text(x + 22, 16, "other (host: undo, branches)" if category == "other" and keeps else category)
        x += 46 + 7 * len(category)
    yield text(RIGHT, 32 if keeps else 16, "each event at its highest", style="dim small", anchor="end")


def _frame(plot: MemoryPlot, scale: Scale, time: Scale, sampled: bool) -> Iterator[str]:
    yield text(LEFT - 8, plot.top - plot.title, plot.name, style="strong", anchor="end")
    lines = [f"M{time(mark):.1f} {plot.top:g}V{plot.bottom:g}" for mark in ticks(0.0, time.high, 11)]
    if not sampled:
        yield text(LEFT + 12, (plot.top + plot.bottom) / 2 + 4, "no memory was sampled", style="dim")
        yield path("".join(lines), style="rule")
        return
    marks = ticks(0.0, scale.high, plot.marks)
    yield path("".join([*lines, *(f"M{LEFT} {scale(mark):.1f}H{RIGHT}" for mark in marks)]), style="rule")
    for mark in marks:
        yield text(LEFT - 8, scale(mark) + 4, format_bytes(mark) if mark else "0", style="small dim", anchor="end")


def _draw_peak(
    plot: MemoryPlot, scale: Scale, time: Scale, step: _StepMemory, so_far: str, numbers: LayerNumbers
) -> Iterator[str]:
    """A ring where a place is fullest, and words at a place of their own."""
    found = step.peak(plot.place)
    if found is None:
        return
    words, rest = f"○ peak{so_far} {format_bytes(found.nbytes)}", describe_peak(found, numbers, plot is DEVICE)
    if plot is HOST and (kept := undo_bytes(step.levels[plot.place])):
        rest += f", {format_bytes(kept)} of it kept for undo and branches"
    yield (
        f'<text x="{LEFT}" y="{plot.top - plot.title:g}"><tspan class="strong">{escape(words)}</tspan> '
        f'<tspan class="dim" dx="4">{escape(rest)}</tspan></text>'
    )
    x, y = time((found.began_s + found.t_s) / 2), max(scale(found.nbytes), plot.top)
    # opacity as a style: as an attribute it would lose against the rule of the class
    yield f'<circle cx="{min(x, RIGHT):.1f}" cy="{y:.1f}" r="4" class="card" stroke-width="1.5" style="stroke-opacity:1"/>'


def _draw_limits(
    scale: Scale, step: _StepMemory, is_last: bool, budget: int | None, in_core: int | None, right: float
) -> Iterator[str]:
    """Budget and in-core need: to scale, or named above the upper edge, compared with the peak of a step."""
    if budget is not None:
        words = f"budget {format_bytes(budget)}"
        if budget <= scale.high:
            yield path(f"M{LEFT} {scale(budget):.1f}H{RIGHT}", style="axis", width=1.5)
            yield outlined_text(text(right - 6, scale(budget) - 4, words, style="strong", anchor="end"))
        else:
            yield text(RIGHT - 6, DEVICE.top - 10, f"{words}, far above ▲", anchor="end")
    if in_core is not None:
        words = f"in core would need {format_bytes(in_core)}"
        if in_core <= scale.high:
            yield path(f"M{LEFT} {scale(in_core):.1f}H{RIGHT}", style="axis", width=1.5, dash="7 4")
            yield outlined_text(text(LEFT + 6, scale(in_core) - 4, words, style="strong"))
        else:
            used, whose = step.peak_bytes("device"), "the last step's" if is_last else "this"
            times = f" = {in_core / used:.3g} × {whose} peak" if used else ""
            yield path(f"M{LEFT} {DEVICE.top - 5:g}H{RIGHT}", style="axis", width=1.5, dash="7 4")
            yield text(LEFT + 6, DEVICE.top - 10, f"▲ {words}{times}", style="strong")


def _time_axis(time: Scale) -> Iterator[str]:
    marks = ticks(0.0, time.high, 11)
    yield path(
        f"M{LEFT} {HOST.bottom:g}H{RIGHT}" + "".join(f"M{time(m):.1f} {HOST.bottom:g}v5" for m in marks), style="axis"
    )
    for mark in marks:
        anchor = "end" if mark and time(mark) > RIGHT - 12 else "middle"
        yield text(
            time(mark), HOST.bottom + 19, format_seconds(mark) if mark else "0", style="small dim", anchor=anchor
        )


def _describe(
    step: _StepMemory, budget: int | None, in_core: int | None, failed: StepFailure | None, numbers: LayerNumbers
) -> str:
    said = [] if failed is None else [f"The step {failed}."]
    for plot in PLOTS:
        found = step.peak(plot.place)
        if found is not None:
            said.append(
                f"{plot.name}: at most {format_bytes(found.nbytes)}, {describe_peak(found, numbers, plot is DEVICE)}."
            )
    said += [f"Budget {format_bytes(budget)}."] if budget is not None else []
    said += [f"In core would need {format_bytes(in_core)}."] if in_core is not None else []
    return " ".join(said) or "No memory was sampled."
