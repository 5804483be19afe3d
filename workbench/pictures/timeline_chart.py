"""Timeline of a step: lanes with exposed copies, figures of overlap, and the bottleneck of each phase.

`workbench.readings` joins events into bars and computes the figures; `timeline_labels.py` labels the bars.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from l2l_core.trace import NETWORK_LANES, Trace, format_bytes
from workbench.pictures import svg, timeline_labels
from workbench.pictures.picture import Picture, Table
from workbench.pictures.scale import Scale, format_seconds, round_up
from workbench.pictures.step_axis import draw_time_axis, time_marks
from workbench.pictures.theme import LANE_NAMES, VERMILION, kind_colour
from workbench.pictures.timeline_text import (
    LANE,
    LEFT,
    RIGHT,
    TOP,
    WIDTH,
    TimelineLayout,
    draw_figures,
    draw_legend,
    draw_sentences,
    percent,
    sentences_height,
)
from workbench.readings import (
    Bars,
    Columns,
    TimelineSummary,
    find_phases,
    make_bars,
    make_hatched,
    number_layers,
    summarize_timeline,
)

__all__ = ["draw_timeline", "show_timeline", "summarize_timeline", "timeline_table"]

MAX_BARS, MAX_LIVE_BARS = 260, 130  # maximum number per lane; live: in pictures drawn many times a second
MAX_BYTES = 55_000  # tooltips are left out if they exceed this size of the picture


def draw_timeline(
    now: Columns,
    *,
    before: Columns | None = None,
    now_s: float | None = None,
    span_s: float | None = None,
    keys: Iterable[str] = (),
    sentences: Sequence[str] = (),
    lanes: Sequence[str] = (),
) -> str:
    """Draw the lanes of a step as an SVG of less than 60 kB, regardless of the number of events.

    Args:
        now: events of the step.
        before: events of the previous step, drawn pale right of `now_s`.
        now_s: seconds since a running step began; None: the step is finished.
        span_s: end of the time axis; default a round value after the last event.
        keys: keys of all layers of the step, in order, which define the numbers on bars.
        sentences: sentences such as "forward: ...", one per phase, shown under the figures.
        lanes: the lanes to draw; default all that a worker of a relay has.
    """
    summary, numbers = summarize_timeline(now), number_layers(keys)
    reach_s = max(now.end_s, now_s or 0.0, before.end_s if before is not None else 0.0)
    axis = Scale(0.0, span_s or round_up(reach_s), LEFT, RIGHT)
    sheet = TimelineLayout(lanes or now.lanes)
    height = sheet.text + sentences_height(sentences)
    parts = [*_draw_lane_backgrounds(sheet, LEFT, RIGHT)]
    if before is not None and now_s is not None:
        cursor = axis(min(now_s, axis.high))  # the page's colour covers the previous step left of it
        parts += [_draw_previous(before, axis), svg.rect(LEFT, TOP, cursor - LEFT, sheet.axis - TOP, style="page")]
        parts += _draw_lane_backgrounds(sheet, LEFT, cursor)
    rules = "".join(f"M{axis(mark):.1f} {TOP}V{sheet.axis}" for mark in time_marks(axis, 9))
    parts += [svg.path(rules, style="rule"), *draw_time_axis(axis, sheet.axis, 9), *_draw_phases(now, axis)]
    min_px, at_most = timeline_labels.MIN_TIP_PX, MAX_BARS
    if now_s is not None:
        min_px, at_most = timeline_labels.MIN_LABEL_PX, MAX_LIVE_BARS
    units = {}
    for lane, y in sheet.rows:
        on, exposed_s = now.events_on(lane), summary.exposed[lane]
        units[lane] = timeline_labels.group_events(now, lane, on, min_px * axis.high / (RIGHT - LEFT))
        parts += _draw_bars(_bars(now, on, axis, at_most), now, y)
        parts += timeline_labels.draw_separators(now, lane, on, axis, y, LANE)
        exposed = make_hatched(_to_pixels(exposed_s[0], axis), _to_pixels(exposed_s[1], axis), (LEFT, RIGHT))
        parts += _draw_hatch(exposed, y)
        parts += timeline_labels.draw_labels(units[lane], exposed, axis, y + LANE / 2 + 4, numbers)
        parts += _draw_waits(now, on, axis, y) if lane in NETWORK_LANES else ()
    parts += _draw_lane_names(sheet, summary)
    if now_s is not None:
        parts.append(svg.path(f"M{axis(min(now_s, axis.high)):.1f} {TOP - 6}V{sheet.axis}", style="axis", width=1.5))
    parts += [*draw_legend(sheet.legend, now, before), *draw_figures(sheet, summary, now_s)]
    parts += draw_sentences(sentences, sheet.text)
    if now_s is None:
        room = MAX_BYTES - sum(len(part.encode()) for part in parts)
        parts += timeline_labels.draw_tips([(units[lane], y) for lane, y in sheet.rows], LANE, axis, numbers, room)
    else:  # no tooltips in a picture that is replaced many times a second
        parts += timeline_labels.draw_pickable(units["compute"], TOP, LANE, axis, numbers)
    return svg.document(WIDTH, height, "Timeline of a step", _describe(summary, sheet, now_s, sentences), parts)


def common_span_s(*traces: Trace) -> float:
    """Return a round end in seconds of a time axis that fits all of these steps, for `span_s`.

    Raises:
        ValueError: there are no traces.
    """
    if not traces:
        raise ValueError("common_span_s() needs a trace: give the traces whose pictures are compared")
    return round_up(max(Columns.of(trace).end_s for trace in traces))


def show_timeline(trace: Trace, span_s: float | None = None) -> Picture:
    """Return the timeline of a step with its table, and the bottlenecks of its phases or its failure.

    Args:
        trace: trace of the step.
        span_s: end of the time axis; see `common_span_s` to compare pictures.
    """
    sentences = _failure_of(trace) or [str(bound) for bound in trace.bound_by()]
    drawn = draw_timeline(Columns.of(trace), span_s=span_s, keys=trace.names, sentences=sentences)
    return Picture(drawn, timeline_table(trace))


def _failure_of(trace: Trace) -> list[str]:
    return [f"This step {trace.failed}."] if trace.failed is not None else []


def timeline_table(trace: Trace) -> Table:
    """Return events, bytes, busy and exposed seconds per lane; the note has overlap and bottlenecks."""
    columns = Columns.of(trace)
    summary = summarize_timeline(columns)
    rows = []
    for lane in columns.lanes:
        on, busy_s = columns.events_on(lane), summary.busy_s[lane]
        moved = format_bytes(int(columns.nbytes[on].sum())) if lane in ("h2d", "d2h", *NETWORK_LANES) else "–"
        exposed = format_seconds(summary.exposed_s[lane]) if lane != "compute" else "–"
        share = percent(busy_s / summary.span_s if summary.span_s else 0.0)
        rows.append((LANE_NAMES[lane], f"{len(on):,}", moved, format_seconds(busy_s), share, exposed))
    notes = [*_failure_of(trace), f"{percent(summary.overlap)} of copy time hidden under compute."]
    notes += [f"{bound}." for bound in trace.bound_by()]
    failed = ", which failed" if trace.failed is not None else ""
    title = f"Timeline of step {trace.step + 1}{failed}: {format_seconds(summary.span_s)}"
    return Table(title, ("lane", "events", "bytes", "busy", "share of step", "exposed"), rows, " ".join(notes))


def _draw_lane_backgrounds(sheet: TimelineLayout, left: float, right: float) -> Iterator[str]:
    for _, y in sheet.rows:
        yield svg.rect(left, y, right - left, LANE, style="well")


@lru_cache(maxsize=4)
def _draw_previous(before: Columns, axis: Scale) -> str:
    """Return the complete previous step, which does not depend on the cursor and so is drawn once."""
    ghosts = (
        _draw_bars(_bars(before, before.events_on(lane), axis, MAX_LIVE_BARS), before, y)
        for lane, y in TimelineLayout(before.lanes).rows
    )
    return svg.group(("".join(ghost) for ghost in ghosts), style="ghost")


def _bars(columns: Columns, on: NDArray[np.intp], axis: Scale, at_most: int) -> Bars:
    """Return bars of a lane's events up to the end of the axis."""
    on = on[columns.start_s[on] < axis.high]
    left, right = _to_pixels(columns.start_s[on], axis), _to_pixels(columns.stop_s[on], axis)
    return make_bars(left, right, columns.kind[on], at_most, within=(axis.first, axis.last))


def _to_pixels(times_s: NDArray[np.float64], axis: Scale) -> NDArray[np.float64]:
    """Return the positions of times in pixels, clipped to the axis."""
    return np.clip(axis.first + (axis.last - axis.first) * times_s / axis.high, axis.first, axis.last)


def _draw_bars(bars: Bars, columns: Columns, y: float) -> Iterator[str]:
    """Draw one path per kind, each bar as high as the busy share of its time.

    A thin rail under the lane marks bars that are too short or too low to be visible.
    """
    for code in np.unique(bars.kind):
        of_kind = bars.kind == code
        left, right, share = (column[of_kind].tolist() for column in bars[:3])
        body = "".join(
            f"M{x:.2f} {y + LANE:g}v-{LANE * part:.4g}h{to - x:.2f}v{LANE * part:.4g}z"
            for x, to, part in zip(left, right, share, strict=True)
        )
        colour = kind_colour(columns.kinds[int(code)])
        yield svg.path(body, style="bars", fill=colour)
        rail = "".join(
            f"M{x:.1f} {y + LANE + 2:g}h{max(to - x, 0.6):.1f}"
            for x, to, part in zip(left, right, share, strict=True)
            if part < 0.07 or (to - x) * part < 0.6
        )
        if rail:
            yield svg.path(rail, style="rail", stroke=colour, width=2)


def draw_compact_bars(bars: Bars, kinds: Sequence[str], y: float, height: float) -> Iterator[str]:
    """Draw the bars of a narrow lane at `y`, one path per kind, each bar at least 0.4 px wide."""
    for code in np.unique(bars.kind):
        of_kind = bars.kind == code
        body = "".join(
            f"M{x:.1f} {y + height:g}v-{height * share:.3g}h{max(to - x, 0.4):.1f}v{height * share:.3g}z"
            for x, to, share in zip(*(column[of_kind].tolist() for column in bars[:3]), strict=True)
        )
        yield svg.path(body, fill=kind_colour(kinds[int(code)]))


def _draw_hatch(exposed: Bars, y: float) -> Iterator[str]:
    boxes = zip(exposed.left.tolist(), exposed.right.tolist(), (LANE * exposed.share).tolist(), strict=True)
    lines = "".join(svg.hatch(x, y + LANE - high, to - x, high, 6) for x, to, high in boxes)
    if lines:
        yield svg.path(lines, style="hatch")


def _draw_waits(now: Columns, on: NDArray[np.intp], axis: Scale, y: float) -> Iterator[str]:
    """Draw the times in which the worker waited for another one, pale."""
    on = on[now.stalled_s[on] > 0]
    left = _to_pixels(np.maximum(now.start_s[on] - now.stalled_s[on], 0.0), axis)
    right = _to_pixels(now.start_s[on], axis)
    visible = right - left > 0.5
    boxes = zip(left[visible].tolist(), right[visible].tolist(), strict=True)
    drawn = "".join(f"M{x:.1f} {y:g}h{to - x:.1f}v{LANE}H{x:.1f}z" for x, to in boxes)
    if drawn:
        yield svg.path(drawn, style="ghost", fill=VERMILION)


def _draw_lane_names(sheet: TimelineLayout, summary: TimelineSummary) -> Iterator[str]:
    for lane, y in sheet.rows:
        share = summary.busy_s[lane] / summary.span_s if summary.span_s else 0.0
        yield svg.text(LEFT - 8, y + 15, LANE_NAMES[lane], anchor="end")
        yield svg.text(LEFT - 8, y + 29, f"busy {percent(share)}", anchor="end", style="small dim")


def _draw_phases(columns: Columns, axis: Scale) -> Iterator[str]:
    """Draw brackets above compute; a short phase has no name."""
    brackets = []
    for name, start_s, stop_s in find_phases(columns):
        low, high = axis(min(start_s, axis.high)) + 0.75, axis(min(stop_s, axis.high)) - 0.75
        if high - low < 2:
            continue
        brackets.append(f"M{low:.1f} {TOP - 4}v-5H{high:.1f}v5")
        if high - low > 7 * len(name) + 8:
            yield svg.text((low + high) / 2, TOP - 14, name, anchor="middle", style="dim")
    if brackets:
        yield svg.path("".join(brackets), style="axis")


def _describe(summary: TimelineSummary, sheet: TimelineLayout, now_s: float | None, sentences: Sequence[str]) -> str:
    step = f"A step of {format_seconds(summary.span_s)}" if now_s is None else f"A step, {format_seconds(now_s)} so far"
    busy = ", ".join(f"{lane} {format_seconds(summary.busy_s[lane])}" for lane in sheet.lanes)
    others = [lane for lane in sheet.lanes if lane != "compute"]
    exposed = ", ".join(f"{lane} {format_seconds(summary.exposed_s[lane])}" for lane in others)
    hidden = f"{percent(summary.overlap)} of copy time hidden under compute. " if sheet.has_copies else ""
    return (
        f"{step}. Busy: {busy}. Exposed, hatched: {exposed}. {hidden}Bars lower than their lane were busy for "
        f"that share of the time. {' '.join(sentences)}"
    ).strip()
