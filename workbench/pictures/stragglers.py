"""Which worker waits for which: a row per worker on one axis of time, and a table of who waited for whom and where."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import groupby

from l2l_core.analysis import STEP_BEGIN, Traces, Wait
from l2l_core.trace import NETWORK_LANES, Trace
from workbench.pictures import svg
from workbench.pictures.picture import Picture, Table
from workbench.pictures.scale import Scale, format_seconds, round_up, ticks
from workbench.pictures.span import common_span_s
from workbench.pictures.theme import BLUE, GREEN, VERMILION, text_colour_on
from workbench.pictures.timeline_chart import show_timeline

WIDTH, LEFT, RIGHT, TOP, ROW, PITCH = 960, 96, 944, 34, 26, 38  # px
_MIN_LABEL_PX = 26  # px: of a wait that its worker's number fits into
_WAIT_NAMES = {STEP_BEGIN: "before the step", "gather": "for weights", "reduce": "for gradients and the end"}
_KINDS = ((GREEN, "computes"), (BLUE, "exchanges, compute waits"), (VERMILION, "waits for worker n"))


def show_stragglers(traces: Traces) -> Picture:
    """Draw what each worker did in a step, and for whom it waited, as SVG with a table of the waits."""
    table = stragglers_table(traces)
    height = TOP + len(traces) * PITCH + 46
    least_s = min(0.0, *(begins_s - trace.worker.waited_s for begins_s, trace in _traces_with_start(traces)))
    reach_s = max(
        (b + e.stop_s for b, trace in _traces_with_start(traces) for e in trace.events_since(0)[0]), default=0.0
    )
    axis = Scale(least_s, least_s + round_up(reach_s - least_s), LEFT, RIGHT)
    parts = [*_legend(), *_axis(axis, height - 34)]
    for row, (begins_s, trace) in enumerate(_traces_with_start(traces)):
        parts += _row(trace, begins_s, axis, TOP + row * PITCH)
    return Picture(svg.document(WIDTH, height, table.title, table.note, parts), table)


def show_lanes(traces: Traces) -> list[Picture]:
    """Draw every worker's timeline; all of them are as long, and each begins with its own step."""
    return [show_timeline(trace, common_span_s(*traces)) for trace in traces]


def stragglers_table(traces: Traces) -> Table:
    """List who waited for whom, where and how long; the note says who was waited for most."""
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
    """Say in a sentence for which worker the others wait most, counting what compute did not hide."""
    waited_s: dict[int, float] = defaultdict(float)
    for wait in waits:
        waited_s[wait.last] += wait.exposed_s
    if not any(waited_s.values()):
        return "Nobody waits for anybody."
    last = max(waited_s, key=lambda rank: waited_s[rank])
    return f"Most is waited for worker {last}: {format_seconds(waited_s[last])} in which others could not compute."


def _traces_with_start(traces: Traces) -> Iterator[tuple[float, Trace]]:
    return zip(traces.offsets_s, traces, strict=True)


def _row(trace: Trace, begins_s: float, axis: Scale, y: float) -> Iterator[str]:
    yield svg.text(LEFT - 8, y + ROW / 2 + 4, f"worker {trace.worker.rank}", anchor="end")
    yield svg.rect(LEFT, y, RIGHT - LEFT, ROW, style="well")
    waits = [(-trace.worker.waited_s, 0.0, trace.worker.last)] if trace.worker.waited_s else []
    works = []
    for event in (event for lane in NETWORK_LANES for event in trace.lanes.get(lane, ())):
        works.append((event.start_s, event.stop_s))
        waits += [(event.start_s - event.stalled_s, event.start_s, event.last)] if event.stalled_s else []
    yield _boxes([(begins_s + a, begins_s + b) for a, b in works], axis, y, BLUE)
    for last, group in groupby(sorted(waits, key=lambda wait: wait[2]), key=lambda wait: wait[2]):
        spans = [(begins_s + a, begins_s + b) for a, b, _ in group]
        yield _boxes(spans, axis, y, VERMILION)
        for a, b in spans:
            if axis(b) - axis(a) > _MIN_LABEL_PX:
                middle, ink = (axis(a) + axis(b)) / 2, text_colour_on(VERMILION)
                yield svg.text(middle, y + ROW / 2 + 4, f"→ {last}", anchor="middle", style="small", fill=ink)
    # Over the others: what compute hides costs nothing
    computes = [(begins_s + event.start_s, begins_s + event.stop_s) for event in trace.lanes["compute"]]
    yield _boxes(computes, axis, y, GREEN)


def _boxes(spans: Sequence[tuple[float, float]], axis: Scale, y: float, colour: str) -> str:
    """One path for all of them; those that are too close to be told apart are drawn as one."""
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


def _axis(axis: Scale, y: float) -> Iterator[str]:
    marks = ticks(axis.low, axis.high, 9)
    yield svg.path(f"M{LEFT} {y}H{RIGHT}" + "".join(f"M{axis(mark):.1f} {y}v5" for mark in marks), style="axis")
    for mark in marks:
        anchor = "end" if axis(mark) > RIGHT - 20 else "middle"
        yield svg.text(axis(mark), y + 18, format_seconds(mark) if mark else "0", anchor=anchor)
