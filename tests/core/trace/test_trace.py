"""Trace: interval arithmetic, overlap on constructed traces, live reading, and the two file formats."""

from __future__ import annotations

import gzip
import json
import math
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from l2l_core.trace.events import ALL_LANES, LANES, Event, MemorySample, WorkerInfo
from l2l_core.trace.intervals import intersect, merge, subtract, total_length
from l2l_core.trace.trace import Trace
from l2l_core.trace.trace_files import chrome_trace

pytestmark = pytest.mark.filterwarnings("error")

Intervals = list[tuple[int, int]]
GRID = 24
grid_intervals = st.lists(st.tuples(st.integers(0, GRID), st.integers(0, GRID)).map(sorted).map(tuple), max_size=8)


def ticking(*times_s: float) -> Callable[[], float]:
    """A clock that shows the given times, one per look."""
    remaining: Iterator[float] = iter(times_s)
    return lambda: next(remaining)


def a_step() -> Trace:
    """Two layers, forward and turn, in quarters of a second.

    ::

        t (s)    0    .5    1    1.5    2    2.5    3    3.5    4
        h2d      L A~~~~~   L B~~~~~
        compute             F A0 F A1   F B0 .....  B B0
        d2h                             stash             P B~~
        eps                                               U B~~~~
    """
    names = {"A": "layers.0", "B": "layers.1"}
    settings = {"micro_batches": 2, "ahead": 1, "max_grad_norm": None, "latency_s": 1e-5}
    trace = Trace(step=7, device="emulated", names=names, clock=ticking(0.0, 1.0, 2.0, 3.0), settings=settings)
    trace.add(Event("h2d", "load", 0.0, 0.75, "A", nbytes=3_000, visit=0))
    trace.sample("device", {"weights": 3_000, "stash": 0})
    trace.add(Event("compute", "forward", 1.0, 1.25, "A", 0, visit=0))
    trace.add(Event("compute", "forward", 1.25, 1.5, "A", 1, visit=0))
    trace.add(Event("h2d", "load", 1.0, 1.75, "B", nbytes=3_000, visit=1))  # arrives late
    trace.sample("device", {"weights": 6_000, "stash": 100})
    trace.sample("host", {"weights": 6_000})
    trace.add(Event("compute", "forward", 2.0, 2.25, "B", 0, visit=1))
    trace.add(Event("d2h", "stash", 2.0, 2.25, "A", 0, nbytes=100))
    trace.add(Event("compute", "backward", 3.0, 3.5, "B", 0, visit=2))
    trace.add(Event("d2h", "push", 3.25, 3.75, "B", nbytes=3_000, visit=2))
    trace.add(Event("eps", "update", 3.5, 4.0, "B"))
    trace.sample("device", {"weights": 3_000, "gradients": 3_000})
    return trace


# ---- intervals -------------------------------------------------------------------------------------------------


def cells(intervals: Intervals) -> set[int]:
    return {cell for start, stop in intervals for cell in range(start, stop)}


@given(grid_intervals)
def test_merge_against_grid(intervals: Intervals) -> None:
    union = merge(intervals)
    assert cells(union) == cells(intervals)
    assert all(start < stop for start, stop in union)
    assert all(before[1] < after[0] for before, after in zip(union, union[1:], strict=False))
    assert total_length(union) == len(cells(intervals))


@given(grid_intervals, grid_intervals)
def test_intersect_against_grid(a: Intervals, b: Intervals) -> None:
    common = intersect(merge(a), merge(b))
    assert cells(common) == cells(a) & cells(b)
    assert common == merge(common) == intersect(merge(b), merge(a))
    rest = subtract(merge(a), merge(b))
    assert cells(rest) == cells(a) - cells(b) and rest == merge(rest)


@given(grid_intervals, grid_intervals)
def test_overlap_and_exposed_against_grid(copies: Intervals, compute: Intervals) -> None:
    trace = Trace()
    for i, (start, stop) in enumerate(copies):
        trace.add(Event(("h2d", "d2h")[i % 2], "load", start, stop))
    for start, stop in compute:
        trace.add(Event("compute", "forward", start, stop))
    copied, hidden = cells(copies), cells(copies) & cells(compute)
    assert trace.overlap() == (len(hidden) / len(copied) if copied else 1.0)
    assert trace.exposed_s("h2d") == len(cells(copies[::2]) - cells(compute))
    assert trace.busy_s("compute") == len(cells(compute))
    assert trace.exposed_s("compute") == 0.0


unit = st.floats(0, 1e3)


@given(st.lists(st.tuples(unit, unit).map(sorted), max_size=8), st.lists(st.tuples(unit, unit).map(sorted), max_size=8))
def test_shares_stay_in_range_with_any_float(copies: list[list[float]], compute: list[list[float]]) -> None:
    trace = Trace()
    for lane, intervals in (("d2h", copies), ("compute", compute)):
        for start, stop in intervals:
            trace.add(Event(lane, "x", start, stop))
    assert 0.0 <= trace.overlap() <= 1.0
    assert 0.0 <= trace.exposed_s("d2h") <= trace.busy_s("d2h")


def test_rounding_does_not_hide_more_than_there_is() -> None:
    trace = Trace()
    trace.add(Event("h2d", "load", 0.06, 0.7))
    for start, stop in ((0.06, 0.07), (math.nextafter(0.07, 1), 0.1), (math.nextafter(0.1, 1), 0.7)):
        trace.add(Event("compute", "forward", start, stop))  # the rounded lengths add up to more than 0.7 - 0.06
    assert trace.overlap() == 1.0 and trace.exposed_s("h2d") == 0.0


# ---- events and memory -----------------------------------------------------------------------------------------


def test_numbers_of_a_step() -> None:
    trace = a_step()
    assert trace.span_s == 4.0
    assert {lane: trace.busy_s(lane) for lane in LANES} == {"compute": 1.25, "h2d": 1.5, "d2h": 0.75, "eps": 0.5}
    assert {lane: trace.exposed_s(lane) for lane in LANES} == {"compute": 0.0, "h2d": 1.0, "d2h": 0.25, "eps": 0.5}
    assert trace.overlap() == (0.5 + 0.25 + 0.25) / 2.25
    assert trace.peak_bytes("device") == 6_100 and trace.peak_bytes("host") == 6_000
    assert trace.peak_sample("device") == MemorySample(1.0, "device", {"weights": 6_000, "stash": 100})


def test_events_are_sorted_and_lanes_are_complete() -> None:
    trace = a_step()
    starts = [event.start_s for event in trace.events]
    assert starts == sorted(starts) and len(starts) == 9
    assert tuple(trace.lanes) == LANES
    assert [event.label() for event in trace.lanes["compute"]] == ["F A k=0", "F A k=1", "F B k=0", "B B k=0"]
    assert sorted(sum(trace.lanes.values(), ()), key=lambda e: e.start_s) == list(trace.events)


def test_an_event_of_no_length_sorts_before_what_starts_with_it() -> None:
    trace = Trace()
    trace.add(Event("compute", "forward", 1.0, 2.0))
    trace.add(Event("compute", "shell", 1.0, 1.0))
    assert [event.kind for event in trace.events] == ["shell", "forward"]
    assert [row["dur"] for row in rows_of(chrome_trace(trace), "X")] == [0.0, 1e6]


def test_an_empty_trace() -> None:
    trace = Trace()
    assert (trace.events, trace.memory, trace.span_s, trace.overlap()) == ((), (), 0.0, 1.0)
    assert trace.lanes == dict.fromkeys(LANES, ())
    assert trace.peak_bytes("host") == 0 and trace.peak_sample("host") is None
    assert "0 events" in trace.summary() and "0 events" in repr(trace)
    assert trace.events_since(0) == ([], 0)


@pytest.mark.parametrize(
    ("event", "label"),
    [
        (Event("compute", "forward", 0, 1, "L003", 1), "F L003 k=1"),
        (Event("compute", "backward", 0, 1, "L003", 0), "B L003 k=0"),
        (Event("h2d", "load", 0, 1, "L004"), "L L004"),
        (Event("d2h", "push", 0, 1, "L003"), "P L003"),
        (Event("eps", "update", 0, 1, "L003"), "U L003"),
        (Event("d2h", "stash", 0, 1, "L003", 2), "stash L003 k=2"),
        (Event("compute", "shell", 0, 1, "shell", 0), "shell k=0"),
        (Event("h2d", "load", 0, 1, "shell"), "L shell"),
        (Event("compute", "loss", 0, 1, k=0), "loss k=0"),
    ],
)
def test_labels(event: Event, label: str) -> None:
    assert event.label() == label


def test_add_refuses_what_cannot_be() -> None:
    trace = Trace()
    with pytest.raises(AssertionError, match="'F L1 k=2' on compute stops at 1.0 s, before it starts at 2.0 s"):
        trace.add(Event("compute", "forward", 2.0, 1.0, "L1", 2))
    with pytest.raises(AssertionError, match="lane 'gpu'"):
        trace.add(Event("gpu", "forward", 0.0, 1.0))
    for bad in (math.nan, math.inf):
        with pytest.raises(AssertionError, match="not finite"):
            trace.add(Event("compute", "forward", 0.0, bad))
    assert trace.events == ()
    trace.add(Event("compute", "forward", 1.0, 1.0))  # no length is fine
    assert trace.busy_s("compute") == 0.0


def test_unknown_lane_and_place_name_the_known_ones() -> None:
    with pytest.raises(ValueError, match="no lane 'gpu'; the lanes are compute, h2d, d2h, eps"):
        Trace().busy_s("gpu")
    with pytest.raises(ValueError, match="no place 'disk'; the places are device, host"):
        Trace().peak_bytes("disk")
    with pytest.raises(AssertionError, match="'disk'"):
        Trace().sample("disk", {})


def test_samples_that_change_nothing_are_skipped_per_place() -> None:
    trace = Trace(clock=ticking(0.0, 1.0, 2.0, 3.0))
    used = {"weights": 1}
    trace.sample("device", used)
    trace.sample("host", used)
    trace.sample("device", {"weights": 1})
    used["weights"] = 2  # the caller's dict is not the sample's
    trace.sample("device", used)
    trace.sample("host", {"weights": 1})
    trace.sample("device", {"weights": 1})  # back to an earlier value: a change
    assert [(s.t_s, s.place, s.total) for s in trace.memory] == [
        (0.0, "device", 1),
        (1.0, "host", 1),
        (2.0, "device", 2),
        (3.0, "device", 1),
    ]


def test_the_clock_counts_from_the_beginning() -> None:
    trace = Trace()
    first, second = trace.now(), trace.now()
    assert 0.0 <= first <= second < 60.0


def test_summary_names_every_lane_and_peak() -> None:
    lines = a_step().summary().splitlines()
    assert lines[0] == "step 8 on emulated: 4 s, 9 events, 44.4% of copy time hidden under compute"
    assert [line.split()[0] for line in lines[1:]] == [*LANES, "device", "host"]
    assert "busy       1.5 s ( 37.5%), exposed         1 s" in lines[2]
    assert lines[5] == "  device   peak 6.1 kB at 1 s (weights 6 kB, stash 100 B)"


# ---- many threads ----------------------------------------------------------------------------------------------


def test_four_lanes_write_while_one_reader_follows() -> None:
    trace, go = Trace(), threading.Barrier(5)

    def run(lane: str) -> None:
        go.wait()
        for k in range(1000):
            trace.add(Event(lane, "work", k, k + 1, k=k))
            trace.sample("device", {lane: k})

    threads = [threading.Thread(target=run, args=(lane,)) for lane in LANES]
    for thread in threads:
        thread.start()
    go.wait()
    seen: list[Event] = []
    cursor = 0
    while any(thread.is_alive() for thread in threads):
        new, cursor = trace.events_since(cursor)
        seen += new
    for thread in threads:
        thread.join()
    seen += trace.events_since(cursor)[0]
    for lane in LANES:
        assert [event.k for event in seen if event.lane == lane] == list(range(1000))
    assert len(seen) == 4000 == len(trace.events)
    times = [sample.t_s for sample in trace.memory]
    assert len(times) == 4000 and times == sorted(times)


# ---- Chrome JSON -----------------------------------------------------------------------------------------------


def rows_of(chrome: dict[str, Any], ph: str) -> list[dict[str, Any]]:
    return [row for row in chrome["traceEvents"] if row["ph"] == ph]


def test_chrome_slices() -> None:
    chrome = chrome_trace(a_step())
    assert chrome["schemaVersion"] == 1 and chrome["distributedInfo"] == {"rank": 0, "world_size": 1}
    names = {row["args"]["name"]: row.get("tid") for row in rows_of(chrome, "M") if "name" in row["args"]}
    assert names == {"relay step 8 on emulated": None, "compute": 1, "h2d": 2, "d2h": 3, "eps": 4}
    slices = {row["name"]: row for row in rows_of(chrome, "X")}
    assert len(slices) == 9 == len({row["args"]["correlation"] for row in slices.values()})
    load = slices["Memcpy HtoD L layers.1"]
    assert (load["tid"], load["ts"], load["dur"], load["cat"]) == (2, 1e6, 0.75e6, "gpu_memcpy")
    args = load["args"]
    assert (args["layer"], args["layer_name"], args["k"]) == ("B", "layers.1", -1)
    assert (args["bytes"], args["visit"]) == (3000, 1)
    assert args["stream"] == 2 and args["memory bandwidth (GB/s)"] == 3000 / 0.75e9
    assert slices["F layers.0 k=1"]["cat"] == "kernel" and slices["F layers.0 k=1"]["args"]["k"] == 1
    assert slices["U layers.1"]["cat"] == "cpu_op" and slices["U layers.1"]["args"]["stream"] == -1


def test_chrome_arrows_lead_from_each_load_to_its_first_use() -> None:
    trace = Trace()
    for start, layer in ((0.0, "A"), (1.0, "B"), (4.0, "A"), (6.0, "A"), (8.0, "C")):
        trace.add(Event("h2d", "load", start, start + 0.5, layer))
    for start, kind, layer in (
        (0.25, "forward", "A"),
        (0.5, "forward", "A"),
        (0.75, "forward", "A"),
        (3.0, "backward", "B"),
        (5.0, "shell", "A"),
        (7.0, "backward", "A"),
    ):
        trace.add(Event("compute", kind, start, start + 0.125, layer))
    chrome = chrome_trace(trace)
    starts = {row["id"]: row["ts"] / 1e6 for row in rows_of(chrome, "s")}
    finishes = {row["id"]: row["ts"] / 1e6 for row in rows_of(chrome, "f")}
    arrows = sorted((starts[i], finishes[i]) for i in starts)
    # not to a use before the load ended, not past the layer's next load, not to other work, none without a use
    assert starts.keys() == finishes.keys()
    assert arrows == [(0.0, 0.5), (1.0, 3.0), (6.0, 7.0)]
    assert all(row["bp"] == "e" and row["tid"] == 1 for row in rows_of(chrome, "f"))


def test_chrome_counters_write_missing_categories_as_zero() -> None:
    counters = rows_of(chrome_trace(a_step()), "C")
    assert [(row["name"], row["ts"]) for row in counters] == [
        ("device bytes", 0.0),
        ("device bytes", 1e6),
        ("host bytes", 2e6),
        ("device bytes", 3e6),
    ]
    assert counters[3]["args"] == {"weights": 3000, "stash": 0, "gradients": 3000}
    assert counters[2]["args"] == {"weights": 6000}


@given(st.lists(st.tuples(st.floats(0, 1e-3), st.floats(0, 1e-3)), min_size=1, max_size=30), st.floats(0, 100))
def test_chrome_slices_never_overlap_after_rounding(gaps: list[tuple[float, float]], t_s: float) -> None:
    trace = Trace()
    for gap_s, work_s in gaps:
        start_s = max(t_s + gap_s - 5e-7, 0.0)  # up to half a microsecond before the last one stopped
        t_s = max(start_s, t_s + gap_s + work_s)
        trace.add(Event("compute", "work", start_s, t_s))
    rows = rows_of(chrome_trace(trace), "X")
    slices = [(round(row["ts"] * 1e3), round((row["ts"] + row["dur"]) * 1e3)) for row in rows]  # ns
    assert all(start <= stop for start, stop in slices)
    assert all(before[1] <= after[0] for before, after in zip(slices, slices[1:], strict=False))


def test_chrome_refuses_a_lane_that_is_not_serial() -> None:
    trace = Trace()
    trace.add(Event("eps", "update", 0.0, 1.0, "A"))
    trace.add(Event("eps", "update", 0.5, 1.5, "B"))
    with pytest.raises(AssertionError, match="lane eps is serial, but 'U B' starts at 0.5 s while .* busy until 1.0 s"):
        chrome_trace(trace)


def test_to_chrome_goes_by_suffix(tmp_path: Path) -> None:
    trace = a_step()
    trace.to_chrome(tmp_path / "t.json")
    trace.to_chrome(str(tmp_path / "t.json.gz"))
    trace.to_chrome(tmp_path / "plain.json.gz", compress=False)
    plain = (tmp_path / "t.json").read_bytes()
    assert json.loads(plain) == chrome_trace(trace)
    assert gzip.decompress((tmp_path / "t.json.gz").read_bytes()) == plain == (tmp_path / "plain.json.gz").read_bytes()
    with pytest.raises(ValueError, match="use .json or .json.gz"):
        trace.to_chrome(tmp_path / "t.txt")


# ---- JSON lines ------------------------------------------------------------------------------------------------


def assert_same(a: Trace, b: Trace) -> None:
    assert (a.step, a.device, a.names, a.settings, a.worker) == (b.step, b.device, b.names, b.settings, b.worker)
    assert a.events_since(0) == b.events_since(0)
    assert a.memory == b.memory


def test_jsonl_round_trip(tmp_path: Path) -> None:
    trace, path = a_step(), tmp_path / "t.jsonl"
    trace.to_jsonl(path)
    assert_same(trace, Trace.from_jsonl(path))
    assert json.loads(path.read_text().splitlines()[0])["version"] == 3
    Trace().to_jsonl(path)
    assert_same(Trace(), Trace.from_jsonl(str(path)))


@given(st.lists(st.tuples(st.sampled_from(ALL_LANES), st.text(), unit, unit, st.text(), st.integers(-1))))
def test_jsonl_round_trip_of_anything(tmp_path_factory: pytest.TempPathFactory, rows: list[Any]) -> None:
    trace = Trace(names={"a": "ü\n\u2028"}, worker=WorkerInfo(1, 2, 0.5, 0.25, 0))
    for lane, kind, a, b, layer, n in rows:
        trace.add(Event(lane, kind, min(a, b), max(a, b), layer, nbytes=n))
    path = tmp_path_factory.mktemp("jsonl") / "t.jsonl"
    trace.to_jsonl(path)
    assert_same(trace, Trace.from_jsonl(path))


def replace_line(lines: list[str], number: int, old: str, new: str) -> list[str]:
    assert old in lines[number - 1]
    return [*lines[: number - 1], lines[number - 1].replace(old, new), *lines[number:]]


@pytest.mark.parametrize(
    ("damage", "line", "message"),
    [
        (lambda lines: [], 1, "JSONDecodeError"),
        (lambda lines: lines[1:], 1, "KeyError: 'schema'"),
        (lambda lines: replace_line(lines, 1, "l2l-trace", "other"), 1, "schema 'other', expected 'l2l-trace'"),
        (lambda lines: replace_line(lines, 1, '"version": 3', '"edition": 3'), 1, "KeyError: 'version'"),
        (lambda lines: replace_line(lines, 1, '"settings":', '"setting":'), 1, "KeyError: 'settings'"),
        (lambda lines: replace_line(lines, 1, '"settings": {', '"settings": 3, "x": {'), 1, "TypeError"),
        (lambda lines: lines[:5], 5, "ends after 4 rows of the 13"),
        (lambda lines: [*lines[:5], lines[5][:20]], 6, "JSONDecodeError"),
        (lambda lines: replace_line(lines, 3, '"lane": "compute"', '"lane": "gpu"'), 3, "lane 'gpu'"),
        (lambda lines: replace_line(lines, 3, '"start_s": 1.0', '"start_s": 9.0'), 3, "before it starts"),
        (lambda lines: replace_line(lines, 3, '"start_s": 1.0', '"start_s": "1"'), 3, "start_s is '1', expected float"),
        (lambda lines: replace_line(lines, 3, '"kind": "forward", ', ""), 3, "KeyError: 'kind'"),
        (lambda lines: replace_line(lines, 3, '"k":', '"micro":'), 3, "KeyError: 'k'"),
        (lambda lines: replace_line(lines, 3, '"stay":', '"days":'), 3, "KeyError: 'stay'"),
        (lambda lines: replace_line(lines, 3, '"type": "event"', '"type": "weather"'), 3, "KeyError: 'weather'"),
        (lambda lines: replace_line(lines, 11, '"place": "device"', '"place": "disk"'), 11, "'disk'"),
        (lambda lines: replace_line(lines, 11, "3000", '"3000"'), 11, "bytes_by_category is"),
        (lambda lines: [*lines[:2], "7", *lines[3:]], 3, "AttributeError"),
    ],
)
def test_a_damaged_file_is_named_with_its_line(
    damage: Callable[[list[str]], list[str]], line: int, message: str, tmp_path: Path
) -> None:
    path = tmp_path / "t.jsonl"
    a_step().to_jsonl(path)
    path.write_text("\n".join(damage(path.read_text().splitlines())))
    with pytest.raises(ValueError) as caught:
        Trace.from_jsonl(path)
    assert f"t.jsonl, line {line}: " in str(caught.value) and message in str(caught.value)


@pytest.mark.parametrize("version", [1, 2, 4, "x"])
def test_another_version_of_the_format_is_refused(version: int | str, tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    a_step().to_jsonl(path)
    lines = path.read_text().splitlines()
    path.write_text("\n".join([json.dumps(json.loads(lines[0]) | {"version": version}), *lines[1:]]))
    said = rf"t.jsonl has version {version!r} of .*, and this release reads version 3: record the step again, or read .* with"
    with pytest.raises(ValueError, match=said):
        Trace.from_jsonl(path)


def test_bytes_that_are_not_text(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    a_step().to_jsonl(path)
    path.write_bytes(path.read_bytes().replace(b"forward", b"forw\xff\xfed", 1))
    with pytest.raises(ValueError, match="t.jsonl, line 3: .*UnicodeDecodeError"):
        Trace.from_jsonl(path)
