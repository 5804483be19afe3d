"""Parts shared by all pictures: colours, SVG, scales, tables, columns of a trace, pages, the sweep and the header."""

from __future__ import annotations

import math
import random
import threading
import xml.etree.ElementTree as ET
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from patience import HANG_S

from l2l_core import RelayConfig
from l2l_core.edits import Branch
from l2l_core.trace.events import ALL_LANES, CATEGORIES, LANES, PLACES, Event, MemorySample
from l2l_core.trace.trace import Trace
from workbench.panels.style import STYLE
from workbench.pictures import svg, theme
from workbench.pictures.page_bundle import bundle_of
from workbench.pictures.picture import Picture, Table
from workbench.pictures.scale import Scale, format_seconds, round_up, ticks
from workbench.pictures.session_header import STATE_COLOURS, header_html, header_picture, pending_html, progress_html
from workbench.pictures.step_axis import draw_time_axis
from workbench.pictures.sweep import SHORT_S, make_sweep
from workbench.readings.trace_columns import Columns
from workbench.session.snapshot import Snapshot
from workbench.session.snapshot_values import LayerRow, Progress, ShownStep, StepRow
from workbench.session.statistics import StatisticsLog

NAUGHTY = "<b>&\"'</b>"
SVG = "{http://www.w3.org/2000/svg}"

# Theme ----------------------------------------------------------------------------------------------------------------


def luminance(colour: str) -> float:
    """Return the relative luminance defined by WCAG."""
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
    return sum(weight * c for weight, c in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


def contrast(a: str, b: str) -> float:
    low, high = sorted((luminance(a), luminance(b)))
    return (high + 0.05) / (low + 0.05)


def test_everything_that_a_trace_can_hold_has_a_colour() -> None:
    assert set(theme.CATEGORY_COLOURS) == set(CATEGORIES)
    assert set(theme.LANE_NAMES) == set(ALL_LANES)
    assert set(theme.KIND_LETTERS) == set(theme.KIND_COLOURS)
    assert theme.kind_colour("load") == theme.CATEGORY_COLOURS["weights"], "a load copies weights"
    assert theme.kind_colour("push") == theme.CATEGORY_COLOURS["gradients"]


@pytest.mark.parametrize("colour", sorted({*theme.KIND_COLOURS.values(), *theme.CATEGORY_COLOURS.values()}))
def test_text_on_a_colour_can_be_read(colour: str) -> None:
    inks = {"#000": "#000000", "#fff": "#ffffff"}
    assert contrast(inks[theme.text_colour_on(colour)], colour) >= 3.0


def test_other_kinds_are_grey() -> None:
    assert theme.kind_colour("of a later version") == theme.category_colour("of a later version") == theme.GREY


def test_the_style_sheet_is_balanced_and_on_one_line() -> None:
    assert theme.STYLE.count("{") == theme.STYLE.count("}") > 5 and "\n" not in theme.STYLE


def test_a_document_has_an_escaped_title_and_description() -> None:
    root = ET.fromstring(svg.document(960, 40, NAUGHTY, NAUGHTY, [svg.text(1, 2, NAUGHTY)]))
    assert root.get("viewBox") == "0 0 960 40" and root.get("role") == "img" and root.get("aria-label") == NAUGHTY
    assert [root.findtext(f"{SVG}{name}") for name in ("title", "desc", "text")] == [NAUGHTY] * 3


def test_elements_carry_what_they_are_given_and_nothing_else() -> None:
    root = ET.fromstring(
        svg.document(
            10,
            10,
            "t",
            "d",
            [
                svg.text(1, 2, "a", style="dim", anchor="end", fill="#123456"),
                svg.text(1, 2, "a"),
                svg.rect(1, 2, 3, 4, fill="#123456", style="well", r=2, tip=NAUGHTY),
                svg.rect(1, 2, 3, 4),
                svg.group(
                    [svg.path("M0 0H1", style="rule", stroke="#000", fill="none", width=2, dash="2 2")], style="ghost"
                ),
            ],
        )
    )
    words, plain_words = root.findall(f"{SVG}text")
    assert words.attrib == {"x": "1.0", "y": "2.0", "class": "dim", "text-anchor": "end", "fill": "#123456"}
    assert plain_words.attrib == {"x": "1.0", "y": "2.0"}
    box, plain_box = root.findall(f"{SVG}rect")
    assert box.findtext(f"{SVG}title") == NAUGHTY and (box.get("rx"), box.get("class")) == ("2", "well")
    assert plain_box.attrib == {"x": "1.00", "y": "2.0", "width": "3.00", "height": "4.0"} and not list(plain_box)
    line = root.find(f"{SVG}g[@class='ghost']/{SVG}path")
    assert line is not None
    assert line.attrib == {
        "d": "M0 0H1", "class": "rule", "stroke": "#000", "fill": "none", "stroke-width": "2", "stroke-dasharray": "2 2",
    }  # fmt: skip


@settings(derandomize=True)
@given(st.floats(0, 900), st.floats(0, 300), st.floats(1, 200), st.floats(1, 40), st.floats(2, 12))
def test_a_hatch_stays_in_its_box(x: float, y: float, width: float, height: float, pitch: float) -> None:
    commands = svg.hatch(x, y, width, height, pitch)
    strokes = [stroke.split("L") for stroke in commands.split("M")[1:]]
    for ends in strokes:
        for end in ends:
            at_x, at_y = map(float, end.split())
            assert x - 0.06 <= at_x <= x + width + 0.06 and y - 0.06 <= at_y <= y + height + 0.06
    assert len(strokes) >= (width + height) / pitch - 2, "the box is filled"


def test_a_scale_maps_ends_to_ends() -> None:
    scale = Scale(2.0, 4.0, 96, 944)
    assert (scale(2.0), scale(3.0), scale(4.0)) == (96, 520, 944)
    assert scale(5.0) == 1368, "no clipping"
    assert math.isfinite(Scale(1.0, 1.0, 96, 944)(1.0)), "an empty range is valid"
    assert Scale(0, 10, 100, 0)(1) == 90, "upwards too"


@settings(derandomize=True)
@given(st.floats(-1e6, 1e6), st.floats(1e-9, 1e9), st.integers(2, 12))
def test_marks_are_round_within_the_axis_and_not_too_many(low: float, length: float, at_most: int) -> None:
    high = low + length
    marks = ticks(low, high, at_most)
    assert len(marks) <= at_most + (high - low < 1e-9 * abs(low))
    slack = 1e-6 * max(high - low, abs(low), abs(high))
    assert all(low - slack <= mark <= high + slack for mark in marks)
    assert marks == sorted(marks)


@pytest.mark.parametrize(
    ("low", "high", "at_most", "marks"),
    [
        (0, 10, 6, [0, 2, 4, 6, 8, 10]),
        (0, 1, 3, [0, 0.5, 1]),
        (0.3, 0.9, 4, [0.4, 0.6, 0.8]),
        (-1, 1, 3, [-1, 0, 1]),
        (5, 5, 4, [5]),
        (5, 4, 4, [5]),
        (0, math.nan, 4, [0]),
    ],
)
def test_marks(low: float, high: float, at_most: int, marks: list[float]) -> None:
    assert ticks(low, high, at_most) == pytest.approx(marks)


@settings(derandomize=True)
@given(st.floats(1e-12, 1e12))
def test_an_axis_ends_at_a_round_number_not_far_above(value: float) -> None:
    end = round_up(value)
    assert value * (1 - 1e-8) <= end <= 1.5 * value
    assert round_up(end) == pytest.approx(end), "the result is a fixed point"
    assert float(f"{end:.1e}") == pytest.approx(end), "two digits"


@settings(derandomize=True)
@given(st.floats(1e-6, 1e5), st.sampled_from([(92, 648), (96, 944), (0, 120)]), st.integers(2, 12))
def test_labels_of_seconds_do_not_touch(span_s: float, edges: tuple[float, float], at_most: int) -> None:
    time = Scale(0.0, span_s, *edges)
    root = ET.fromstring(f"<g>{''.join(draw_time_axis(time, 0, at_most))}</g>")
    boxes = []
    for e in root.iter("text"):
        width, x = 6 * len(e.text or ""), float(e.attrib["x"])
        left = x - width * {"middle": 0.5, "end": 1.0}[e.attrib["text-anchor"]]
        boxes.append((left, left + width))
    assert len(boxes) <= at_most and all(a[1] < b[0] for a, b in pairwise(boxes))


def test_labels_at_the_end_of_an_axis_do_not_run_together() -> None:
    drawn = "".join(draw_time_axis(Scale(0.0, 0.5, 92, 648), 0, 11))
    assert "500 ms" in drawn and "450 ms" not in drawn and "400 ms" in drawn


def test_an_axis_of_nothing_has_a_length() -> None:
    assert round_up(0) == round_up(-3) == round_up(math.nan) == 1.0


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        (0, "0 ms"),
        (1e-6, "1 µs"),
        (0.9994e-3, "999 µs"),
        (0.9996e-3, "1 ms"),
        (0.01234, "12.3 ms"),
        (0.9994, "999 ms"),
        (0.9996, "1 s"),
        (59.96, "60 s"),
        (999.6, "1000 s"),
        (12345, "12345 s"),
        (-0.002, "-2 ms"),
    ],
)
def test_seconds_for_people(seconds: float, words: str) -> None:
    assert format_seconds(seconds) == words


@settings(derandomize=True)
@given(st.floats(1e-7, 1e5))
def test_seconds_are_read_back_to_three_digits(seconds: float) -> None:
    number, unit = format_seconds(seconds).split()
    assert "e" not in number, "no exponents"
    assert float(number) * {"s": 1, "ms": 1e-3, "µs": 1e-6}[unit] == pytest.approx(seconds, rel=6e-3)


TABLE = Table(f"About {NAUGHTY}", ("name", "bytes"), [("a", "1"), (NAUGHTY, "1,000")], note=f"Note {NAUGHTY}")


def test_a_table_in_html() -> None:
    page = ET.fromstring(TABLE.to_html())
    assert page.tag == "details" and page.findtext("summary") == f"About {NAUGHTY}"
    assert [cell.text for cell in page.iter("th")] == ["name", "bytes", "a", NAUGHTY]
    assert [cell.get("scope") for cell in page.iter("th")] == ["col", "col", "row", "row"]
    assert [cell.text for cell in page.iter("td")] == ["1", "1,000"] and page.findtext("p") == f"Note {NAUGHTY}"
    assert TABLE.to_html(folded=False).startswith('<table class="l2l-table">')


def test_a_table_in_text_is_aligned() -> None:
    title, *rows, note = TABLE.to_text().splitlines()
    assert (title, note) == (TABLE.title, TABLE.note)
    assert len({len(row) for row in rows}) == 1 and rows[1].startswith("a ") and rows[1].endswith("    1")
    assert Table("Nothing", ("name", "bytes"), []).to_text() == "Nothing\nname  bytes"


def test_a_row_of_another_length_is_a_mistake() -> None:
    with pytest.raises((ValueError, IndexError)):
        Table("t", ("a", "b"), [("1", "2", "3")]).to_text()


def test_a_picture_shows_itself_with_its_table() -> None:
    picture = Picture(svg.document(10, 10, "t", "d", []), TABLE)
    bundle = picture._repr_mimebundle_()
    assert set(bundle) == {"text/html", "image/svg+xml", "text/plain"}
    assert bundle["image/svg+xml"] == picture.svg and bundle["text/plain"] == TABLE.to_text()
    assert picture.svg in bundle["text/html"] and TABLE.to_html() in bundle["text/html"]


def test_a_page_of_pictures_and_tables() -> None:
    one, two = (Picture(svg.document(10, 10, name, "d", []), TABLE) for name in ("one", "two"))
    other = Table("Other", ("a",), [("b",)])
    bundle = bundle_of([other, one, two])
    assert bundle["image/svg+xml"] == one.svg, "the first picture, even after a table"
    order = [bundle["text/html"].index(part) for part in (other.to_html(), one.svg, two.svg)]
    assert order == sorted(order) and bundle["text/html"].count("<details") == 3
    assert bundle["text/plain"] == "\n\n".join(table.to_text() for table in (other, TABLE, TABLE))
    assert set(bundle_of([other])) == {"text/html", "text/plain"}
    assert bundle_of([])["text/plain"] == ""


def make_events(count: int, seed: int = 0) -> list[Event]:
    draw = random.Random(seed)
    return [
        Event(
            draw.choice(LANES),
            draw.choice(("forward", "load", "push", "update")),
            start := draw.random(),
            start + draw.random(),
            f"L{draw.randrange(5):03}",
            draw.randrange(-1, 4),
            draw.randrange(10**12),
            draw.randrange(-1, 9),
            draw.random(),
        )
        for _ in range(count)
    ]


def make_samples(count: int) -> list[MemorySample]:
    return [MemorySample(float(i), PLACES[i % 2], {CATEGORIES[i % 3]: i, CATEGORIES[0]: 2 * i}) for i in range(count)]


def rows_of(columns: Columns) -> list[Event]:
    """Return the events of the columns."""
    return [
        Event(
            LANES[columns.lane[i]],
            columns.kinds[int(columns.kind[i])],
            columns.start_s[i],
            columns.stop_s[i],
            columns.layers[int(columns.layer[i])],
            columns.k[i],
            columns.nbytes[i],
            columns.visit[i],
            columns.stalled_s[i],
        )
        for i in range(len(columns.start_s))
    ]


def test_columns_hold_every_event_and_sample() -> None:
    events, samples = make_events(1000), make_samples(50)
    columns = Columns.of(Trace.of(events, samples))
    assert rows_of(columns) == events
    assert columns.end_s == max(event.stop_s for event in events)
    for i, sample in enumerate(samples):
        assert (columns.sample_s[i], PLACES[columns.sample_place[i]]) == (sample.t_s, sample.place)
        assert columns.sample_bytes[i].sum() == sample.total
    assert columns.sample_bytes.shape == (50, len(CATEGORIES))
    for lane in LANES:
        assert columns.start_s[columns.events_on(lane)].tolist() == sorted(e.start_s for e in events if e.lane == lane)
    assert np.array_equal(columns.samples_at("host"), range(1, 50, 2))


def test_columns_of_nothing() -> None:
    columns = Columns.of(Trace())
    assert columns.end_s == 0.0 and len(columns.start_s) == len(columns.sample_s) == 0
    assert (
        not len(columns.events_on("h2d"))
        and not len(columns.samples_at("device"))
        and columns.kinds == columns.layers == ()
    )


def test_columns_end_at_the_given_event() -> None:
    events, samples = make_events(700), make_samples(20)
    trace = Trace.of(events[:300], samples[:5])
    early = Columns.of(trace)
    before = rows_of(early)
    for event in events[300:]:
        trace.add(event)
    trace._samples.extend(samples[5:])
    late, part = Columns.of(trace), Columns.of(trace, 400, 7)
    assert rows_of(late) == events and rows_of(part) == events[:400] and len(part.sample_s) == 7
    assert rows_of(early) == before == events[:300], "earlier results do not change"
    assert rows_of(Columns.of(trace, 10_000)) == events, "limited by the number of events"
    assert Columns.of(trace, 0).end_s == 0.0


def test_columns_can_be_read_from_several_threads_while_the_trace_grows() -> None:
    events, trace = make_events(4000), Trace()
    wrong: list[str] = []

    def read() -> None:
        while len(seen := Columns.of(trace).start_s) < len(events):
            if seen.tolist() != [event.start_s for event in events[: len(seen)]]:
                wrong.append(f"at {len(seen)} events")

    threads = [threading.Thread(target=read) for _ in range(3)]
    for thread in threads:
        thread.start()
    for event in events:
        trace.add(event)
    for thread in threads:
        thread.join(HANG_S)
    assert not wrong and rows_of(Columns.of(trace)) == events


def make_trace(stop_s: float) -> Trace:
    return Trace.of([Event("compute", "forward", 0.0, stop_s, "L000", 0)], [])


def make_rows(*seconds: float) -> tuple[StepRow, ...]:
    return tuple(StepRow(i + 1, 1.0 / (i + 1), s, 6, 0, 0, 0, 1.0) for i, s in enumerate(seconds))


def make_snapshot(**fields: Any) -> Snapshot:
    layer = LayerRow("L000", "blocks.0", 10, 40, 0, False, None, None, num_trained=10)
    start = Snapshot(
        number=0,
        state="idle",
        pausing=False,
        model="GPT",
        num_params=1_234_567,
        device="emulated device",
        figures={"memory_bytes": None, "h2d_bytes_per_s": None, "d2h_bytes_per_s": 1e8, "latency_s": 0.0},
        config=RelayConfig(micro_batches=4, ahead=2, stash="host"),
        queued=(),
        step=0,
        done=0,
        target=0,
        steps=(),
        changes=(),
        layers=(layer,) * 3,
        statistics=StatisticsLog().view(),
        shell_params=7,
        shell_trained=7,
        shown=None,
        progress=None,
        failure=None,
    )
    last = fields.pop("last", None)
    shown = ShownStep("main", last.step + 1, last, start.layers) if last is not None else None
    return replace(start, shown=shown, **fields)


def test_before_the_first_step_there_is_nothing_to_draw() -> None:
    assert make_sweep(make_snapshot()) is None


def test_a_finished_step_is_drawn_whole() -> None:
    sweep = make_sweep(make_snapshot(last=make_trace(2.0)))
    assert sweep is not None and (sweep.now.end_s, sweep.before, sweep.now_s) == (2.0, None, None)
    assert sweep.span_s == round_up(1.05 * 2.0) > 2.0


def test_the_first_step_has_none_before_it() -> None:
    progress = Progress(make_trace(1.0), 1, 0, 1.5)
    sweep = make_sweep(make_snapshot(progress=progress))
    assert sweep is not None and sweep.before is None and sweep.now_s == 1.5 and sweep.span_s >= 1.5


def test_a_step_under_way_is_drawn_over_the_one_before_as_far_as_it_was() -> None:
    trace = make_trace(1.0)
    trace.add(Event("compute", "forward", 1.0, 1.4, "L000", 1))
    sweep = make_sweep(make_snapshot(last=make_trace(4.0), progress=Progress(trace, 1, 0, 1.2)))
    assert sweep is not None and sweep.before is not None
    assert (len(sweep.now.start_s), sweep.before.end_s, sweep.now_s) == (1, 4.0, 1.2)
    assert sweep.span_s >= 4.0, "the axis does not move when the step ends"


def test_steps_that_are_over_in_a_few_frames_are_drawn_when_they_are_finished() -> None:
    last = make_trace(0.9 * SHORT_S)
    sweep = make_sweep(make_snapshot(last=last, progress=Progress(make_trace(0.01), 1, 0, 0.02)))
    assert sweep is not None and (sweep.now.end_s, sweep.before, sweep.now_s) == (0.9 * SHORT_S, None, None)


def test_the_axis_moves_only_when_it_must() -> None:
    span_s = 0.0
    spans = []
    for end_s in (2.0, 2.1, 1.9, 2.05, 1.2, 4.0, 3.0, 0.5):
        sweep = make_sweep(make_snapshot(last=make_trace(end_s)), span_s)
        assert sweep is not None
        span_s = sweep.span_s
        assert span_s >= end_s
        spans.append(span_s)
    first, longer = round_up(1.05 * 2.0), round_up(1.05 * 4.0)
    assert spans == [first] * 4 + [round_up(1.05 * 1.2)] + [longer] * 2 + [round_up(1.05 * 0.5)]


def test_a_step_without_events_has_an_axis_too() -> None:
    for span_s in (0.0, 5.0):
        sweep = make_sweep(make_snapshot(last=Trace()), span_s)
        assert sweep is not None and sweep.span_s > 0


def words_of(html: str) -> str:
    return " ".join(" ".join(ET.fromstring(html).itertext()).split())


@pytest.mark.parametrize("state", ["idle", "running", "paused", "failed", "closed"])
def test_the_header_shows_the_state_in_words_and_colour(state: Any) -> None:
    html = header_html(make_snapshot(state=state))
    assert state in words_of(html) and STATE_COLOURS[state] in html
    assert "pausing after this step" in words_of(header_html(make_snapshot(state="running", pausing=True)))


def test_the_header_shows_model_step_and_pace() -> None:
    words = words_of(header_html(make_snapshot()))
    assert "GPT · 3 layers · 1.23 M weights" in words and "step 0" in words and "loss" not in words
    words = words_of(header_html(make_snapshot(step=3, steps=make_rows(9.0, 0.2, 0.3))))
    assert "step 3" in words and "loss 0.3333" in words and "300 ms per step" in words, "a median of the last steps"
    words = words_of(header_html(make_snapshot(model=NAUGHTY, device=NAUGHTY)))
    assert words.count(NAUGHTY) == 2


def test_facts_of_the_header_are_short_and_break_between_each_other_alone() -> None:
    rows = [replace(row, objective="mean over rows or targets") for row in make_rows(0.2, 0.3)]
    branch = Branch("x" * 80, True, 2, 3, 0.5, 0)
    html = header_html(make_snapshot(step=2, steps=rows, branch=branch.name, branches=[branch, branch]))
    root = ET.fromstring(html)
    facts = [e for e in root.iter("span") if e.attrib.get("class") == "l2l-fact"]
    texts = [e.text or "" for e in facts]
    assert [e.attrib["title"] for e in facts if e.text == "loss 0.5"] == ["loss 0.5 (mean over rows or targets)"]
    assert [e.attrib["title"] for e in facts if (e.text or "").startswith("step 2 of xxx")] == [f"step 2 of {'x' * 80}"]
    assert max(map(len, texts)) <= 36 and texts[-1].endswith("/s") and ".l2l-fact{white-space:nowrap}" in STYLE
    assert " · ".join(texts) in words_of(html)


@pytest.mark.parametrize(
    ("count", "words"),
    [
        (7, "7 weights"),
        (999, "999 weights"),
        (999_900, "1 M weights"),
        (123_400, "123 k weights"),
        (7_000_000_000, "7 G weights"),
    ],
)
def test_weights_are_counted_in_round_numbers(count: int, words: str) -> None:
    assert f" {words} " in words_of(header_html(make_snapshot(num_params=count)))


def test_progress_is_a_bar_that_can_be_read_aloud() -> None:
    now = make_snapshot(state="running", done=3, target=12, steps=make_rows(0.5, 0.5, 0.5), queued=("pause", NAUGHTY))
    html = progress_html(now)
    bar = ET.fromstring(html).find(".//*[@role='progressbar']")
    assert bar is not None
    assert [bar.get(f"aria-value{name}") for name in ("min", "max", "now")] == ["0", "12", "3"]
    assert bar.get("aria-label") and "width:25.0%" in bar[0].get("style", "")
    assert words_of(html) == f"3 of 12 steps, 4.5 s left next: 1. pause; 2. {NAUGHTY}"
    busy = progress_html(replace(now, busy=NAUGHTY))
    assert words_of(busy).endswith(f"waits for {NAUGHTY} to end: 1. pause; 2. {NAUGHTY}")
    assert words_of(pending_html(now)) == f"{NAUGHTY} is next: place 2 of 2 in the queue; Remove takes it out"
    assert pending_html(make_snapshot()) == ""


def test_a_run_without_end_has_no_bar() -> None:
    html = progress_html(make_snapshot(state="running", done=7, target=None))
    assert words_of(html) == "7 steps, until stopped" and "progressbar" not in html


def test_nothing_is_left_of_what_does_not_run() -> None:
    for fields in ({}, {"state": "paused", "done": 1, "target": 3}, {"done": 3, "target": 3}):
        html = progress_html(make_snapshot(steps=make_rows(0.5), **fields))
        assert "left" not in words_of(html)
    assert "no run yet" in words_of(progress_html(make_snapshot()))


def test_the_header_as_a_picture_has_the_settings_as_a_table() -> None:
    now = make_snapshot(
        model=NAUGHTY, state="paused", step=4, figures={"memory_bytes": 4_500_000, "h2d_bytes_per_s": None}
    )
    picture = header_picture(now)
    root = ET.fromstring(picture.svg)
    words = root.findtext(f"{SVG}text") or ""
    assert (
        words.startswith(f"paused: {NAUGHTY} · 3 layers") and root.findtext(f"{SVG}desc") == words == picture.table.note
    )
    assert {name: value for name, value in picture.table.rows} == {
        "micro-batches": "4",
        "layers ahead": "2",
        "stash on": "host",
        "update": "eager",
        "precision": "fp32",
        "link to the device": "unlimited",
        "device memory": "4.5 MB",
    }
    rows = {name: value for name, value in header_picture(make_snapshot(figures={"d2h_bytes_per_s": 1e8})).table.rows}
    assert rows["link from the device"] == "100 MB/s" and rows["device memory"] == "no limit"
    assert "link to the device" not in rows
