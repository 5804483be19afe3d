"""Memory of device and host over a step, by category, on the timeline's axis, and its table.

A strip between the two shows the computing layer. The budget and the bytes needed in core are lines; values far above the
peak are named at the upper edge instead. A failed step is drawn up to its failure, with the allocation that failed.
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
from workbench.pictures.memory_areas import CATEGORY_ORDER, draw_category_legend, stacked_areas
from workbench.pictures.memory_peaks import describe_peak, memory_table, undo_bytes
from workbench.pictures.picture import Picture
from workbench.pictures.relay_drawing import shortened
from workbench.pictures.scale import Scale, format_seconds, round_up, ticks
from workbench.pictures.step_axis import draw_time_axis, time_marks
from workbench.pictures.svg import PAGE, document, group, outlined_text, path, rect, text
from workbench.pictures.theme import VERMILION
from workbench.readings import Columns, LayerNumbers, MemoryLevels, Peak, find_peak, number_layers

WIDTH, HEIGHT, LEFT, RIGHT = 960, 388, 96, 944
NEAR_FACTOR = 1.6  # the bytes needed in core extend the axis up to this factor
FAR_FACTOR, FAR_FACTOR_AT_FIRST = 4.0, 20.0  # the budget is on the axis up to this multiple of the bytes in use
MAX_FAILED_FACTOR = 2.0  # a failed allocation is clipped at this multiple of the bytes in use
_CROSS = 4.5  # px, half the size of the failure's cross
_FAILURE_CHARACTERS = 112  # that fit beside "failed at"


class MemoryPlot(NamedTuple):
    """Position of the plot of one place."""

    place: str
    name: str
    top: float  # px
    bottom: float
    title: float  # px above `top`
    marks: int  # maximum number of marks on its axis


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
    """Draw the memory of device and host over a step, as an SVG.

    Args:
        now: the step, finished or running.
        before: the previous step, drawn faintly right of the cursor.
        now_s: position of the cursor in seconds since the step began; None: the step is over.
        span_s: end of the time axis; default a round value after the last event.
        keys: keys of the layers, as in `draw_timeline`.
        budget_bytes: memory of the device.
        in_core_bytes: bytes needed by in-core training.
        top_bytes: end of the device's axis; default from budget, `before` and `now`.
        failed: failure of the step, at which the cursor is drawn.
    """
    now_s = now_s if failed is None else failed.t_s
    numbers = number_layers(keys)
    until_s = np.inf if now_s is None or failed is not None else now_s
    steps = [_StepMemory.of(now, until_s)]
    steps += [_finished_step(before)] if before is not None and now_s is not None else []
    ends = [step.columns.end_s for step in steps]
    time = Scale(0.0, span_s or round_up(max(*ends, now_s or 0.0, 0.0)), LEFT, RIGHT)
    used = [max(step.peak_bytes(plot.place) for step in steps) for plot in PLOTS]
    reach = used[0]
    if failed is not None and failed.asked_bytes:  # the axis reaches the failed allocation
        asked_top = failed.held_bytes + failed.asked_bytes
        reach = max(reach, min(asked_top, round(MAX_FAILED_FACTOR * max(failed.held_bytes, 1))))
    top = top_bytes or _device_top(reach, budget_bytes, in_core_bytes, starting=now_s is not None and len(steps) == 1)
    scales = [Scale(0.0, top, DEVICE.bottom, DEVICE.top), Scale(0.0, round_up(1.05 * used[1]), HOST.bottom, HOST.top)]
    cursor = RIGHT if now_s is None else min(max(time(now_s), LEFT), RIGHT)
    names = {"other": "other (host: undo, branches)"} if undo_bytes(steps[0].levels["host"]) else {}
    is_sampled = [any(len(step.levels[plot.place].totals) for step in steps) for plot in PLOTS]
    has_host = now_s is not None or is_sampled != [True, False]  # the trace of a rank has bytes of its device alone
    parts = [*draw_category_legend(CATEGORY_ORDER, LEFT, 6, names)]
    parts.append(text(RIGHT, 32 if names else 16, "each event at its highest", style="dim small", anchor="end"))
    for plot, scale, sampled in zip(PLOTS[: 1 + has_host], scales, is_sampled, strict=False):
        parts += _draw_previous(plot, scale, time, steps, cursor)
        parts += _frame(plot, scale, time, sampled)
        # up to the cursor
        end = cursor if cursor < RIGHT else min(RIGHT, max(time(now.end_s), LEFT + 1))
        parts.append(group(stacked_areas(steps[0].levels[plot.place], scale, time, LEFT, end)))
        if failed is None or plot is HOST:
            parts += _draw_peak(plot, scale, time, steps[0], "" if until_s == np.inf else " so far", numbers)
    parts += draw_strip([(step.columns, step.compute) for step in steps], time, cursor, STRIP, numbers)
    right = RIGHT if failed is None or cursor < RIGHT - 120 else cursor - 8  # left of the failure's cross
    parts += _draw_limits(scales[0], steps[-1], len(steps) > 1, budget_bytes, in_core_bytes, right)
    bottom = HOST.bottom if has_host else STRIP + STRIP_HEIGHT
    parts += draw_time_axis(time, bottom, 11, style="small dim")
    if now_s is not None:
        d = f"M{cursor:.1f} {DEVICE.top:g}V{STRIP + STRIP_HEIGHT:g}M{cursor:.1f} {HOST.top:g}V{HOST.bottom:g}"
        parts.append(path(d, style="axis", width=1.5))
    if failed is not None:
        parts += _draw_failure(failed, scales[0], cursor)
    title = "Memory over a step" if failed is None else "Memory over a step that failed"
    return document(
        WIDTH,
        bottom + HEIGHT - HOST.bottom,
        title,
        _describe(steps[0], budget_bytes, in_core_bytes, failed, numbers),
        parts,
    )


def show_memory(trace: Trace, in_core_bytes: int | None = None, span_s: float | None = None) -> Picture:
    """Return the memory of a finished or failed step as a picture with its table.

    Args:
        trace: trace of the step.
        in_core_bytes: bytes needed by in-core training.
        span_s: end of the time axis; see `common_span_s` to compare pictures.
    """
    limits = {"budget_bytes": trace.settings.get("memory_bytes"), "in_core_bytes": in_core_bytes}
    svg = draw_memory(Columns.of(trace), span_s=span_s, keys=trace.names, failed=trace.failed, **limits)
    return Picture(svg, memory_table(trace, in_core_bytes))


@dataclass(frozen=True)
class _StepMemory:
    """A step, its compute events by start, and its memory samples by place."""

    columns: Columns
    compute: NDArray[np.intp]
    levels: dict[str, MemoryLevels]

    @staticmethod
    def of(columns: Columns, until_s: float = np.inf) -> _StepMemory:
        compute = columns.events_on("compute")
        levels = {plot.place: MemoryLevels.of(columns, plot.place, compute, until_s) for plot in PLOTS}
        return _StepMemory(columns, compute, levels)

    def peak(self, place: str) -> Peak | None:
        return find_peak(self.levels[place], self.columns, self.compute)

    def peak_bytes(self, place: str) -> int:
        return int(self.levels[place].totals.max(initial=0))


def _device_top(used: int, budget: int | None, in_core: int | None, starting: bool) -> float:
    """Return the end of the device's axis: above the bytes in use, and above budget and in-core bytes if near."""
    top = round_up(1.1 * used)
    if budget and budget <= (FAR_FACTOR_AT_FIRST if starting else FAR_FACTOR) * used:
        top = max(top, round_up(1.08 * budget))
    if in_core and used and in_core <= NEAR_FACTOR * top:
        top = max(top, round_up(1.08 * in_core))
    return top


def _draw_previous(
    plot: MemoryPlot, scale: Scale, time: Scale, steps: Sequence[_StepMemory], cursor: float
) -> Iterator[str]:
    """Draw the background and, from the cursor on, the previous step."""
    height = plot.bottom - plot.top
    yield rect(LEFT, plot.top, RIGHT - LEFT, height, style="well")
    for step in steps[1:]:
        yield _whole_previous(step.columns, plot, scale, time)
        # cover the previous step left of the cursor
        yield rect(LEFT, plot.top - 2, cursor - LEFT, plot.bottom - plot.top + 2, style="page")
        yield rect(LEFT, plot.top, cursor - LEFT, height, style="well")


@lru_cache(maxsize=4)
def _finished_step(columns: Columns) -> _StepMemory:
    return _StepMemory.of(columns)


@lru_cache(maxsize=8)
def _whole_previous(columns: Columns, plot: MemoryPlot, scale: Scale, time: Scale) -> str:
    """Return the complete previous step, which does not depend on the cursor and so is drawn once."""
    end, levels = min(RIGHT, time(columns.end_s)), _finished_step(columns).levels[plot.place]
    return group(stacked_areas(levels, scale, time, LEFT, end, plain=True), style="ghost")


def _frame(plot: MemoryPlot, scale: Scale, time: Scale, sampled: bool) -> Iterator[str]:
    yield text(LEFT - 8, plot.top - plot.title, plot.name, style="strong", anchor="end")
    lines = [f"M{time(mark):.1f} {plot.top:g}V{plot.bottom:g}" for mark in time_marks(time, 11)]
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
    """Draw a ring at the peak, and its text above the plot."""
    peak = step.peak(plot.place)
    if peak is None:
        return
    words, rest = f"○ peak{so_far} {format_bytes(peak.nbytes)}", describe_peak(peak, numbers, plot is DEVICE)
    if plot is HOST and (kept := undo_bytes(step.levels[plot.place])):
        rest += f", {format_bytes(kept)} of it kept for undo and branches"
    yield (
        f'<text x="{LEFT}" y="{plot.top - plot.title:g}"><tspan class="strong">{escape(words)}</tspan> '
        f'<tspan class="dim" dx="4">{escape(rest)}</tspan></text>'
    )
    x, y = time((peak.began_s + peak.t_s) / 2), max(scale(peak.nbytes), plot.top)
    # opacity as a style, which takes precedence over the class
    yield f'<circle cx="{min(x, RIGHT):.1f}" cy="{y:.1f}" r="4" class="card" stroke-width="1.5" style="stroke-opacity:1"/>'


def _draw_limits(
    scale: Scale, step: _StepMemory, is_last: bool, budget: int | None, in_core: int | None, right: float
) -> Iterator[str]:
    """Draw budget and in-core bytes to scale, or named above the upper edge if they are beyond it."""
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


def _draw_failure(failed: StepFailure, scale: Scale, cursor: float) -> Iterator[str]:
    """Draw the failed allocation as a bar with a cross on top, and the error above the plot."""
    words = failed.error
    if failed.asked_bytes:
        words = f"allocating {format_bytes(failed.asked_bytes)} of {failed.asked_for}"
    yield (
        f'<text x="{LEFT:g}" y="{DEVICE.top - DEVICE.title:g}">'
        f'<tspan class="strong">× failed at {format_seconds(failed.t_s)}</tspan> '
        f'<tspan dx="4">{escape(shortened(words, _FAILURE_CHARACTERS))}</tspan></text>'
    )
    if not failed.asked_bytes:
        return
    held_y, asked_y = scale(failed.held_bytes), max(scale(failed.held_bytes + failed.asked_bytes), scale.last)
    yield rect(cursor - 2.5, asked_y, 5, held_y - asked_y, fill=VERMILION)
    x, y, d = cursor, asked_y, _CROSS
    cross = f"M{x - d:.1f} {y - d:.1f}L{x + d:.1f} {y + d:.1f}M{x - d:.1f} {y + d:.1f}L{x + d:.1f} {y - d:.1f}"
    yield path(cross, style="page", stroke=PAGE, width=5)
    yield path(cross, stroke=VERMILION, width=2.5)
    words, budget_y = (
        f"{format_bytes(failed.missing_bytes)} too much",
        scale(failed.held_bytes + failed.asked_bytes - failed.missing_bytes),
    )
    x, anchor = (x + 10, "start") if cursor < (LEFT + RIGHT) / 2 else (x - 10, "end")
    yield outlined_text(text(x, budget_y + 15, words, style="strong", anchor=anchor))


def _describe(
    step: _StepMemory, budget: int | None, in_core: int | None, failed: StepFailure | None, numbers: LayerNumbers
) -> str:
    sentences = [] if failed is None else [f"The step {failed}."]
    for plot in PLOTS:
        if (peak := step.peak(plot.place)) is not None:
            words = describe_peak(peak, numbers, plot is DEVICE)
            sentences.append(f"{plot.name}: at most {format_bytes(peak.nbytes)}, {words}.")
    sentences += [f"Budget {format_bytes(budget)}."] if budget is not None else []
    sentences += [f"In core would need {format_bytes(in_core)}."] if in_core is not None else []
    return " ".join(sentences) or "No memory was sampled."
