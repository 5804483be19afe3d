"""Waits between workers as a picture and a table, for a made-up step of two workers."""

import re
import xml.etree.ElementTree as ElementTree
from typing import Any

from l2l_core import Event, Trace, Traces
from l2l_core.trace import WorkerInfo
from workbench.pictures import (
    MAX_STEPS,
    VERMILION,
    StepWaits,
    show_stragglers,
    show_timeline,
    show_waits,
    timeline_figure,
)


def traces(late_s: float, step: int = 4) -> Traces:
    """Return a step that worker 1 begins `late_s` late and then delays by as much again."""
    first = [
        Event("compute", "forward", 0.0, 0.25, "L0", 0, visit=0, stay=0),
        Event("gather", "gather", 0.25 + late_s, 0.5 + late_s, "L1", nbytes=10, stalled_s=late_s, last=1),
        Event("compute", "forward", 0.5 + late_s, 1.0 + late_s, "L1", 0, visit=1, stay=1),
    ]
    second = [first[0]._replace(stop_s=0.25 + late_s), first[1]._replace(stalled_s=0.0), first[2]]
    waited = (late_s, 0.0)
    return Traces(
        [
            Trace.of(events, [], step=step, worker=WorkerInfo(rank, 2, 10.0, waited[rank], 1))
            for rank, events in enumerate((first, second))
        ]
    )


def test_the_table_has_workers_places_and_durations() -> None:
    table = show_stragglers(traces(late_s=1.0)).table
    assert table.title == "Who waits for whom in step 5"
    assert list(table.rows) == [
        ("worker 0", "worker 1", "before the step", "1 s", "1 s", "33 %"),
        ("worker 0", "worker 1", "for weights", "1 s", "1 s", "33 %"),
    ]
    assert table.note == "Most is waited for worker 1: 2 s in which others could not compute."
    even = show_stragglers(traces(late_s=0.0)).table
    assert not even.rows and even.note == "No worker waits for another one."


def test_the_picture_has_a_row_per_worker_and_a_box_per_wait() -> None:
    svg = show_stragglers(traces(late_s=1.0)).svg
    ElementTree.fromstring(svg)  # well-formed
    assert re.findall(r">(worker \d)</text>", svg) == ["worker 0", "worker 1"]
    (waits,) = re.findall(rf'<path d="([^"]*)" fill="{VERMILION}"/>', svg)
    boxes = [(float(x), float(wide)) for x, wide in re.findall(r"M([\d.]+) \d+h([\d.]+)", waits)]
    assert len(boxes) == 2 and svg.count("→ 1") == 2
    assert abs(boxes[0][1] - boxes[1][1]) < 0.2  # a second each, on one axis
    assert boxes[0][0] + boxes[0][1] < boxes[1][0]  # one before the step, one in it
    assert VERMILION not in re.sub(r"<g.*?</g>|<rect[^>]*>", "", show_stragglers(traces(late_s=0.0)).svg)


def test_over_steps_there_is_a_bar_for_every_worker_and_step_in_which_it_waited() -> None:
    lates_s = [0.0, 0.5, 2.0]  # before each step and in it
    shown = show_waits([StepWaits.of(traces(late_s, step)) for step, late_s in enumerate(lates_s)])
    ElementTree.fromstring(shown.svg)
    assert shown.table.title == "Who waited for whom in steps 1 to 3"
    assert list(shown.table.rows) == [("worker 0", "worker 1", "2 of 3", "5 s", "4 s", "62 %")]  # 5 of 1 + 2 + 5 s
    assert shown.table.note == "Most is waited for worker 1: 5 s in which others could not compute."
    bars = re.findall(
        rf'<rect x="([\d.]+)" y="([\d.]+)" width="[\d.]+" height="([\d.]+)"[^>]*fill="{VERMILION}"', shown.svg
    )
    assert len(bars) == 2 and float(bars[1][2]) == 4 * float(bars[0][2])
    assert float(bars[0][0]) < float(bars[1][0])


def test_only_the_last_steps_are_shown() -> None:
    steps = [StepWaits.of(traces(1.0, step)) for step in range(MAX_STEPS + 5)]
    shown = show_waits(steps)
    assert shown.table.title == f"Who waited for whom in steps 6 to {MAX_STEPS + 5}"
    assert shown.svg.count(f'fill="{VERMILION}"') == MAX_STEPS and len(shown.svg) < 60_000


def test_a_timeline_has_the_lanes_of_the_network_with_what_was_waited_for() -> None:
    trace = traces(late_s=1.0)[0]
    svg = show_timeline(trace).svg
    ElementTree.fromstring(svg)
    lanes = re.findall(r">(compute|EPS|gather|reduce)</text>", svg)
    assert [name for name in lanes if name != "gather"] == ["compute", "EPS", "reduce"] and "gather" in lanes
    assert "gather, exposed" in svg and "reduce, exposed" in svg
    (wait,) = re.findall(rf'class="ghost" fill="{VERMILION}"', svg)
    alone = Trace.of([event for event in trace.events if event.lane == "compute"], [])
    assert "gather" not in show_timeline(alone).svg and wait not in show_timeline(alone).svg
    rows = {row[0]: row[1:3] for row in show_timeline(trace).table.rows}
    assert rows["gather"] == ("1", "10 B") and rows["reduce"] == ("0", "0 B")


def test_the_figure_to_explore_has_them_too() -> None:
    figure: Any = timeline_figure(traces(late_s=1.0)[0])
    assert {"gather", "reduce"} <= {*figure.layout.yaxis.categoryarray}
    assert {y for trace in figure.data for y in trace.y} == {"compute", "gather"}
