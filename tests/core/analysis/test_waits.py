"""Who waits for whom, and what binds a step of several workers: traces drawn by hand, with known answers."""

from typing import Any

import pytest

from l2l_core import Bound, Event, Trace, Traces
from l2l_core.analysis import Wait
from l2l_core.trace import WorkerInfo


def of_worker(
    rank: int = 0, gather_s: float = 0.5, late_s: float = 0.0, reduce_s: float = 0.5, **settings: Any
) -> Trace:
    """Four layers, each gathered and loaded one ahead, forward and back, 1 s of compute per visit; late: of the other at L2.

    ::

        gather   L0 | L1 .. | L2 ..                 | L0 ..
        compute     | F L0  | F L1 | F L2 loss B L2 | B L1 | B L0 |
        reduce                                      | X L2 | X L1 | X L0 end
    """
    made = {
        "micro_batches": 2,
        "ahead": 1,
        "stash": "device",
        "update": "eager",
        "precision": "fp32",
        "reduce": "sum",
    } | settings
    trace = Trace(settings=made, worker=WorkerInfo(rank, 2, 50.0, 0.25 * late_s, 1 - rank))
    now_s = free_s = reduced_s = 0.0
    order = ["L0", "L1", "L2", "L1", "L0"]
    came = {}
    for stay, layer in enumerate(order):
        for index in range(stay, min(stay + 2, len(order))):
            if index not in came:
                late = late_s if index == 2 else 0.0
                start_s = max(free_s, now_s) + late
                came[index] = free_s = start_s + gather_s
                trace.add(
                    Event("gather", "gather", start_s, free_s, order[index], nbytes=1000, stalled_s=late, last=1 - rank)
                )
        now_s = max(now_s, came[stay])
        for kind in ("forward",) if stay < 2 else ("forward", "loss", "backward") if stay == 2 else ("backward",):
            part_s = 1.0 if stay != 2 else {"forward": 0.5, "loss": 0.0, "backward": 0.5}[kind]
            trace.add(Event("compute", kind, now_s, now_s + part_s, layer, 0, visit=stay, stay=stay))
            now_s += part_s
        if stay >= 2:
            start_s = max(now_s, reduced_s)
            reduced_s = start_s + reduce_s
            trace.add(Event("reduce", "exchange", start_s, reduced_s, layer, nbytes=1000, last=rank))
    return trace


def bound(trace: Trace, phase: str) -> Bound:
    return next(each for each in trace.bound_by() if each.phase == phase)


def test_waits_are_told_by_worker_and_place_with_what_compute_could_not_hide() -> None:
    trace = of_worker(late_s=2.0)
    assert trace.waits() == (
        Wait(0, 1, "begin", 0.5, 0.5),
        Wait(0, 1, "gather", 2.0, 1.0),  # L1 computes for one second of it
    )
    assert of_worker(late_s=0.0).waits() == ()
    both = Traces([trace, of_worker(rank=1)])
    assert both.waits() == trace.waits()
    assert "gather   waited      2 s for worker 1, 1 s of it exposed" in trace.summary()


def test_a_step_that_waits_for_a_worker_says_for_which() -> None:
    found = bound(of_worker(late_s=2.0), "forward")
    assert found.lane == "others" and found.exposed_s == pytest.approx(1.0)
    assert "compute waits 1 s of 3.5 s for other workers; the wait for worker 1 is 2 s" in str(found)


def test_a_slow_network_asks_for_more_micro_batches_or_fewer_bytes() -> None:
    """A visit of two micro-batches takes 1 s, its gather 1.5 s: three of them would hide it."""
    found = bound(of_worker(gather_s=1.5), "forward")
    assert found.lane == "gather" and found.settings == {"micro_batches": 3}
    assert "3 micro-batches of this size instead of 2 would hide it (1.5 times the batch)" in found.advice
    assert "precision='bf16' would send half of it" in found.advice
    assert "bf16" not in bound(of_worker(gather_s=1.5, precision="bf16"), "forward").advice


def test_gradients_of_every_micro_batch_could_be_sent_as_a_sum() -> None:
    found = bound(of_worker(reduce_s=3.0, reduce="ordered"), "tail")
    assert found.lane == "reduce" and found.advice.startswith("Workers(reduce='sum') would send 1/2 of it")
    assert "left over from backward" in bound(of_worker(reduce_s=3.0), "tail").advice
    assert "Workers(wire='bf16') would send half of it" in bound(of_worker(reduce_s=3.0, wire="fp32"), "tail").advice
    assert "wire" not in bound(of_worker(reduce_s=3.0, wire="bf16"), "tail").advice


def test_a_step_alone_knows_no_network() -> None:
    trace = of_worker(gather_s=0.0, reduce_s=0.0)
    alone = Trace.of([e for e in trace.events if e.lane == "compute"], [], settings={"micro_batches": 2, "ahead": 1})
    assert {lane for each in alone.bound_by() for lane in each.busy_s} == {"compute", "h2d", "d2h", "eps"}
    assert alone.waits() == () and "gather" not in alone.summary()
