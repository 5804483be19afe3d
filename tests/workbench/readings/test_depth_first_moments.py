"""Moments and phases of a step depth first: where gradients and graphs are while micro-batches follow one another."""

from __future__ import annotations

import pytest
from sessions import make_batches, make_relay

from l2l_core import EmulatedDevice, RelayConfig, Trace
from l2l_core.analysis import MIDDLE
from l2l_core.analysis.phases import split_phases
from workbench.readings import Columns, StateTimeline, StepState, find_phases, line_text

DEPTH = 4
CONFIG = RelayConfig(micro_batches=3, keep=DEPTH, resident=DEPTH - 2, schedule="depth_first")


@pytest.fixture(scope="module")
def trace() -> Trace:
    return recorded(CONFIG)


def recorded(config: RelayConfig) -> Trace:
    """The second step of four layers."""
    with make_relay(config, EmulatedDevice(h2d_bytes_per_s=1e6, d2h_bytes_per_s=1e6)) as relay:
        made = [relay.step(batch).trace for batch in make_batches(2)]
    return made[-1]


def test_gradients_of_all_layers_wait_for_the_last_micro_batch_and_leave_once(trace: Trace) -> None:
    moments = StateTimeline.of(trace)
    begun: set[str] = set()
    left: list[str] = []
    for i, event in enumerate(trace.events):
        moment = moments.at_event(i)
        if event.kind == "backward":
            begun.add(event.layer)
            assert moment.accumulating == event.layer
        if event.kind in ("forward", "backward"):
            assert (moment.layer, moment.k, moment.phase) == (event.layer, event.k, event.kind)
            there = {*moment.waiting_gradients, moment.accumulating} - {None}
            assert there == begun - {*left, *(travel.layer for travel in moment.pushing)}
        leaving = [travel.layer for travel in moment.pushing]
        assert len(leaving) == len({*leaving})
        assert not leaving or moment.k in (-1, CONFIG.micro_batches - 1), "before, all of them are still added to"
        left += [key for key in leaving if key not in left]
    assert left == list(reversed(moments.keys))
    end = moments.at_time(moments.end_s)
    assert len(end.updated) == DEPTH and not end.waiting_gradients and not end.pushing and end.accumulating is None


def test_nothing_is_stashed_and_every_micro_batch_has_a_graph_of_all_layers(trace: Trace) -> None:
    moments = StateTimeline.of(trace)
    seen = {(event.k, event.kind, event.layer): moments.at_event(i) for i, event in enumerate(trace.events)}
    assert not any(moment.num_stashed for moment in seen.values())
    for k in range(CONFIG.micro_batches):
        assert [seen[k, "forward", key].num_graphs for key in moments.keys] == [1, 2, 3, 4]
        assert seen[k, "loss", "shell"].num_graphs == DEPTH
        assert seen[k, "backward", moments.keys[0]].num_graphs == 1
    assert moments.at_time(moments.end_s).num_graphs == 0


def test_every_event_has_its_line(trace: Trace) -> None:
    moments, said = StateTimeline.of(trace), {}
    for i, event in enumerate(trace.events):
        moment = moments.at_event(i)
        if event.layer == "L001" and moment.line is not None and event.kind not in said:
            said[event.kind] = line_text(moment.line, moment.graph_kept, moment.schedule)
    assert said == {
        "load": "first k: load, ahead of time",
        "forward": "run layer, keep its graph",
        "backward": "back-propagate",
        "push": "last k: push gradient",
        "reduce": "EPS: reduce, update layer",
        "update": "EPS: reduce, update layer",
    }


def test_the_telling_moment_is_of_the_last_micro_batch(trace: Trace) -> None:
    moments = StateTimeline.of(trace)
    assert moments.at_event(moments.busiest_event()).k == CONFIG.micro_batches - 1


@pytest.mark.parametrize("follows", [True, False])
def test_a_step_under_way_is_read_from_its_first_event_on(trace: Trace, follows: bool) -> None:
    whole, (events, samples) = StateTimeline.of(trace), trace.counts
    seen: list[StepState] = []
    for count in range(events + 1):
        part = Columns.of(trace, count, samples)
        moments = StateTimeline(
            part,
            whole.keys,
            micro_batches=3,
            resident=DEPTH - 2,
            keep=DEPTH,
            schedule="depth_first",
            previous=whole if follows else None,
            live=True,
        )
        seen.append(moments.at_time(part.end_s))
    assert max(len(moment.waiting_gradients) for moment in seen) == DEPTH
    assert not any(moment.pushing for moment in seen if 0 <= moment.k < 2)


def test_copies_hide_in_the_first_forward_and_the_last_backward_alone(trace: Trace) -> None:
    phases = {name: (start_s, stop_s) for name, start_s, stop_s in find_phases(Columns.of(trace))}
    assert list(phases) == ["fill", "forward", MIDDLE, "backward", "tail"]
    assert find_phases(Columns.of(trace)) == list(split_phases(trace.lanes))
    between_s, until_s = phases[MIDDLE]
    assert not [e for e in trace.events if e.lane in ("h2d", "d2h") and between_s <= e.start_s < until_s]
    assert {e.k for e in trace.lanes["compute"] if e.kind == "backward" and e.start_s >= until_s} == {2}
    (middle,) = (bound for bound in trace.bound_by() if bound.phase == MIDDLE)
    assert middle.lane in ("compute", "idle")


@pytest.mark.parametrize(
    "config", [RelayConfig(micro_batches=3), RelayConfig(keep=4, resident=2, schedule="depth_first")]
)
def test_where_micro_batches_turn_once_there_is_no_middle(config: RelayConfig) -> None:
    trace = recorded(config)
    assert MIDDLE not in [name for name, *_ in find_phases(Columns.of(trace))]
    assert MIDDLE not in [bound.phase for bound in trace.bound_by()]
