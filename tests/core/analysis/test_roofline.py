"""What binds a step and how short it could be: relays drawn by hand, with known answers."""

from __future__ import annotations

from collections import defaultdict
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from deep_models import Chain, chain_batch, squared_error
from hypothesis import given
from hypothesis import strategies as st

from l2l_core import EmulatedDevice, Event, Relay, RelayConfig, Trace
from l2l_core.analysis.bounds import Bound, micro_batches_to_hide
from l2l_core.analysis.roofline import ALL_PHASES, PHASES, roofline
from l2l_core.trace.events import LANES
from l2l_core.trace.formatting import format_seconds
from l2l_core.trace.trace_files import chrome_trace

FORWARD_S, BACKWARD_S = 1.0, 3.0  # per micro-batch


class Lanes:
    """A relay on paper: lanes that are serial, and events that say when they are done."""

    def __init__(self, trace: Trace) -> None:
        self.trace = trace
        self.free_s: dict[str, float] = defaultdict(float)

    def run(
        self,
        lane: str,
        kind: str,
        from_s: float,
        seconds: float,
        layer: str,
        k: int = -1,
        visit: int = -1,
        stay: int = -1,
    ) -> float:
        start_s = max(from_s, self.free_s[lane])
        stop_s = self.free_s[lane] = start_s + seconds
        if seconds:
            self.trace.add(Event(lane, kind, start_s, stop_s, layer, k, int(1000 * seconds), visit, 0.0, stay))
        return stop_s


def a_relay(
    layers: int = 4,
    micro_batches: int = 4,
    *,
    load_s: float = 0.0,
    push_s: float = 0.0,
    update_s: float = 0.0,
    stash_s: float = 0.0,
    ahead: int = 1,
    **settings: Any,
) -> Trace:
    """A step of equal layers as the engine runs it; seconds per load, push, update, and per stash of a micro-batch.

    ::

        h2d      shell L0 | L1 .. | L2 ..                         | L0 ..
        compute           | F L0  | F L1  | F L2 loss B L2 ...    | B L1  | B L0  |
        d2h                       | stash L0 ...                  | P L2  | P L1  | P L0  P shell
        eps                                                               | U L2  | U L1  | U L0   U shell
    """
    config = {"micro_batches": micro_batches, "ahead": ahead, "update": "eager", "stash": "device", **settings}
    trace = Trace(settings=config)
    lanes = Lanes(trace)
    order = [*range(layers), *reversed(range(layers - 1))]
    ready_s = {0: lanes.run("h2d", "load", lanes.run("h2d", "load", 0.0, 1.0, "shell"), load_s, "L0")}
    now_s, updated_s, pushed_s = ready_s[0], [0.0] * 3, [0.0] * 2
    late: list[str] = []
    for index, layer in enumerate(order):
        for i in range(index, min(index + ahead + 1, len(order))):
            if i not in ready_s:
                in_slot = i == layers and ahead  # the turn finds the layer before the last
                ready_s[i] = now_s if in_slot else lanes.run("h2d", "load", now_s, load_s, f"L{order[i]}")
        now_s = max(now_s, ready_s[index], lanes.free_s["d2h"] if stash_s else 0.0)
        visit = min(index, 2 * (layers - 1) - index)
        if index >= layers - 1:
            now_s = max(now_s, pushed_s[-2])  # one of two gradient slots must be free
        for k in range(micro_batches):
            if index < layers:
                now_s = lanes.run("compute", "forward", now_s, FORWARD_S, f"L{layer}", k, visit, index)
                lanes.run("d2h", "stash", now_s, stash_s, f"L{layer}", k)
            if index >= layers - 1:
                now_s = lanes.run("compute", "backward", now_s, BACKWARD_S, f"L{layer}", k, visit, index)
        if index >= layers - 1:
            now_s = max(now_s, updated_s[-3])  # three gradients under way at most
            pushed_s.append(lanes.run("d2h", "push", now_s, push_s, f"L{layer}"))
            if config["update"] == "deferred":
                late.append(f"L{layer}")
            else:
                updated_s.append(lanes.run("eps", "update", pushed_s[-1], update_s, f"L{layer}"))
        if not ahead:
            now_s = max(now_s, *lanes.free_s.values())
    done_s = lanes.run("d2h", "push", now_s, push_s, "shell")
    for key in [*late, "shell"]:
        done_s = lanes.run("eps", "update", done_s, update_s, key)
    return trace


def of(trace: Trace, phase: str) -> Bound:
    (bound,) = (b for b in trace.bound_by() if b.phase == phase)
    return bound


def assert_adds_up(trace: Trace) -> None:
    bounds = trace.bound_by()
    assert [b.phase for b in bounds] == [p for p in ALL_PHASES if p in {b.phase for b in bounds}]
    assert sum(b.span_s for b in bounds) == pytest.approx(trace.span_s)
    for lane in LANES:
        assert sum(b.busy_s[lane] for b in bounds) == pytest.approx(trace.busy_s(lane), abs=1e-9)
    for b in bounds:
        assert b.lane in (*LANES, "idle") and str(b).startswith(f"{b.phase}: ")
        assert -1e-9 <= b.exposed_s <= b.idle_s + 1e-9 <= b.span_s + 2e-9
        assert max(b.busy_s.values()) <= b.floor_s + 1e-9 and b.floor_s <= b.span_s + 1e-9


def depth_first(layers: int, micro_batches: int, load_s: float = 0.0, push_s: float = 0.0) -> Trace:
    """A step of equal layers that all stay: loads beside the first forward, pushes beside the last backward."""
    trace = Trace(settings={"micro_batches": micro_batches, "ahead": 1, "stash": "device", "schedule": "depth_first"})
    lanes = Lanes(trace)
    ready_s = [lanes.run("h2d", "load", 0.0, load_s, f"L{i}") for i in range(layers)]
    now_s, stay = 0.0, -1
    for k in range(micro_batches):
        for i in range(layers):
            stay += 1
            now_s = lanes.run("compute", "forward", max(now_s, ready_s[i]), FORWARD_S, f"L{i}", k, i, stay)
        for i in reversed(range(layers)):
            stay += i < layers - 1
            now_s = lanes.run("compute", "backward", now_s, BACKWARD_S, f"L{i}", k, 2 * layers - 1 - i, stay)
            if k == micro_batches - 1:
                lanes.run("d2h", "push", now_s, push_s, f"L{i}")
    return trace


def test_depth_first_the_middle_hides_no_copies() -> None:
    trace = depth_first(4, 3, load_s=3 * FORWARD_S, push_s=2 * BACKWARD_S)
    assert_adds_up(trace)
    assert [b.phase for b in trace.bound_by()] == list(ALL_PHASES)
    assert of(trace, "middle").busy_s["h2d"] == of(trace, "middle").busy_s["d2h"] == 0.0
    assert of(trace, "middle").span_s == pytest.approx(2 * 4 * BACKWARD_S + 2 * 3 * FORWARD_S + (2 * FORWARD_S))
    assert of(trace, "middle").lane == "compute"
    line = roofline(trace)
    assert line.middle_s == pytest.approx(of(trace, "middle").span_s)
    assert line.step_s <= min(line.by_visit_s, trace.span_s * (1 + 1e-9))


def test_depth_first_more_rows_are_advised_and_not_more_micro_batches() -> None:
    bound = of(depth_first(4, 4, load_s=3 * FORWARD_S), "forward")
    assert bound.lane == "h2d" and "micro-batches of 3 times the rows would hide it" in str(bound)
    assert not bound.settings, "further ones would find the layers loaded"


# ---- forward and backward --------------------------------------------------------------------------------------


def test_bound_by_compute() -> None:
    trace = a_relay(load_s=3.5, push_s=2, update_s=2)
    assert_adds_up(trace)
    assert [b.phase for b in trace.bound_by()] == list(PHASES)
    forward = of(trace, "forward")
    assert (forward.lane, forward.span_s, forward.exposed_s, forward.settings) == ("compute", 12, 0, {})
    assert str(forward) == "forward: bound by compute, which works 12 s of 12 s; nothing to gain from the link"
    assert of(trace, "backward").lane == "compute"


def test_forward_bound_by_loads_names_the_number_that_hides_them() -> None:
    trace = a_relay(load_s=6)
    assert_adds_up(trace)
    forward = of(trace, "forward")
    assert (forward.lane, forward.span_s, forward.exposed_s, forward.idle_s, forward.floor_s) == ("h2d", 18, 6, 6, 18)
    assert forward.busy_s == {"compute": 12, "h2d": 18, "d2h": 0, "eps": 0}
    assert str(forward) == (
        "forward: h2d exposes 6 s of 18 s; 6 micro-batches of this size instead of 4 would hide it (1.5 times the batch)"
    )
    assert forward.settings == {"micro_batches": 6}
    assert of(a_relay(load_s=6, micro_batches=6), "forward").lane == "compute"
    assert of(a_relay(load_s=6, micro_batches=5), "forward").settings == {"micro_batches": 6}


@pytest.mark.parametrize(
    ("lane", "costs", "needed"), [("h2d", {"load_s": 14}, 5), ("d2h", {"push_s": 14}, 5), ("eps", {"update_s": 20}, 7)]
)
def test_backward_bound_by_each_lane(lane: str, costs: dict[str, float], needed: int) -> None:
    trace = a_relay(layers=8, **costs)
    assert_adds_up(trace)
    backward = of(trace, "backward")
    assert (backward.lane, backward.settings) == (lane, {"micro_batches": needed})
    assert f"backward: {lane} exposes " in str(backward)
    enough, too_few = (a_relay(layers=8, micro_batches=n, **costs) for n in (needed, needed - 1))
    assert of(enough, "backward").lane == "compute"
    assert too_few.exposed_s(lane) > enough.exposed_s(lane)  # in backward, or left over from it in the tail


@given(st.integers(1, 9), *[st.floats(0.01, 100)] * 2, st.floats(0, 100))
def test_the_number_hides_the_work_and_one_less_does_not(
    micro_batches: int, compute_s: float, fixed_s: float, growing_s: float
) -> None:
    needed = micro_batches_to_hide(compute_s, fixed_s, growing_s, micro_batches)
    gain_s = (compute_s - growing_s) / micro_batches
    if needed is None:
        assert gain_s <= 0
        return
    assert needed * gain_s >= fixed_s * (1 - 1e-8)
    assert needed == 1 or (needed - 1) * gain_s < fixed_s


def test_whole_numbers_are_not_rounded_up() -> None:
    assert micro_batches_to_hide(0.3, 0.1 * 6, 0.0, 3) == 6  # 0.6 / 0.1 is 6.000000000000001
    assert micro_batches_to_hide(1.0, 0.0, 0.5, 3) == 1


def test_loads_and_the_stash_on_one_lane() -> None:
    """Two layers: each fetch takes half of its micro-batch's compute, so a load of 3 s needs 6 micro-batches of 1 s."""
    trace = Trace(settings={"micro_batches": 2, "ahead": 1, "stash": "host"})
    for k in range(2):
        trace.add(Event("compute", "forward", k, k + 1, "L0", k, stay=0))
        trace.add(Event("h2d", "fetch", k, k + 0.5, "L0", k, 1))
    trace.add(Event("h2d", "load", 1.5, 4.5, "L1", nbytes=3))
    trace.add(Event("compute", "forward", 4.5, 5.5, "L1", 0, stay=1))
    trace.add(Event("compute", "loss", 5.5, 6, "shell", 0, stay=1))
    assert (of(trace, "forward").lane, of(trace, "forward").settings) == ("h2d", {"micro_batches": 6})


def test_a_stash_slower_than_compute_needs_another_place_or_a_faster_link() -> None:
    trace = a_relay(stash_s=1.5, stash="host")
    assert_adds_up(trace)
    forward = of(trace, "forward")
    assert (forward.lane, forward.settings) == ("d2h", {"stash": "device"})
    assert "stash='device', or a link of 1.5 kB/s instead of 1 kB/s, would hide it" in forward.advice
    trace.settings["stash"] = "device"  # then it is no stash that grows
    assert of(trace, "forward").settings == {} and "only a link of 1.5 kB/s" in of(trace, "forward").advice
    trace.settings |= {"latency_s": 2.0}
    assert "only a link with less latency than 2 s would" in of(trace, "forward").advice


def test_without_the_stash_the_loads_may_still_need_more_micro_batches() -> None:
    trace = Trace(settings={"micro_batches": 1, "stash": "host"})
    trace.add(Event("compute", "forward", 0, 1, "L0", 0, stay=0))
    trace.add(Event("h2d", "fetch", 0, 2, "L0", 0, nbytes=200))
    trace.add(Event("h2d", "load", 2, 5, "L1", nbytes=300))
    trace.add(Event("compute", "forward", 5, 6, "L1", 0, stay=1))
    trace.add(Event("compute", "backward", 6, 7, "L1", 0, stay=1))
    assert of(trace, "forward").settings == {"stash": "device", "micro_batches": 3}
    assert "stash='device' with 3 micro-batches of this size instead of 1, or a link of 500 B/s instead of 100 B/s" in (
        of(trace, "forward").advice
    )


def test_work_that_fits_but_is_waited_for() -> None:
    trace = Trace(settings={"micro_batches": 2, "ahead": 1, "stash": "host"})
    for stay, (start, layer) in enumerate([(0, "L0"), (6, "L1"), (12, "L2")]):
        trace.add(Event("compute", "forward", start, start + 4, layer, 0, stay=stay))
        trace.add(Event("h2d", "fetch", start + 4, start + 6, layer, 0))
    trace.add(Event("compute", "backward", 18, 19, "L2", 0, stay=2))
    assert of(trace, "forward").settings == {"stash": "device"}
    assert of(trace, "forward").advice.endswith("compute waits for the stash: stash='device' would save up to 4 s")

    uneven = Trace(settings={"micro_batches": 1, "ahead": 1, "stash": "device"})
    for stay, (start, stop, layer) in enumerate([(0, 1, "L0"), (4, 10, "L1"), (10, 11, "L2")]):
        uneven.add(Event("compute", "forward", start, stop, layer, 0, stay=stay))
    uneven.add(Event("h2d", "load", 0, 4, "L1"))
    uneven.add(Event("h2d", "load", 4, 5, "L2"))
    uneven.add(Event("compute", "backward", 11, 12, "L2", 0, stay=2))
    assert of(uneven, "forward").settings == {"ahead": 2}
    assert of(uneven, "forward").advice.startswith("its 5 s would fit under 7 s of compute")


def test_very_many_micro_batches_are_not_the_only_advice() -> None:
    forward = of(a_relay(load_s=400), "forward")
    assert forward.settings == {"micro_batches": 400}
    assert forward.advice == (
        "400 micro-batches of this size instead of 4, or a link of 100 kB/s instead of 1 kB/s, would hide it "
        "(100 times the batch)"
    )


# ---- settings that stand in the way ----------------------------------------------------------------------------


def test_nothing_ahead() -> None:
    serial, relayed = (a_relay(load_s=3, push_s=2, update_s=1, ahead=n) for n in (0, 1))
    assert_adds_up(serial)
    for phase in ("forward", "backward"):
        bound = of(serial, phase)
        assert bound.settings == {"ahead": 1}
        saved_s = bound.span_s - bound.floor_s
        assert bound.advice == f"ahead=1 would save up to {format_seconds(saved_s)}"
        assert bound.span_s - of(relayed, phase).span_s <= saved_s
    assert of(serial, "forward").span_s - of(relayed, "forward").span_s == of(serial, "forward").exposed_s


@pytest.mark.parametrize("latency_s", [0.0, 1e-3])
def test_nothing_ahead_on_the_cores_of_compute(latency_s: float) -> None:
    """A device that states no limits copies where it computes: doing both at once is no advice."""
    serial = a_relay(load_s=3, push_s=2, update_s=1, ahead=0)
    serial.settings |= {"h2d_bytes_per_s": None, "d2h_bytes_per_s": None, "latency_s": latency_s}
    bound = of(serial, "forward")
    assert (bound.settings == {"ahead": 1}) == (latency_s > 0)
    assert ("the cores of compute" in bound.advice) == (latency_s == 0)
    serial.settings["shelf"] = True  # files are no matter of cores
    assert of(serial, "forward").settings == {"ahead": 1}


def test_deferred_updates_would_hide_under_backward() -> None:
    deferred, eager = (a_relay(push_s=1, update_s=2, update=update) for update in ("deferred", "eager"))
    tail = of(deferred, "tail")
    assert (tail.lane, tail.settings) == ("eps", {"update": "eager"})
    assert tail.advice == "update='eager' would hide 6 s of it under backward"
    assert tail.span_s - of(eager, "tail").span_s == pytest.approx(6, abs=1.01)  # all but L0's and the shell's
    deferred.settings["max_grad_norm"] = 1.0
    assert of(deferred, "tail").settings == {}
    assert "without it, update='eager' would hide 6 s" in of(deferred, "tail").advice


# ---- whatever a trace may be -----------------------------------------------------------------------------------


def test_no_events() -> None:
    assert Trace().bound_by() == ()
    trace = Trace()
    trace.add(Event("compute", "forward", 1.0, 1.0, "L0", 0))  # no length
    assert trace.bound_by() == ()
    with pytest.raises(ValueError, match="not a whole training step"):
        roofline(Trace())


def test_a_forward_pass_has_no_tail() -> None:
    trace = Trace()
    for event in a_relay(load_s=6).events:
        if event.kind in ("load", "forward") and event.stop_s <= 25:
            trace.add(event)
    assert [b.phase for b in trace.bound_by()] == ["fill", "forward"]
    assert of(trace, "forward").settings == {"micro_batches": 6}  # read off the events
    assert_adds_up(trace)


@pytest.mark.parametrize(
    "costs", [{}, {"load_s": 6.0}, {"push_s": 20.0}, {"update_s": 20.0}, {"stash_s": 2.0}], ids=str
)
@pytest.mark.parametrize("ahead", [0, 1])
def test_a_step_under_way_at_any_moment(costs: dict[str, float], ahead: int) -> None:
    whole = a_relay(layers=3, micro_batches=2, ahead=ahead, **costs)
    part = Trace(settings=whole.settings)
    for event in sorted(whole.events, key=lambda e: e.stop_s):
        part.add(event)
        assert_adds_up(part)


times = st.floats(0, 1e3)
anything = st.builds(
    lambda lane, kind, a, b, layer, k, visit, stay: Event(
        lane, kind, min(a, b), max(a, b), layer, k, 5, visit, stay=stay
    ),
    st.sampled_from(LANES),
    st.sampled_from(["shell", "forward", "backward", "loss", "load", "push", "stash", "fetch", "update", "other"]),
    times,
    times,
    st.sampled_from(["", "shell", "L0", "L1"]),
    st.integers(-1, 3),
    st.integers(-1, 3),
    st.integers(-1, 3),
)
some_settings = st.fixed_dictionaries(
    {},
    optional={
        "micro_batches": st.integers(1, 4),
        "schedule": st.sampled_from(["breadth_first", "depth_first"]),
        "ahead": st.integers(0, 2),
        "stash": st.sampled_from(["device", "host"]),
        "update": st.sampled_from(["eager", "deferred"]),
        "max_grad_norm": st.none() | st.just(1.0),
        "h2d_bytes_per_s": st.none() | st.just(1e3),
        "latency_s": st.just(1e-3),
    },
)


@given(st.lists(anything, max_size=12), some_settings)
def test_any_events_give_a_sentence(events: list[Event], settings: dict[str, Any]) -> None:
    trace = Trace(settings=settings)
    for event in events:
        trace.add(event)
    bounds = trace.bound_by()
    assert sum(b.span_s for b in bounds) == pytest.approx(trace.span_s)
    assert all(str(b) for b in bounds)
    if {b.phase for b in bounds} >= {"backward"}:
        line = roofline(trace)
        assert 0 <= line.step_s <= line.by_visit_s * (1 + 1e-9) and line.step_s <= line.serial_s * (1 + 1e-9)


def test_idle_time_that_no_lane_explains() -> None:
    trace = Trace(settings={"micro_batches": 1, "ahead": 1})
    trace.add(Event("compute", "forward", 0.0, 0.8, "L0", 0, stay=0))
    trace.add(Event("compute", "forward", 1.0, 1.8, "L1", 0, stay=1))
    (forward,) = trace.bound_by()
    assert (forward.lane, forward.settings) == ("idle", {})
    assert str(forward) == (
        "forward: compute waits 200 ms of 1.8 s while no lane works; overhead between operations, not the link; larger "
        "micro-batches make it count for less"
    )


def test_a_shared_layer_is_visited_again_and_again() -> None:
    trace = Trace()
    for visit in range(3):
        for k in range(2):
            trace.add(Event("compute", "forward", t := 2 * visit + k, t + 1, "L0", k, visit=visit, stay=visit))
    trace.add(Event("compute", "backward", 6, 7, "L0", 0, visit=2, stay=2))
    trace.add(Event("compute", "backward", 7, 8, "L0", 0, visit=1, stay=3))
    assert [(b.phase, b.span_s) for b in trace.bound_by()] == [("forward", 4), ("backward", 4)]


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0 µs"), (3.21e-5, "32.1 µs"), (0.42, "420 ms"), (0.99951, "1 s"), (1.9, "1.9 s"), (1234.5, "1234 s")],
)
def test_seconds_for_people(seconds: float, text: str) -> None:
    assert format_seconds(seconds) == text


# ---- the roofline ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("costs", "forward_s", "backward_s", "fill_s", "tail_s"),
    [
        ({}, 12, 16 + 36, 1, 0),
        ({"load_s": 3, "push_s": 2, "update_s": 1}, 12, 52, 4, 2 + 2 + 1),
        ({"load_s": 6}, 18, 52, 7, 0),
        ({"push_s": 5, "update_s": 9}, 12, 52, 1, 5 + 9 + 9),
        ({"push_s": 20}, 12, 60, 1, 40),
        ({"update_s": 20}, 12, 60, 1, 40),
        ({"stash_s": 2}, 24, 52, 1, 0),
    ],
    ids=str,
)
def test_roofline_of_a_relay(
    costs: dict[str, float], forward_s: float, backward_s: float, fill_s: float, tail_s: float
) -> None:
    line = roofline(a_relay(**costs))
    assert (line.forward_s, line.backward_s, line.fill_s, line.tail_s) == (forward_s, backward_s, fill_s, tail_s)
    assert line.step_s == forward_s + backward_s + fill_s + tail_s <= line.by_visit_s


def test_hidden_copies_reach_the_roofline_and_serial_ones_the_sum() -> None:
    costs = {"load_s": 3, "push_s": 2, "update_s": 1}
    relayed = a_relay(**costs)
    assert relayed.span_s == roofline(relayed).step_s == roofline(relayed).by_visit_s
    serial = a_relay(**costs, ahead=0)
    # the last push and update have nothing to wait for in `a_relay`; the shell's push then overlaps nothing either
    assert serial.span_s == roofline(serial).serial_s


def test_roofline_on_another_link_goes_by_bytes() -> None:
    trace = a_relay(load_s=6)  # 1000 bytes/s
    assert roofline(trace, {"h2d_bytes_per_s": 2000.0}).forward_s == 12
    assert roofline(trace, {"h2d_bytes_per_s": 500.0}).forward_s == 36
    assert roofline(trace, {"h2d_bytes_per_s": 500.0, "latency_s": 1.0}).forward_s == 39
    assert roofline(trace, {"latency_s": 1.0}).forward_s == 18  # what they took, latency and all
    pieces = Trace(settings=trace.settings)
    for event in trace.events:
        if event.kind == "load":  # in two pieces
            half_s = (event.start_s + event.stop_s) / 2
            pieces.add(Event("h2d", "load", event.start_s, half_s, event.layer, nbytes=event.nbytes // 2))
            pieces.add(Event("h2d", "load", half_s, event.stop_s, event.layer, nbytes=event.nbytes // 2))
        else:
            pieces.add(event)
    assert roofline(pieces, {"h2d_bytes_per_s": 500.0}) == roofline(trace, {"h2d_bytes_per_s": 500.0})


def test_deferred_updates_are_all_in_the_tail() -> None:
    eager, deferred = (roofline(a_relay(push_s=1, update_s=2, update=update)) for update in ("eager", "deferred"))
    assert (eager.busy_s["backward"]["eps"], eager.tail_s) == (6, 1 + 2 + 2)
    assert (deferred.busy_s["backward"]["eps"], deferred.tail_s) == (0, 2 + 5 * 2)


# ---- settings in files, and a real step ------------------------------------------------------------------------


def test_settings_travel_with_the_trace(tmp_path: Path) -> None:
    trace, path = a_relay(load_s=6), tmp_path / "t.jsonl"
    trace.to_jsonl(path)
    again = Trace.from_jsonl(path)
    assert again.settings == trace.settings and again.bound_by() == trace.bound_by()
    assert chrome_trace(trace)["otherData"] == {"settings": trace.settings}
    bare = Trace.of(trace.events, trace.memory)
    assert of(bare, "forward").settings == {"micro_batches": 6}


@pytest.mark.parametrize(("lane", "phase"), [("h2d", "forward"), ("d2h", "backward")])
def test_a_real_step_names_the_slow_direction(lane: str, phase: str, tmp_path: Path) -> None:
    device = EmulatedDevice(**{f"{lane}_bytes_per_s": 1e6})  # 18 ms for a layer that computes for less than 1 ms
    config = RelayConfig(micro_batches=2)
    optimizer = partial(torch.optim.AdamW, lr=1e-3, fused=True)
    with Relay(Chain(4), optimizer, device, loss=squared_error, config=config) as relay:
        relay.step(chain_batch(2))
        trace = relay.step(chain_batch(2)).trace
        relay.forward(chain_batch(2))
    assert_adds_up(trace)
    bound = of(trace, phase)
    assert bound.lane == lane and bound.settings["micro_batches"] > 2
    assert f"{phase}: {lane} exposes " in str(bound)
    assert trace.settings[f"{lane}_bytes_per_s"] == 1e6 and trace.settings["micro_batches"] == 2
    assert trace.settings["latency_s"] == 0.0 and trace.settings["stash"] == "device"
    line = roofline(trace)
    assert line.step_s <= 1.05 * trace.span_s
    trace.to_jsonl(tmp_path / "t.jsonl")
    assert Trace.from_jsonl(tmp_path / "t.jsonl").bound_by() == trace.bound_by()
