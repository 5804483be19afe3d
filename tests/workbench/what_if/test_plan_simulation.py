"""Steps by plans: which events an action has, and the figures beside those of the relay's own plan."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from sessions import make_batches, make_relay

from l2l_core import EmulatedDevice, RelayConfig, StepPlan
from l2l_core.trace import LANES, Event
from workbench.what_if import PlannedStep, PlanSimulator, actions_of, common_axis, draw_plans, plans_table, spans_of
from workbench.what_if.what_if_picture import LEFT, RIGHT

# The event of each kind of action that always has one; nothing is offloaded where a micro-batch is done
EVENTS = {"L": "load", "F": "forward", "X": "loss", "B": "backward", "P": "push", "U": "update", "S": "stash"}


def slow_link() -> EmulatedDevice:
    return EmulatedDevice(h2d_bytes_per_s=1e6, d2h_bytes_per_s=1e6)


def config_of(stash: Any, ahead: int = 1, micro_batches: int = 2) -> RelayConfig:
    return RelayConfig(seed=0, micro_batches=micro_batches, verify="never", stash=stash, ahead=ahead)


def check_events(plan: StepPlan, events: Sequence[Event]) -> None:
    """Every event is of its action's layer, micro-batch and kind; compute runs the actions in their order."""
    found = actions_of(plan, events)
    for index, event in zip(found, events, strict=True):
        assert index >= 0 or (event.kind, event.layer) == ("load", "shell"), event
        action = plan.actions[index]
        if index >= 0 and event.kind in EVENTS.values() and event.layer not in ("", "shell"):
            assert (action.layer, action.k) == (event.layer, event.k), (action, event)
    for index, action in enumerate(plan.actions):
        kind = None if action.kind == "S" and (action.is_backward or action.visit == 3) else EVENTS.get(action.kind)
        assert kind is None or kind in [e.kind for i, e in zip(found, events, strict=True) if i == index], action
    on_compute = sorted((e.start_s, i) for i, e in zip(found, events, strict=True) if e.lane == "compute")
    order = [index for _, index in on_compute]
    assert order == sorted(order)


@pytest.mark.parametrize("ahead", [0, 1])
@pytest.mark.parametrize("stash", ["device", "host"])
def test_each_event_belongs_to_its_action_in_simulations_and_steps(stash: str, ahead: int) -> None:
    batch = make_batches(1)[0]
    with make_relay(config_of(stash, ahead), slow_link()) as relay:
        plan = relay.plan(batch)
        simulated = PlanSimulator.of(relay, batch).run(plan)
        check_events(plan, simulated.trace.events)
        result = relay.step(batch, plan=plan)
        check_events(plan, result.trace.events)


@pytest.mark.parametrize("stash", ["device", "host"])
def test_another_plan_is_simulated_as_it_runs(stash: str) -> None:
    batch = make_batches(1)[0]
    with make_relay(config_of(stash, micro_batches=3), slow_link()) as relay:
        simulator, own = PlanSimulator.of(relay, batch), relay.plan(batch)
        serial = relay.plan(batch, replace(relay.config, ahead=0))
        before, after = simulator.run(own), simulator.run(serial)
        check_events(serial, after.trace.events)
        assert after.seconds > before.seconds, "every load is waited for"
        measured = PlannedStep.measured(relay.step(batch, plan=serial))
        table = plans_table(before, after, measured)
        rows = {name: cells for name, *cells in table.rows}
        assert rows["loads of layers"][:2] == [str(len(own.loads)), str(len(serial.loads))] == ["6", "7"]
        for name in ("loads of layers", "bytes to the host", "bytes to the device"):
            assert rows[name][3] == rows[name][1], "the step moves the simulated bytes"
        peak = rows["device at its peak"]
        assert peak[3] != peak[0], "one slot less, measured"
        if stash == "device":
            assert peak[1] == peak[3], "and simulated"
        else:  # the stash moves at other times
            assert peak[1:3] == ["–", ""] and "is not simulated" in table.note
        assert table.header[-1] == "this plan, step 1, measured" and "the same costs" in table.note
        loads = [e.layer for e in measured.trace.events if e.kind == "load" and e.layer != "shell"]
        assert loads == serial.loads


def test_a_plan_that_fetches_other_bytes_is_refused() -> None:
    """Of two micro-batches, without overlap: the test above has the three that the error asks for."""
    batch = make_batches(1)[0]
    with make_relay(config_of("host"), slow_link()) as relay:
        serial = relay.plan(batch, replace(relay.config, ahead=0))
        with pytest.raises(ValueError, match="With 3 or more micro-batches all fetch the same"):
            PlanSimulator.of(relay, batch).run(serial)


def test_the_spans_of_an_action_are_where_its_events_are_drawn() -> None:
    batch = make_batches(1)[0]
    with make_relay(config_of("device"), slow_link()) as relay:
        simulator, plan = PlanSimulator.of(relay, batch), relay.plan(batch)
        step = simulator.run(plan)
        axis_s = common_axis(step, step)
        spans = spans_of(step, axis_s)
        assert all(LEFT <= left < right <= RIGHT for _, left, right, *_ in spans)
        assert f'viewBox="0 0 {RIGHT + 12}' in draw_plans(step, step, axis_s), "the spans are in px of this picture"
        load = next(i for i, action in enumerate(plan.actions) if action.kind == "L")
        loads = [e for e in step.trace.events if e.kind == "load" and e.layer == plan.actions[load].layer]
        event = min(loads, key=lambda e: e.start_s)  # the plan's first
        ((_, left, right, top, bottom),) = (span for span in spans if span[0] == load)
        assert left == pytest.approx(LEFT + (RIGHT - LEFT) * event.start_s / axis_s, abs=0.06)
        assert right == pytest.approx(LEFT + (RIGHT - LEFT) * event.stop_s / axis_s, abs=0.06)
        tops = {
            lane: {span[3] for span, e in zip(spans, step.trace.events[1:], strict=True) if e.lane == lane}
            for lane in LANES
        }
        assert tops["h2d"] == {top} and sorted(map(max, tops.values())) == [max(tops[lane]) for lane in LANES]
        assert bottom - top == 12
        assert common_axis(step, step, axis_s) == axis_s and common_axis(step, step, 9 * axis_s) == axis_s
