"""A failed step in the memory chart, bytes kept for undo, and a common axis of several pictures."""

import re

import pytest

from l2l_core import Trace
from l2l_core.trace import Event, MemorySample, StepFailure
from workbench.pictures import common_span_s, draw_memory, memory_table, show_memory, show_relay, show_timeline
from workbench.pictures.memory_chart import DEVICE
from workbench.readings import Columns

BUDGET = 1000


def failed_step(asked_bytes: int = 300, t_s: float = 2.0) -> Trace:
    events = [Event("compute", "forward", float(i), i + 0.9, f"L{i:03d}", 0, 0, i, 0.0, i) for i in range(3)]
    held = {"weights": 400, "activations": 500}
    samples = [MemorySample(i + 0.9, "device", {"weights": 400, "activations": 100 * (i + 1)}) for i in range(2)]
    trace = Trace.of(events, samples, step=6, settings={"memory_bytes": BUDGET})
    missing = max(0, 900 + asked_bytes - BUDGET)
    trace.mark_failed(StepFailure(t_s, "DeviceOutOfMemory", asked_bytes, "activations for <L002>", 900, missing), held)
    return trace


def heights(svg: str) -> list[float]:
    """Return the positions of the axis marks and of the budget line, in px from the top."""
    return [float(y) for y in re.findall(r"M96 ([\d.]+)H944", svg)]


@pytest.mark.parametrize("asked_bytes", [101, 300, 10**9])
def test_the_cross_lies_beyond_the_budget_and_names_the_allocation(asked_bytes: int) -> None:
    svg = show_memory(failed_step(asked_bytes)).svg
    budget_y = float(re.findall(r'd="M96 ([\d.]+)H944" class="axis"', svg)[0])
    mark = re.search(r'<rect x="[\d.]+" y="([\d.]+)" width="5.00" height="([\d.]+)" fill="#D55E00"', svg)
    assert mark is not None
    top, bottom = float(mark[1]), float(mark[1]) + float(mark[2])
    assert DEVICE.top <= top < budget_y < bottom, "the budget line is crossed, within the picture"
    assert (
        "× failed at 2 s" in svg
        and f"allocating {'1 GB' if asked_bytes == 10**9 else f'{asked_bytes} B'} of activations" in svg
    )
    assert "&lt;L002&gt;" in svg and "<L002>" not in svg
    assert "too much" in svg and "Memory over a step that failed" in svg
    assert "○ peak" not in svg.partition("Host")[0], "no peak of an unfinished step"


def test_it_lies_over_the_step_before_and_ends_where_it_failed() -> None:
    before = Columns.of(
        Trace.of([Event("compute", "forward", 0.0, 8.0)], [MemorySample(0.0, "device", {"weights": 9})])
    )
    trace = failed_step()
    svg = draw_memory(Columns.of(trace), before=before, failed=trace.failed, span_s=8.0, budget_bytes=BUDGET)
    cursor = 96 + (944 - 96) * 2.0 / 8.0
    assert 'class="ghost"' in svg and f"M{cursor:.1f} {DEVICE.top:g}V" in svg


def test_tables_and_other_pictures_report_the_failure() -> None:
    trace = failed_step()
    table = memory_table(trace)
    assert "until the step failed" in table.title and ("failed allocation", "300 B", "") in table.rows
    assert "failed after 2 s" in table.note
    timeline = show_timeline(trace)
    assert "This step failed after 2 s" in timeline.svg and "which failed" in timeline.table.title
    assert "of a step that failed" in show_relay(trace).table.title


def test_a_step_that_failed_otherwise_has_no_mark() -> None:
    trace = failed_step()
    trace.failed = StepFailure(2.0, "ValueError")
    svg = show_memory(trace).svg
    assert "× failed at 2 s" in svg and "ValueError" in svg and "too much" not in svg


def test_what_the_host_keeps_is_named() -> None:
    def step(**host: int) -> Trace:
        samples = [MemorySample(0.5, "device", {"weights": 5, "other": 1}), MemorySample(0.5, "host", host)]
        return Trace.of([Event("compute", "forward", 0.0, 1.0, "L000", 0)], samples)

    kept = show_memory(step(weights=10, other=7000))
    assert "7 kB of it kept for undo and branches" in kept.svg and "other (host: undo, branches)" in kept.svg
    assert "kept for undo and branches" in kept.table.note
    plain = show_memory(step(weights=10))
    assert "undo" not in plain.svg + plain.table.note


def test_pictures_that_are_compared_have_one_axis() -> None:
    def step(seconds: float) -> Trace:
        sample = MemorySample(0.0, "device", {"weights": 5})
        return Trace.of([Event("compute", "forward", 0.0, seconds, "L000", 0)], [sample])

    long, short = step(0.375), step(0.206)
    span_s = common_span_s(long, short)
    assert span_s == pytest.approx(0.4)
    for show in (show_timeline, show_memory):
        marks = [re.findall(r">(\d+ ms)<", show(trace, span_s=span_s).svg) for trace in (long, short)]
        assert "400 ms" in marks[0] and "400 ms" in marks[1]
        assert "400 ms" not in show(short).svg
    with pytest.raises(ValueError, match="needs a trace"):
        common_span_s()
