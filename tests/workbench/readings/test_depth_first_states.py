"""States and phases of a depth-first step: gradients and graphs while micro-batches run one after another."""

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
    """Return the trace of the second step of four layers."""
    with make_relay(config, EmulatedDevice(h2d_bytes_per_s=1e6, d2h_bytes_per_s=1e6)) as relay:
        traces = [relay.step(batch).trace for batch in make_batches(2)]
    return traces[-1]


def test_gradients_of_all_layers_wait_for_the_last_micro_batch_and_are_pushed_once(trace: Trace) -> None:
    timeline = StateTimeline.of(trace)
    begun: set[str] = set()
    pushed: list[str] = []
    for i, event in enumerate(trace.events):
        state = timeline.at_event(i)
        if event.kind == "backward":
            begun.add(event.layer)
            assert state.accumulating == event.layer
        if event.kind in ("forward", "backward"):
            assert (state.layer, state.k, state.phase) == (event.layer, event.k, event.kind)
            on_device = {*state.waiting_gradients, state.accumulating} - {None}
            assert on_device == begun - {*pushed, *(push.layer for push in state.pushing)}
        pushing = [push.layer for push in state.pushing]
        assert len(pushing) == len({*pushing})
        assert not pushing or state.k in (-1, CONFIG.micro_batches - 1), (
            "before, micro-batches still add to all of them"
        )
        pushed += [key for key in pushing if key not in pushed]
    assert pushed == list(reversed(timeline.keys))
    end = timeline.at_time(timeline.end_s)
    assert len(end.updated) == DEPTH and not end.waiting_gradients and not end.pushing and end.accumulating is None


def test_nothing_is_stashed_and_every_micro_batch_has_a_graph_of_all_layers(trace: Trace) -> None:
    timeline = StateTimeline.of(trace)
    seen = {(event.k, event.kind, event.layer): timeline.at_event(i) for i, event in enumerate(trace.events)}
    assert not any(state.num_stashed for state in seen.values())
    for k in range(CONFIG.micro_batches):
        assert [seen[k, "forward", key].num_graphs for key in timeline.keys] == [1, 2, 3, 4]
        assert seen[k, "loss", "shell"].num_graphs == DEPTH
        assert seen[k, "backward", timeline.keys[0]].num_graphs == 1
    assert timeline.at_time(timeline.end_s).num_graphs == 0


def test_every_event_has_its_line(trace: Trace) -> None:
    timeline, lines = StateTimeline.of(trace), {}
    for i, event in enumerate(trace.events):
        state = timeline.at_event(i)
        if event.layer == "L001" and state.line is not None and event.kind not in lines:
            lines[event.kind] = line_text(state.line, state.graph_kept, state.schedule)
    assert lines == {
        "load": "first k: load, ahead of time",
        "forward": "run layer, keep its graph",
        "backward": "back-propagate",
        "push": "last k: push gradient",
        "reduce": "EPS: reduce, update layer",
        "update": "EPS: reduce, update layer",
    }


def test_the_busiest_event_belongs_to_the_last_micro_batch(trace: Trace) -> None:
    timeline = StateTimeline.of(trace)
    assert timeline.at_event(timeline.busiest_event()).k == CONFIG.micro_batches - 1


@pytest.mark.parametrize("follows", [True, False])
def test_a_running_step_is_read_from_its_first_event_on(trace: Trace, follows: bool) -> None:
    whole, (events, samples) = StateTimeline.of(trace), trace.counts
    seen: list[StepState] = []
    for count in range(events + 1):
        part = Columns.of(trace, count, samples)
        timeline = StateTimeline(
            part,
            whole.keys,
            micro_batches=3,
            resident=DEPTH - 2,
            keep=DEPTH,
            schedule="depth_first",
            previous=whole if follows else None,
            live=True,
        )
        seen.append(timeline.at_time(part.end_s))
    assert max(len(state.waiting_gradients) for state in seen) == DEPTH
    assert not any(state.pushing for state in seen if 0 <= state.k < 2)


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
