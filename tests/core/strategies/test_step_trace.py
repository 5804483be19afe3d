"""Trace of a step by a plan: metered bytes, layer names, the update, and the bottleneck."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from l2l_core.strategies import Full, Lab, Offload, Plain
from l2l_core.trace import Event, Trace


@pytest.mark.parametrize("micro_batches", [1, 3])
def test_a_trace_has_the_metered_bytes_the_layers_and_the_update(
    lab_of: Callable[..., Lab], micro_batches: int
) -> None:
    lab = lab_of("gpt2", micro_batches=micro_batches)
    for policy in (Plain(), Full(), Offload()):
        plan = lab.plan(policy)
        result = lab.step(plan)
        trace = result.trace
        assert trace is lab.trace and trace.failed is None and trace.settings["plan"] == plan.name
        assert trace.peak_bytes("device") == result.peak_device_bytes == plan.peak_device_bytes, plan.name
        assert trace.peak_bytes("host") == result.peak_host_bytes, plan.name
        assert tuple(trace.names) == lab.layers
        compute = trace.lanes["compute"]
        assert {event.layer for event in compute[:-1]} == {*lab.layers, "loss"}
        assert [event.kind for event in compute].index("update") == len(compute) - 1
        forwards = sum(event.kind == "forward" and event.layer != "loss" for event in compute)
        assert forwards == result.layer_forwards == micro_batches * plan.layer_forwards
        assert [bound.phase for bound in trace.bound_by()] == ["the step"]
        stages = len(lab.layers) + 1
        assert {event.visit for event in compute[:-1]} == {*range(2 * stages)}
        assert {*range(stages)} == {
            event.visit for event in compute if event.visit < stages and event.kind == "forward"
        }


def binding(*events: Event) -> str:
    (bound,) = Trace.of(events, [], settings={"plan": "by hand"}).bound_by()
    return str(bound)


def test_the_bottleneck_of_a_plan_has_no_remedies_of_a_relay() -> None:
    run = Event("compute", "forward", 0.0, 1.0, "a", 0)
    back, again = Event("compute", "backward", 1.0, 2.0, "b", 0), Event("compute", "forward", 2.0, 3.0, "a", 0)
    assert "recomputes nothing and hides its copies" in binding(run, back)
    assert "1 s of it recompute" in binding(run, back, again) and "update" not in binding(run, back, again)
    assert "2 s of it the update" in binding(run, back, Event("compute", "update", 2.0, 4.0))
    late = Event("compute", "backward", 4.0, 5.0, "a", 0)
    assert "h2d exposes 2 s of 5 s; a faster link, or a plan that recomputes" in binding(
        run, back, Event("h2d", "fetch", 1.5, 4.0, "a", 0, 8), late
    )
    assert "while no lane works; overhead" in binding(run, back, late)
    assert Trace(settings={"plan": "by hand"}).bound_by() == ()
