"""Traces of several workers: on one axis of time, as Chrome JSON with a process each, and as files."""

import json
import pickle
import re
from pathlib import Path

import pytest

from l2l_core import Event, Trace, Traces
from l2l_core.trace import MemorySample, WorkerInfo


def of_worker(rank: int, began_s: float, late_s: float) -> Trace:
    """One layer, gathered by both, for which one waits; worker 1's clock began a quarter of a second later."""
    events = [
        Event("gather", "gather", 0.75 - began_s, 1.0 - began_s, "A", nbytes=500, stalled_s=late_s, last=1),
        Event("h2d", "load", 1.0, 1.25, "A", nbytes=1_000, slot=0),
        Event("compute", "forward", 1.25, 1.5, "A", 0, visit=0, stay=0),
        Event("reduce", "exchange", 2.0 - began_s, 2.5 - began_s, "A", nbytes=500, last=0),
    ]
    memory = [MemorySample(0.0, "device", {"weights": 1_000})]
    worker = WorkerInfo(rank, 2, 100.0 + began_s, waited_s=0.0, last=0)
    return Trace.of(events, memory, step=3, device="emulated", names={"A": "layers.0"}, worker=worker)


def both() -> Traces:
    return Traces([of_worker(1, 0.25, 0.0), of_worker(0, 0.0, 0.5)])


def test_they_come_by_rank_and_on_one_axis() -> None:
    traces = both()
    assert [trace.worker.rank for trace in traces] == [0, 1] and traces.offsets_s == [0.0, 0.25]
    assert traces.span_s == 2.5 - 0.75 and repr(traces) == "<Traces of step 4 by 2 workers, 1.75 s>"


def test_a_process_per_worker(tmp_path: Path) -> None:
    both().to_chrome(tmp_path / "both.json")
    chrome = json.loads((tmp_path / "both.json").read_text())
    assert chrome["distributedInfo"] == {"rank": 0, "world_size": 2}
    rows = chrome["traceEvents"]
    named = {row["pid"]: row["args"]["name"] for row in rows if row["name"] == "process_name"}
    assert named == {pid: f"worker {pid - 1} of 2, relay step 4 on emulated" for pid in (1, 2)}
    assert {row["pid"]: row["args"]["sort_index"] for row in rows if row["name"] == "process_sort_index"} == {
        1: 0,
        2: 1,
    }
    slices = {(row["pid"], row["name"]): (row["ts"], row["dur"]) for row in rows if row["ph"] == "X"}
    for pid in (1, 2):  # what they do together is at one time
        assert slices[pid, "ncclKernel G layers.0"] == (0.75e6, 0.25e6)
        assert slices[pid, "ncclKernel X layers.0"] == (2e6, 0.5e6)
    assert slices[1, "wait for worker 1"] == (0.25e6, 0.5e6) and (2, "wait for worker 1") not in slices
    assert slices[2, "F layers.0 k=0"] == (1.5e6, 0.25e6)  # on its own clock at 1.25 s
    arrows = [row for row in rows if row["ph"] in "sf"]
    assert {row["id"]: row["pid"] for row in arrows}.keys() == {row["id"] for row in arrows if row["ph"] == "s"}
    assert len({row["id"] for row in arrows}) == 2  # one in each process


def test_waiting_for_the_step_to_begin_is_there_too(tmp_path: Path) -> None:
    late = of_worker(0, 0.0, 0.0)
    late.worker = WorkerInfo(0, 2, 100.0, waited_s=0.5, last=1)
    Traces([late, of_worker(1, 0.25, 0.0)]).to_chrome(tmp_path / "late.json")
    rows = [row for row in json.loads((tmp_path / "late.json").read_text())["traceEvents"] if row["ph"] == "X"]
    (wait,) = [row for row in rows if row["name"] == "wait for worker 1"]
    assert (wait["pid"], wait["ts"], wait["dur"]) == (1, 0.0, 0.5e6)
    assert {row["ts"] for row in rows if row["name"] == "ncclKernel G layers.0"} == {
        1.25e6
    }  # of both, half a second later


def test_a_file_per_worker_for_holistic_trace_analysis(tmp_path: Path) -> None:
    both().to_chrome(tmp_path, compress=False)
    for rank in (0, 1):
        data = (tmp_path / f"rank{rank}.json.gz").read_bytes()
        chrome = json.loads(data)
        assert re.search(rb'"rank":\s+(\d+)', data)[1] == str(rank).encode()  # as that program looks for it
        assert chrome["distributedInfo"] == {"rank": rank, "world_size": 2}
        assert {row["pid"] for row in chrome["traceEvents"]} == {rank + 1}


def same(a: Trace, b: Trace) -> bool:
    return (a.events_since(0), a.memory, a.worker, a.step, a.names) == (
        b.events_since(0),
        b.memory,
        b.worker,
        b.step,
        b.names,
    )


def test_files_and_messages_hold_all_there_is(tmp_path: Path) -> None:
    traces = both()
    traces.to_jsonl(tmp_path / "step")
    for again in (Traces.from_jsonl(tmp_path / "step"), Traces(pickle.loads(pickle.dumps(list(traces))))):
        assert all(map(same, traces, again)) and again.offsets_s == traces.offsets_s
    (tmp_path / "step" / "rank1.jsonl").unlink()
    with pytest.raises(ValueError, match=r"traces of the workers \[0\], of 2: give one of each"):
        Traces.from_jsonl(tmp_path / "step")


def test_traces_of_different_steps_are_refused() -> None:
    other = of_worker(1, 0.0, 0.0)
    other.step = 4
    with pytest.raises(ValueError, match=r"traces of steps \[3, 4\]"):
        Traces([of_worker(0, 0.0, 0.0), other])
