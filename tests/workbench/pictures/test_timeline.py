"""The timeline shows the trace's numbers and all busy times, and stays small for any step."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from xml.etree import ElementTree

import numpy as np
import pytest

from l2l_core import Machine, Profile, RelayConfig, Shapes, simulate
from l2l_core.analysis.phases import split_phases
from l2l_core.config import StashLocation, UpdateMode
from l2l_core.trace.events import LANES, Event
from l2l_core.trace.trace import Trace
from workbench.pictures.timeline_chart import draw_timeline, show_timeline, summarize_timeline, timeline_table
from workbench.readings.bars import Bars, make_bars
from workbench.readings.lane_usage import find_phases
from workbench.readings.trace_columns import Columns

SVG = "{http://www.w3.org/2000/svg}"
LEFT, WIDE = 96, 848  # px
LIMIT = 60_000  # bytes


def simulated(
    layers: int, micro_batches: int, stash: StashLocation = "device", gb_per_s: float = 12, update: UpdateMode = "eager"
) -> Trace:
    shapes = Shapes(
        layer_params=[7_000_000] * layers,
        shell_params=3_000_000,
        tokens=512,
        boundary_bytes=512 * 768 * 4,
        micro_batches=micro_batches,
        stash=stash,
    )
    speed = gb_per_s * 1e9
    machine = Machine(flops_per_s=2e13, update_params_per_s=1e9, h2d_bytes_per_s=speed, d2h_bytes_per_s=speed)
    config = RelayConfig(micro_batches=micro_batches, stash=stash, update=update)
    return simulate(Profile.of_shapes(shapes, machine), config)


def hand_made(*rows: tuple[str, str, float, float, str]) -> Trace:
    """Return events from (lane, kind, start, stop, layer)."""
    return Trace.of([Event(lane, kind, start_s, stop_s, layer) for lane, kind, start_s, stop_s, layer in rows], [])


def huge(layers: int = 1000, micro_batches: int = 32) -> Trace:
    """Return a step of 130,000 events with uneven gaps: fetch and stash per micro-batch, load and push per layer."""
    random = np.random.default_rng(0)
    events, now_s = [], 0.0
    for visit in range(2 * layers):
        forward = visit < layers
        layer = f"L{visit if forward else 2 * layers - 1 - visit:03d}"
        began_s = now_s
        for k in range(micro_batches):
            start_s, stop_s = now_s + 1e-4 * random.random(), now_s + 2e-4 + 1e-3 * random.random()
            kind = "forward" if forward else "backward"
            events.append(Event("compute", kind, start_s, stop_s, layer, k, 0, visit, 0.0, visit))
            copy = ("d2h", "stash") if forward else ("h2d", "fetch")
            events.append(Event(*copy, start_s, start_s + 1e-4, layer, k, 100, visit))
            now_s = stop_s
        if not forward:
            events.append(Event("d2h", "push", began_s, began_s + 5e-3, layer, nbytes=1000))
            events.append(Event("eps", "update", began_s, began_s + 9e-3, layer))
        else:
            events.append(Event("h2d", "load", began_s, began_s + 8e-3, layer, nbytes=1000))
    return Trace.of(events, [])


TRACES = {
    "a few layers": simulated(6, 4),
    "stash on the host": simulated(12, 8, stash="host", gb_per_s=4),
    "no overlap": simulated(5, 2, update="deferred", gb_per_s=0.5),
    "many layers": simulated(300, 8),
    "huge": huge(),
    "no copies": hand_made(("compute", "forward", 0, 1, "L000"), ("compute", "backward", 1, 3, "L000")),
    "one event": hand_made(("h2d", "load", 0.5, 0.75, "L000")),
    "no length": hand_made(("h2d", "load", 0.5, 0.5, "L000"), ("compute", "forward", 0.5, 0.5, "L000")),
    "late": hand_made(
        ("h2d", "load", 5, 6, "L000"), ("compute", "forward", 5.5, 7, "L000"), ("eps", "update", 6, 9, "")
    ),
    "overlapping": hand_made(
        ("h2d", "load", 0, 3, "L000"), ("h2d", "load", 1, 2, "L001"), ("compute", "forward", 1, 2.5, "L000")
    ),
    "empty": Trace(),
}
traces = pytest.mark.parametrize("trace", TRACES.values(), ids=TRACES)


def parse(picture: str) -> ElementTree.Element:
    """Return the picture as XML, after the checks common to all timelines."""
    assert len(picture.encode()) < LIMIT
    assert " id=" not in picture and "http" not in picture.replace("http://www.w3.org/2000/svg", "")
    root = ElementTree.fromstring(picture)
    for element in root.iter():
        assert "n" not in element.get("d", "")  # neither nan nor inf, and no command has this letter
        assert all(
            math.isfinite(float(element.get(name, "0")))
            for name in ("x", "y", "width", "height")
            if element is not root
        )
    return root


def words(root: ElementTree.Element) -> list[str]:
    return [element.text or "" for element in root.iter(f"{SVG}text")]


def drawn_boxes(root: ElementTree.Element) -> list[tuple[float, float, float, float]]:
    """Return x, lower edge, width and height of every bar."""
    paths = [path.get("d", "") for path in root.iter(f"{SVG}path") if path.get("class") == "bars"]
    boxes = re.findall(r"M([\d.]+) ([\d.]+)v-([\d.e-]+)h([\d.]+)v[\d.e-]+z", "".join(paths))
    assert len(boxes) == "".join(paths).count("M")
    return [(float(x), float(y), float(width), float(height)) for x, y, height, width in boxes]


@traces
def test_the_summary_matches_the_trace(trace: Trace) -> None:
    summary = summarize_timeline(Columns.of(trace))
    assert summary.span_s == pytest.approx(trace.span_s, abs=1e-12)
    assert summary.overlap == pytest.approx(trace.overlap(), abs=1e-9)
    for lane in LANES:
        assert summary.busy_s[lane] == pytest.approx(trace.busy_s(lane), abs=1e-9)
        assert summary.exposed_s[lane] == pytest.approx(trace.exposed_s(lane), abs=1e-9)


@traces
def test_phases_are_those_of_the_core(trace: Trace) -> None:
    events = trace.events
    for count in {len(events), len(events) // 2, len(events) // 5, 3}:  # also of a step under way
        part = Trace.of(events[:count], [])
        assert find_phases(Columns.of(part)) == list(split_phases(part.lanes))


def test_hidden_work_is_exposed_for_exactly_no_time() -> None:
    third = 1 / 3
    trace = hand_made(("compute", "forward", 0, third, "L000"), ("h2d", "load", 0.1, third, "L001"))
    assert summarize_timeline(Columns.of(trace)).exposed_s["h2d"] == 0.0
    assert "0 ms" in words(parse(draw_timeline(Columns.of(trace))))


@traces
def test_the_figures_are_in_the_picture_and_in_the_table(trace: Trace) -> None:
    shown = " ".join(words(parse(draw_timeline(Columns.of(trace)))))
    table = timeline_table(trace)
    assert [row[1] for row in table.rows] == [f"{len(events):,}" for events in trace.lanes.values()]
    for row in table.rows[1:]:
        assert row[5] in shown  # exposed
    assert f"{100 * trace.overlap():.0f} %" in shown or f"{100 * trace.overlap():.1f} %" in shown
    assert all(str(bound) in table.note for bound in trace.bound_by())


@traces
def test_the_area_of_a_lane_is_its_busy_time(trace: Trace) -> None:
    columns = Columns.of(trace)
    boxes = drawn_boxes(parse(draw_timeline(columns, span_s=columns.end_s or 1.0)))
    edges = sorted({y for _, y, _, _ in boxes})
    drawn = [sum(w * h / 34 for _, y, w, h in boxes if y == edge) / WIDE for edge in edges]
    expected = [trace.busy_s(lane) / (columns.end_s or 1.0) for lane in LANES if trace.busy_s(lane)]
    assert drawn == pytest.approx(expected, abs=0.005)


@pytest.mark.parametrize("count", [1, 10, 300, 3_000, 100_000])
def test_bars_keep_the_area_and_lose_no_stretch(count: int) -> None:
    random = np.random.default_rng(count)
    edges = np.sort(random.uniform(96, 944, 2 * count))
    left, right, kind = edges[::2], edges[1::2], random.integers(0, 5, count)
    bars = make_bars(left, right, kind)
    assert len(bars.left) <= 260
    assert ((bars.right - bars.left) * bars.share).sum() == pytest.approx((right - left).sum())
    assert (bars.left[1:] >= bars.right[:-1] - 1e-9).all() and (bars.left < bars.right).all()
    assert (bars.share > 0).all() and (bars.share <= 1).all()
    # wherever the lane is busy for half of 32 px or more, so is the picture, but for what a coarse bar evens out
    for low in np.arange(96, 944 - 32, 32):
        busy = np.clip(np.minimum(right, low + 32) - np.maximum(left, low), 0, None).sum()
        shown = (np.clip(np.minimum(bars.right, low + 32) - np.maximum(bars.left, low), 0, None) * bars.share).sum()
        assert shown == pytest.approx(busy, abs=5)


def test_wide_bars_stay_as_they_are() -> None:
    left, right = np.array([100.0, 110.0, 110.2, 300.0]), np.array([110.0, 110.2, 120.0, 301.5])
    bars = make_bars(left, right, np.array([0, 1, 0, 2]))
    assert bars.left == pytest.approx(left) and bars.right == pytest.approx(right)
    assert bars.kind.tolist() == [0, 1, 0, 2] and (bars.share == 1).all()


def test_the_kind_that_was_busy_longest_in_a_column_is_shown() -> None:
    starts = 100 + np.arange(0, 50, 0.25)
    widths = np.tile([0.05, 0.2], len(starts) // 2)
    bars = make_bars(starts, starts + widths, np.tile([7, 3], len(starts) // 2))
    assert set(bars.kind.tolist()) == {3}
    assert bars.left[0] == pytest.approx(100) and bars.right[-1] == pytest.approx(150)
    assert bars.share == pytest.approx(0.5, abs=0.01)


def test_a_gap_stays_a_gap() -> None:
    trace = hand_made(("compute", "forward", 0, 4, "L000"), ("compute", "forward", 6, 10, "L001"))
    boxes = drawn_boxes(parse(draw_timeline(Columns.of(trace), span_s=10)))
    assert [(x, x + width) for x, _, width, _ in boxes] == [
        (LEFT, pytest.approx(LEFT + 0.4 * WIDE)),
        (pytest.approx(LEFT + 0.6 * WIDE), pytest.approx(LEFT + WIDE)),
    ]


def test_a_large_step_is_a_small_picture_of_few_elements() -> None:
    trace = TRACES["huge"]
    assert len(trace.events_since(0)[0]) > 130_000
    columns = Columns.of(trace)
    for picture in (
        draw_timeline(columns, sentences=[str(bound) for bound in TRACES["stash on the host"].bound_by()]),
        draw_timeline(columns, before=columns, now_s=columns.end_s / 2),
    ):
        root = parse(picture)
        assert len(list(root.iter())) < 400
        assert len(drawn_boxes(root)) < 1_600


def test_the_size_has_a_limit_when_every_column_differs() -> None:
    """Uneven bars a few pixels wide on all lanes, half of them exposed, give the largest picture."""
    random = np.random.default_rng(3)
    events = []
    for lane, kinds in (
        ("compute", "forward backward"),
        ("h2d", "load fetch"),
        ("d2h", "push stash"),
        ("eps", "reduce update"),
    ):
        edges = np.sort(random.uniform(0, 1, 1_600))
        for i, (start_s, stop_s) in enumerate(zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True)):
            events.append(Event(lane, kinds.split()[i % 2], start_s, stop_s, f"L{i % 97:03d}", visit=i))
    columns = Columns.of(Trace.of(events, []))
    parse(draw_timeline(columns, span_s=1.0, sentences=["forward: " + "x" * 1_000] * 4))
    parse(draw_timeline(columns, span_s=1.0, before=columns, now_s=0.5))


def hatched(root: ElementTree.Element) -> list[tuple[float, float]]:
    """Return the ends of the hatching strokes above the axis, as (x, y)."""
    lines = "".join(path.get("d", "") for path in root.iter(f"{SVG}path") if path.get("class") == "hatch")
    points = [(float(x), float(y)) for x, y in re.findall(r"[ML]([\d.-]+) ([\d.-]+)", lines)]
    return [point for point in points if point[1] < 200]


def test_exposed_copies_are_hatched_and_hidden_ones_are_not() -> None:
    rows = [("compute", "forward", 4, 10, "L000"), ("h2d", "load", 2, 6, "L000")]
    strokes = hatched(parse(draw_timeline(Columns.of(hand_made(*rows)), span_s=10)))
    assert min(x for x, _ in strokes) >= LEFT + 0.2 * WIDE - 1 and max(x for x, _ in strokes) <= LEFT + 0.4 * WIDE + 1
    assert max(x for x, _ in strokes) > LEFT + 0.35 * WIDE
    assert {74 <= y <= 108 for _, y in strokes} == {True}  # the second lane
    hidden = hand_made(("compute", "forward", 0, 10, "L000"), ("h2d", "load", 2, 6, "L000"))
    assert not hatched(parse(draw_timeline(Columns.of(hidden), span_s=10)))


def test_narrow_exposed_copies_are_hatched_up_to_their_share() -> None:
    """A thousand copies, exposed for the first 0.6 ms of each ms, are too narrow to be hatched separately."""
    rows = [("h2d", "load", i / 1_000, (i + 0.8) / 1_000, "L000") for i in range(1_000)]
    rows += [("compute", "forward", (i + 0.6) / 1_000, (i + 1) / 1_000, "L000") for i in range(1_000)]
    strokes = hatched(parse(draw_timeline(Columns.of(hand_made(*rows)), span_s=1)))
    assert min(y for _, y in strokes) == pytest.approx(74 + 0.4 * 34, abs=1) and max(y for _, y in strokes) == 108
    assert min(x for x, _ in strokes) < LEFT + 2 and max(x for x, _ in strokes) > LEFT + WIDE - 2


def test_visits_are_labelled_once_with_their_layer() -> None:
    trace = TRACES["a few layers"]
    shown = words(parse(draw_timeline(Columns.of(trace), keys=trace.names)))
    assert [shown.count(f"B{i}") for i in range(5)] == [1] * 5  # four micro-batches each; B5 takes turns with F5
    assert {"U0", "U5", "loss"} <= {*shown}


def test_the_legend_names_the_kinds_that_are_there() -> None:
    shown = words(parse(draw_timeline(Columns.of(TRACES["no copies"]))))
    assert "forward" in shown and "backward" in shown and "load" not in shown
    order = [
        word for word in words(parse(draw_timeline(Columns.of(TRACES["many layers"])))) if word in ("load", "push")
    ]
    assert order == ["load", "push"]


def test_names_kinds_and_sentences_are_escaped() -> None:
    trace = hand_made(("compute", "<odd & new>", 0, 1, "L000"), ("compute", "forward", 1, 2, "<script>&'\""))
    picture = draw_timeline(Columns.of(trace), keys=["L000", "<script>&'\""], sentences=["forward: a < b & c"])
    root = parse(picture)
    assert "<script>" not in picture and "<odd" not in picture
    assert "<odd & new>" in words(root) and "a < b & c" in words(root)
    assert any("<script>&'\"" in (title.text or "") for title in root.iter(f"{SVG}title"))


def test_tooltips_are_for_few_bars_and_finished_steps() -> None:
    few, many = Columns.of(TRACES["a few layers"]), Columns.of(TRACES["huge"])

    def tips(picture: str) -> list[str]:
        return [title.text or "" for title in parse(picture).iter(f"{SVG}title")][1:]

    output = tips(draw_timeline(few, keys=[f"L{i:03d}" for i in range(6)]))
    assert any(tip.startswith("B4 backward 4 · L004: ") and tip.endswith("4 events") for tip in output)
    assert not tips(draw_timeline(few, now_s=1.0)) and not tips(draw_timeline(many))


def test_sentences_are_at_fixed_places_and_cut_after_two_lines() -> None:
    columns = Columns.of(TRACES["a few layers"])
    tail, all_of_them = ["tail: t"], ["fill: f", "forward: " + "word " * 200, "backward: b", "tail: t"]

    def at(output: Sequence[str]) -> dict[str, str]:
        return {
            element.text or "": element.get("y", "")
            for element in parse(draw_timeline(columns, sentences=output)).iter(f"{SVG}text")
        }

    assert at(tail)["t"] == at(all_of_them)["t"]
    lines = [text for text in at(all_of_them) if text.startswith("word")]
    assert len(lines) == 2 and lines[1].endswith("…") and max(map(len, lines)) < 140

    def height(picture: str) -> float:
        return float(parse(picture).get("viewBox", "").split()[3])

    assert height(draw_timeline(columns, sentences=tail)) == height(draw_timeline(columns, sentences=all_of_them))
    assert height(draw_timeline(columns)) < height(draw_timeline(columns, sentences=tail))


def bars_outside(root: ElementTree.Element, group: ElementTree.Element) -> list[ElementTree.Element]:
    inside = set(group.iter())
    return [path for path in root.iter(f"{SVG}path") if path.get("class") == "bars" and path not in inside]


def test_a_step_under_way_has_a_cursor_and_the_step_before_as_a_ghost_to_its_right() -> None:
    last = TRACES["many layers"]
    now_s = last.span_s / 3
    under_way = Trace.of([event for event in last.events if event.stop_s <= now_s], [])
    picture = draw_timeline(Columns.of(under_way), before=Columns.of(last), now_s=now_s, span_s=last.span_s)
    root = parse(picture)
    ghosts = [group for group in root.iter(f"{SVG}g") if group.get("class") == "ghost"]
    assert len(ghosts) == 1
    cursor = LEFT + WIDE / 3
    pages = [rect for rect in root.iter(f"{SVG}rect") if rect.get("class") == "page"]
    (page,) = pages  # hides what of the ghost is left of the cursor, and nothing of the step under way
    assert (float(page.get("x", "")), float(page.get("width", ""))) == (LEFT, pytest.approx(cursor - LEFT, abs=0.1))
    order = list(root.iter())
    assert order.index(ghosts[0]) < order.index(page) < min(order.index(bar) for bar in bars_outside(root, ghosts[0]))
    assert max(x for x, _, _, _ in drawn_boxes(ghosts[0])) > cursor + WIDE / 2
    assert "step so far" in words(root)
    assert "ghost" not in re.sub("<style>.*?</style>", "", draw_timeline(Columns.of(last), before=Columns.of(last)))


def test_figures_stay_where_they_are_while_a_step_runs() -> None:
    events = TRACES["a few layers"].events

    def places(count: int) -> list[tuple[str | None, str | None]]:
        root = parse(draw_timeline(Columns.of(Trace.of(events[:count], [])), now_s=0.1, span_s=0.2))
        figures = [group for group in root.iter(f"{SVG}g") if group.get("font-size")]
        return [(text.get("x"), text.get("y")) for group in figures for text in group]

    assert len(places(5)) == 5 and places(0) == places(5) == places(len(events))


def test_events_beyond_the_end_of_the_axis_are_cut_off() -> None:
    boxes = drawn_boxes(parse(draw_timeline(Columns.of(TRACES["late"]), span_s=6.0)))
    assert max(x + width for x, _, width, _ in boxes) <= LEFT + WIDE + 0.01


@traces
def test_the_same_trace_gives_the_same_picture(trace: Trace) -> None:
    again = Trace.of(trace.events_since(0)[0], [])
    assert draw_timeline(Columns.of(trace)) == draw_timeline(Columns.of(again))


def test_a_shown_timeline_has_bottlenecks_and_a_table() -> None:
    trace = TRACES["no overlap"]
    shown = show_timeline(trace)
    assert shown.table == timeline_table(trace)
    assert {"fill", "forward", "backward", "tail"} <= {*words(parse(shown.svg))}
    assert str(trace.bound_by()[1]).partition(": ")[2][:40] in shown.svg


def test_no_events_make_no_bars() -> None:
    nothing = np.empty(0)
    bars = make_bars(nothing, nothing, np.empty(0, np.int64))
    assert isinstance(bars, Bars) and not len(bars.left)
