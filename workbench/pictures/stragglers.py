"""Waits between workers in one step: a row per worker on one time axis, and a table."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import groupby

from l2l_core.analysis import STEP_BEGIN, Traces, Wait
from l2l_core.trace import NETWORK_LANES, Trace
from workbench.pictures import svg
from workbench.pictures.picture import Picture, Table
from workbench.pictures.scale import Scale, format_seconds, round_up
from workbench.pictures.step_axis import draw_time_axis
from workbench.pictures.theme import BLUE, GREEN, VERMILION, text_colour_on
from workbench.pictures.timeline_chart import common_span_s, show_timeline

WIDTH, LEFT, RIGHT, TOP, ROW, PITCH = 960, 96, 944, 34, 26, 38  # px
_MIN_LABEL_PX = 26  # px, the shortest wait that is labelled with a worker's number
_WAIT_NAMES = {STEP_BEGIN: "before the step", "gather": "for weights", "reduce": "for gradients and the end"}
_KINDS = ((GREEN, "computes"), (BLUE, "exchanges, compute waits"), (VERMILION, "waits for worker n"))


def show_stragglers(traces: Traces) -> Picture:
    """Return a picture of each worker's work and waits in a step, with a table of the waits."""
    table = stragglers_table(traces)
    return Picture(draw_workers(traces, table.title, table.note), table)


def draw_workers(traces: Traces, title: str, description: str) -> str:
    """Draw a row per worker as an SVG: its work, its exchanges, and its waits if the traces name them."""
    height = TOP + len(traces) * PITCH + 46
    started = list(zip(traces.offsets_s, traces, strict=True))
    least_s = min([0.0, *(begin_s - trace.worker.waited_s for begin_s, trace in started)])
    reach_s = max([0.0, *(begin_s + event.stop_s for begin_s, trace in started for event in trace.events_since(0)[0])])
    axis = Scale(least_s, least_s + round_up(reach_s - least_s), LEFT, RIGHT)
    parts = [*_legend(), *draw_time_axis(axis, height - 34, 9)]
    for row, (begin_s, trace) in enumerate(started):
        parts += _row(trace, begin_s, axis, TOP + row * PITCH)
    return svg.document(WIDTH, height, title, description, parts)


def show_lanes(traces: Traces) -> list[Picture]:
    """Return every worker's timeline, all on time axes of the same length."""
    return [show_timeline(trace, common_span_s(*traces)) for trace in traces]


def stragglers_table(traces: Traces) -> Table:
    """Return a table of the waits between workers; the note names the worker that caused the longest waits."""
    whole_s = traces.span_s + max(trace.worker.waited_s for trace in traces)
    rows = [
        (
            f"worker {wait.rank}",
            f"worker {wait.last}",
            _WAIT_NAMES[wait.where],
            format_seconds(wait.seconds),
            format_seconds(wait.exposed_s),
            f"{100 * wait.exposed_s / whole_s:.0f} %" if whole_s else "–",
        )
        for wait in traces.waits()
    ]
    header = ("who waits", "for whom", "where", "waited", "exposed", "of the time")
    return Table(f"Who waits for whom in step {traces[0].step + 1}", header, rows, describe_stragglers(traces.waits()))


def describe_stragglers(waits: Sequence[Wait]) -> str:
    """Return a sentence on the worker that caused the longest waits not hidden by compute."""
    waited_s: dict[int, float] = defaultdict(float)
    for wait in waits:
        waited_s[wait.last] += wait.exposed_s
    if not any(waited_s.values()):
        return "No worker waits for another one."
    last = max(waited_s, key=lambda rank: waited_s[rank])
    return f"Most is waited for worker {last}: {format_seconds(waited_s[last])} in which others could not compute."


def _row(trace: Trace, begin_s: float, axis: Scale, y: float) -> Iterator[str]:
    worker = trace.worker
    yield svg.text(LEFT - 8, y + ROW / 2 + 4, f"worker {worker.rank}", anchor="end")
    yield svg.rect(LEFT, y, RIGHT - LEFT, ROW, style="well")
    waits = [(-worker.waited_s, 0.0, worker.last)] if worker.waited_s else []
    exchanges = []
    for event in (event for lane in NETWORK_LANES for event in trace.lanes.get(lane, ())):
        exchanges.append((begin_s + event.start_s, begin_s + event.stop_s))
        waits += [(event.start_s - event.stalled_s, event.start_s, event.last)] if event.stalled_s else []
    yield _boxes(exchanges, axis, y, BLUE)
    for last, group in groupby(sorted(waits, key=lambda wait: wait[2]), key=lambda wait: wait[2]):
        spans = [(begin_s + a, begin_s + b) for a, b, _ in group]
        yield _boxes(spans, axis, y, VERMILION)
        for left, right in ((axis(a), axis(b)) for a, b in spans):
            if right - left > _MIN_LABEL_PX:
                x, ink = (left + right) / 2, text_colour_on(VERMILION)
                yield svg.text(x, y + ROW / 2 + 4, f"→ {last}", anchor="middle", style="small", fill=ink)
    # drawn last, because waits hidden by compute cost nothing
    computes = [(begin_s + event.start_s, begin_s + event.stop_s) for event in trace.lanes["compute"]]
    yield _boxes(computes, axis, y, GREEN)


def _boxes(spans: Sequence[tuple[float, float]], axis: Scale, y: float, colour: str) -> str:
    """Return one path for all spans; spans closer than 0.3 px are joined."""
    boxes: list[tuple[float, float]] = []
    for left, right in sorted((axis(a), axis(b)) for a, b in spans):
        if boxes and left - boxes[-1][1] < 0.3:
            boxes[-1] = boxes[-1][0], max(boxes[-1][1], right)
        else:
            boxes.append((left, right))
    drawn = "".join(f"M{left:.1f} {y:g}h{max(right - left, 0.4):.1f}v{ROW}H{left:.1f}z" for left, right in boxes)
    return svg.path(drawn, fill=colour) if drawn else ""


def _legend() -> Iterator[str]:
    x = float(LEFT)
    for colour, words in _KINDS:
        yield svg.rect(x, 6, 12, 12, fill=colour)
        yield svg.text(x + 17, 16, words, style="small")
        x += 34 + 6 * len(words)
