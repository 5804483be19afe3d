"""Moments and phases of a step depth first: where gradients and graphs are while micro-batches follow one another."""

from __future__ import annotations

import pytest
from sessions import make_batches, make_relay

from l2l_core import EmulatedDevice, RelayConfig, Trace
from l2l_core.analysis import MIDDLE
from l2l_core.analysis.phases import cuts_of
from workbench.readings import Columns, Moment, Moments, line_words, phases_of

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
    moments = Moments.of(trace)
    begun: set[str] = set()
    left: list[str] = []
    for i, event in enumerate(trace.events):
        moment = moments.at(i)
        if event.kind == "backward":
            begun.add(event.layer)
            assert moment.adding == event.layer
        if event.kind in ("forward", "backward"):
            assert (moment.layer, moment.k, moment.phase) == (event.layer, event.k, event.kind)
            there = {*moment.gathered, moment.adding} - {None}
            assert there == begun - {*left, *(travel.layer for travel in moment.leaving)}
        leaving = [travel.layer for travel in moment.leaving]
        assert len(leaving) == len({*leaving})
        assert not leaving or moment.k in (-1, CONFIG.micro_batches - 1), "before, all of them are still added to"
        left += [key for key in leaving if key not in left]
    assert left == list(reversed(moments.keys))
    end = moments.when(moments.end_s)
    assert len(end.updated) == DEPTH and not end.gathered and not end.leaving and end.adding is None


def test_nothing_is_stashed_and_every_micro_batch_has_a_graph_of_all_layers(trace: Trace) -> None:
    moments = Moments.of(trace)
    seen = {(event.k, event.kind, event.layer): moments.at(i) for i, event in enumerate(trace.events)}
    assert not any(moment.stashed for moment in seen.values())
    for k in range(CONFIG.micro_batches):
        assert [seen[k, "forward", key].graphs for key in moments.keys] == [1, 2, 3, 4]
        assert seen[k, "loss", "shell"].graphs == DEPTH
        assert seen[k, "backward", moments.keys[0]].graphs == 1
    assert moments.when(moments.end_s).graphs == 0


def test_every_event_has_its_line(trace: Trace) -> None:
    moments, said = Moments.of(trace), {}
    for i, event in enumerate(trace.events):
        moment = moments.at(i)
        if event.layer == "L001" and moment.line is not None and event.kind not in said:
            said[event.kind] = line_words(moment.line, moment.graph_kept, moment.schedule)
    assert said == {
        "load": "first k: load, ahead of time",
        "forward": "run layer, keep its graph",
        "backward": "back-propagate",
        "push": "last k: push gradient",
        "reduce": "EPS: reduce, update layer",
        "update": "EPS: reduce, update layer",
    }


def test_the_telling_moment_is_of_the_last_micro_batch(trace: Trace) -> None:
    moments = Moments.of(trace)
    assert moments.at(moments.telling()).k == CONFIG.micro_batches - 1


@pytest.mark.parametrize("follows", [True, False])
def test_a_step_under_way_is_read_from_its_first_event_on(trace: Trace, follows: bool) -> None:
    whole, (events, samples) = Moments.of(trace), trace.counts
    seen: list[Moment] = []
    for count in range(events + 1):
        part = Columns.of(trace, count, samples)
        moments = Moments(
            part,
            whole.keys,
            micro_batches=3,
            resident=DEPTH - 2,
            keep=DEPTH,
            schedule="depth_first",
            before=whole if follows else None,
            live=True,
        )
        seen.append(moments.when(part.end_s))
    assert max(len(moment.gathered) for moment in seen) == DEPTH
    assert not any(moment.leaving for moment in seen if 0 <= moment.k < 2)


def test_copies_hide_in_the_first_forward_and_the_last_backward_alone(trace: Trace) -> None:
    phases = {name: (start_s, stop_s) for name, start_s, stop_s in phases_of(Columns.of(trace))}
    assert list(phases) == ["fill", "forward", MIDDLE, "backward", "tail"]
    assert phases_of(Columns.of(trace)) == list(cuts_of(trace.lanes))
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
    assert MIDDLE not in [name for name, *_ in phases_of(Columns.of(trace))]
    assert MIDDLE not in [bound.phase for bound in trace.bound_by()]
