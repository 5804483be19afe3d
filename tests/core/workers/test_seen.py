"""What is seen of a step by several workers: what they exchanged, and who waited for whom."""

from typing import Any

import pytest
from crew import Crew
from crew_cases import LATE_S, SLOW_S, traced

from l2l_core import Trace, Traces


@pytest.fixture(scope="module")
def seen(two: Crew) -> list[dict[str, Any]]:
    """Worker 1 is late at the step, and slow in a layer's forward."""
    return two.run(traced)


def waited_s(trace: Trace, last: int) -> float:
    return sum(e.stalled_s for e in trace.events if e.last == last)


def test_all_workers_get_the_traces_of_all(seen: list[dict[str, Any]]) -> None:
    here, there = (each["traces"] for each in seen)
    assert isinstance(here, Traces) and [trace.events for trace in here] == [trace.events for trace in there]
    assert [trace.worker.rank for trace in here] == [0, 1]


def test_what_they_do_together_begins_at_one_time(seen: list[dict[str, Any]]) -> None:
    """By the clock of all, the collectives of a lane begin in pairs, when the last worker has come."""
    traces = seen[0]["traces"]
    for lane in ("gather", "reduce"):
        pairs = list(zip(*(trace.lanes[lane] for trace in traces), strict=True))
        assert [a.layer for a, b in pairs] == [b.layer for a, b in pairs]
        for pair in pairs:
            starts = [begins_s + event.start_s for begins_s, event in zip(traces.offsets_s, pair, strict=True)]
            assert starts[0] == pytest.approx(starts[1], abs=1e-6)
            assert min(event.stalled_s for event in pair) == 0.0 and pair[0].last == pair[1].last
            assert pair[pair[0].last].stalled_s == 0.0  # the last one waits for nobody


def test_a_late_and_slow_worker_is_the_one_that_is_waited_for(seen: list[dict[str, Any]]) -> None:
    first, second = seen[0]["traces"]
    assert first.worker.last == 1 and first.worker.waited_s > 0.9 * LATE_S
    assert second.worker.last == 1 and second.worker.waited_s == 0.0
    assert waited_s(first, last=1) > 0.9 * SLOW_S


def test_waiting_is_no_work_of_the_network(seen: list[dict[str, Any]]) -> None:
    for events in (trace.lanes[lane] for trace in seen[0]["traces"] for lane in ("gather", "reduce")):
        for before, after in zip(events, events[1:], strict=False):
            assert before.stop_s <= after.start_s - after.stalled_s + 1e-6


def test_bytes_are_those_that_come_from_the_other_worker(seen: list[dict[str, Any]]) -> None:
    """Of two, half of every layer: its weights there and back but for the slot that stays, its gradient once."""
    numel = seen[0]["numel"]  # by layer
    for trace in seen[0]["traces"]:
        for lane in ("gather", "reduce"):
            moved = [event for event in trace.lanes[lane] if event.layer in numel]
            assert {event.layer for event in moved} == {*numel}
            for event in moved:
                assert event.nbytes == pytest.approx(4 * numel[event.layer] / 2, abs=4 * 64)


def test_the_eps_does_not_count_as_working_while_it_waits(seen: list[dict[str, Any]]) -> None:
    for trace in seen[0]["traces"]:
        busy = [(e.start_s, e.stop_s) for e in trace.lanes["eps"]]
        for event in trace.lanes["reduce"]:
            came_s = event.start_s - event.stalled_s
            assert not any(start < event.stop_s - 1e-9 and came_s + 1e-9 < stop for start, stop in busy), event


def test_a_step_of_one_worker_has_no_network(seen: list[dict[str, Any]]) -> None:
    alone = seen[0]["alone"]
    assert list(alone.lanes) == ["compute", "h2d", "d2h", "eps"] and alone.worker.count == 1
