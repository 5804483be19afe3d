"""Timeline of a strategy's simulated step: lanes above the memory of the device.

Bytes are as exact as metered ones. A recomputed forward is hatched.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from l2l_core.strategies import StrategyResult
from l2l_core.trace import CATEGORIES, LANES, Trace, format_bytes
from workbench.pictures import svg, timeline_labels
from workbench.pictures.memory_areas import CATEGORY_ORDER, draw_category_legend, stacked_areas
from workbench.pictures.picture import Picture, Table
from workbench.pictures.scale import Scale, format_seconds, round_up, ticks
from workbench.pictures.step_axis import draw_time_axis
from workbench.pictures.theme import KIND_COLOURS, LANE_NAMES, kind_colour
from workbench.pictures.timeline_chart import draw_compact_bars
from workbench.readings import Columns, MemoryLevels, find_peak, make_bars, number_layers

WIDTH, LEFT, RIGHT = 960, 118, 926  # px; the update is drawn right of RIGHT
LANE, PITCH, TOP = 24, 30, 56
CHART, TAIL = 118, 16  # px: height of the memory plot, width of the update
_BARS = 200  # maximum number per lane


def show_strategy(
    row: StrategyResult, budget_bytes: int | None, span_s: float | None = None, top_bytes: float | None = None
) -> Picture:
    """Return the timeline of a strategy's step, with its lanes as a table.

    Args:
        row: result of a strategy with a simulated step.
        budget_bytes: memory of the device.
        span_s, top_bytes: ends of the axes; give the same values to compare strategies; default round values.

    Raises:
        ValueError: the strategy has no simulated step.
    """
    return Picture(_draw(row, _trace_of(row), budget_bytes, span_s, top_bytes), strategy_table(row))


def strategy_table(row: StrategyResult) -> Table:
    """Return a table of the events, busy seconds and bytes of every lane."""
    columns = Columns.of(_trace_of(row))
    recomputed = _is_recompute(columns)
    rows = []
    for lane in _lanes(columns):
        on = columns.events_on(lane)
        busy_s = float((columns.stop_s[on] - columns.start_s[on]).sum())
        recomputes = f", {int(recomputed[on].sum())} of them recompute" if recomputed[on].any() else ""
        moved = format_bytes(int(columns.nbytes[on].sum())) if lane in ("h2d", "d2h") else "–"
        rows.append((LANE_NAMES[lane], f"{len(on)}{recomputes}", format_seconds(busy_s), moved))
    note = "" if row.plan is None else f"Plan: {' '.join(f'{each[0]}{each[1]}' for each in row.plan.operations)}."
    return Table(f"{row.name}: {_figures(row)}", ("lane", "events", "busy, simulated", "bytes moved"), rows, note)


def _trace_of(row: StrategyResult) -> Trace:
    if row.trace is None:
        raise ValueError(f"{row.name} has no step to show: {row.why or 'it was not simulated'}")
    return row.trace


def _figures(row: StrategyResult) -> str:
    return (
        f"{format_bytes(row.peak_device_bytes)} of the device (measured), {format_seconds(row.seconds)} (simulated), "
        f"{row.layer_forwards} layer forwards"
    )


def _draw(
    row: StrategyResult, trace: Trace, budget_bytes: int | None, span_s: float | None, top_bytes: float | None
) -> str:
    columns = Columns.of(trace)
    time = Scale(0.0, span_s or round_up(columns.end_s), LEFT, RIGHT)
    lanes = _lanes(columns)
    chart = TOP + PITCH * len(lanes) + 34
    bottom = chart + CHART
    bytes_scale = Scale(0.0, top_bytes or round_up(1.06 * max(row.peak_device_bytes, budget_bytes or 0)), bottom, chart)
    parts = [svg.text(0, 15, row.name, style="strong"), svg.text(RIGHT + TAIL, 15, _figures(row), anchor="end")]
    parts += _draw_kinds(columns)
    for i, lane in enumerate(lanes):
        parts += _lane(columns, lane, time, TOP + i * PITCH, trace)
    most = columns.sample_bytes[columns.samples_at("device")].max(axis=0, initial=0).tolist()
    used = [category for category in CATEGORY_ORDER if most[CATEGORIES.index(category)]]
    parts += draw_category_legend(used, LEFT, chart - 20, small=True)
    parts += _memory(row, columns, bytes_scale, time, chart)
    parts += _budget(budget_bytes, bytes_scale)
    parts += draw_time_axis(time, bottom, 9, style="small dim")
    return svg.document(WIDTH, bottom + 26, f"Plan of {row.name} over a step", f"{row.name}: {_figures(row)}.", parts)


def _lanes(columns: Columns) -> Sequence[str]:
    return [lane for lane in LANES if lane == "compute" or len(columns.events_on(lane))]


def _is_recompute(columns: Columns) -> NDArray[np.bool_]:
    """Return (events,): True for a forward of a layer that the micro-batch has already run."""
    recomputed, seen = np.zeros(len(columns.kind), bool), set()
    for i in columns.events_on("compute").tolist():
        if columns.kinds[int(columns.kind[i])] == "forward":
            call = int(columns.layer[i]), int(columns.k[i])
            recomputed[i] = call in seen
            seen.add(call)
    return recomputed


def _lane(columns: Columns, lane: str, time: Scale, y: float, trace: Trace) -> Iterator[str]:
    yield svg.rect(LEFT, y, RIGHT - LEFT, LANE, style="well")
    yield svg.text(LEFT - 8, y + 16, LANE_NAMES[lane], anchor="end")
    on = columns.events_on(lane)
    left, right = _to_pixels(columns.start_s[on], time), _to_pixels(columns.stop_s[on], time)
    bars = make_bars(left, right, columns.kind[on], _BARS, within=(LEFT, RIGHT))
    yield from draw_compact_bars(bars, columns.kinds, y, LANE)
    recomputed = _is_recompute(columns)[on]
    boxes = zip(left[recomputed].tolist(), right[recomputed].tolist(), strict=True)
    strokes = "".join(svg.hatch(x, y, to - x, LANE, 5) for x, to in boxes if to - x > 1)
    yield svg.path(strokes, style="hatch") if strokes else ""
    yield from timeline_labels.draw_separators(columns, lane, on, time, y, LANE)
    units = timeline_labels.group_events(columns, lane, on, time.high / (RIGHT - LEFT) * timeline_labels.MIN_LABEL_PX)
    numbers = number_layers(trace.names)
    kinds = columns.kind[on][recomputed]
    hatched = make_bars(left[recomputed], right[recomputed], kinds, _BARS, within=(LEFT, RIGHT))
    yield from timeline_labels.draw_labels(units, hatched, time, y + LANE / 2 + 4, numbers)
    yield from timeline_labels.draw_tips([(units, y)], LANE, time, numbers, 20_000, keyed=False)


def _to_pixels(times_s: NDArray[np.float64], time: Scale) -> NDArray[np.float64]:
    return np.clip(LEFT + (RIGHT - LEFT) * times_s / time.high, LEFT, RIGHT)


def _draw_kinds(columns: Columns) -> Iterator[str]:
    """Draw the legend of the bars."""
    x = float(LEFT)
    for kind in [kind for kind in KIND_COLOURS if kind in columns.kinds]:
        yield svg.rect(x, 30, 12, 12, fill=kind_colour(kind))
        yield svg.text(x + 17, 40, kind, style="small")
        x += 26 + 6.4 * len(kind)
    if _is_recompute(columns).any():
        yield svg.rect(x, 30, 16, 12, fill=kind_colour("forward"))
        yield svg.path(svg.hatch(x, 30, 16, 12, 5), style="hatch")
        yield svg.text(x + 21, 40, "forward again: recompute", style="small")


def _memory(row: StrategyResult, columns: Columns, scale: Scale, time: Scale, top: float) -> Iterator[str]:
    bottom = top + CHART
    marks = ticks(0.0, scale.high, 5)
    yield svg.rect(LEFT, top, RIGHT - LEFT, CHART, style="well")
    yield svg.path("".join(f"M{LEFT} {scale(mark):.1f}H{RIGHT}" for mark in marks), style="rule")
    for mark in marks:
        yield svg.text(LEFT - 8, scale(mark) + 4, format_bytes(mark) if mark else "0", style="small dim", anchor="end")
    levels = MemoryLevels.of(columns, "device", columns.events_on("compute"))
    end = max(time(columns.end_s), LEFT + 1)
    # A plan's last sample is the update, whose duration is not simulated; it is drawn after the end of the step.
    tail = end + TAIL if row.plan is not None else end
    yield svg.group(stacked_areas(levels, scale, time, LEFT, tail))
    if row.plan is not None:
        yield svg.path(f"M{end:.1f} {top:g}V{bottom:g}", style="axis", dash="2 3")
        x, anchor = (tail + 5, "start") if tail + 6 + 36 < WIDTH else (end - 5, "end")
        yield svg.text(x, bottom - 6, "update", style="small", anchor=anchor)
    yield from _peak(row, columns, levels, scale, time, top)


def _peak(
    row: StrategyResult, columns: Columns, levels: MemoryLevels, scale: Scale, time: Scale, top: float
) -> Iterator[str]:
    """Draw a ring at the peak of the device, and its text above the plot."""
    peak = find_peak(levels, columns, columns.events_on("compute"))
    words = f"○ peak {format_bytes(row.peak_device_bytes)}, measured"
    yield svg.text(RIGHT + TAIL, top - 10, words, style="small strong", anchor="end")
    if peak is not None:
        x, y = time((peak.began_s + peak.t_s) / 2), scale(peak.nbytes)
        yield f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" class="card" stroke-width="1.5" style="stroke-opacity:1"/>'


def _budget(budget_bytes: int | None, scale: Scale) -> Iterator[str]:
    if budget_bytes is None:
        return
    words = f"budget {format_bytes(budget_bytes)}"
    if budget_bytes > scale.high:
        yield svg.text(RIGHT - 4, scale.last + 14, f"▲ {words}, far above", style="small", anchor="end")
        return
    yield svg.path(f"M{LEFT} {scale(budget_bytes):.1f}H{RIGHT}", style="axis", width=1.8)
    yield svg.outlined_text(svg.text(RIGHT - 4, scale(budget_bytes) - 4, words, style="small strong", anchor="end"))
