"""States of real and simulated steps, checked at every event against the trace."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor, nn

from l2l_core import EmulatedDevice, Event, Machine, Profile, Relay, RelayConfig, Shapes, Trace, simulate
from l2l_core.trace.events import MemorySample
from workbench.readings.algorithm_text import BREADTH_FIRST_LINES, line_index, line_text
from workbench.readings.state_timeline import StateTimeline
from workbench.readings.step_state import StepState
from workbench.readings.trace_columns import Columns

SETTINGS = [(ahead, stash) for ahead in (0, 1, 2) for stash in ("device", "host")]
settings = pytest.mark.parametrize("ahead, stash", SETTINGS)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.inner(x))


class Stack(nn.Module):
    """A chain of residual blocks between two linear maps; some layers may be frozen."""

    def __init__(self, depth: int, frozen: tuple[int, ...] = ()) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 8), nn.Linear(8, 2)
        self.blocks = nn.ModuleList(Block() for _ in range(depth))
        for i in frozen:
            self.blocks[i].requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.last(x)


def squared(outputs: Tensor, batch: tuple[Tensor]) -> Tensor:
    return outputs.square().mean()


def recorded(
    ahead: int = 1, stash: str = "host", depth: int = 5, frozen: tuple[int, ...] = (), update: str = "eager"
) -> Trace:
    """Return the trace of the second step of a small stack with three micro-batches."""
    config = RelayConfig(micro_batches=3, ahead=ahead, stash=stash, update=update)
    optimizer, device = partial(torch.optim.AdamW, lr=1e-3), EmulatedDevice(h2d_bytes_per_s=5e6, d2h_bytes_per_s=5e6)
    model = Stack(depth, frozen)
    with Relay(model, optimizer, device=device, loss=squared, layers=list(model.blocks), config=config) as relay:
        return [relay.step((torch.randn(6, 4),)) for _ in range(2)][-1].trace


def simulated(depth: int, micro_batches: int, ahead: int = 1, stash: str = "host") -> Trace:
    machine = Machine(flops_per_s=5e10, update_params_per_s=3e8, h2d_bytes_per_s=2e9, d2h_bytes_per_s=2e9)
    shapes = Shapes(
        layer_params=[100_000] * depth,
        shell_params=50_000,
        tokens=128,
        boundary_bytes=131_072,
        micro_batches=micro_batches,
        stash=stash,
    )
    config = RelayConfig(micro_batches=micro_batches, ahead=ahead, stash=stash)
    return simulate(
        Profile.of_shapes(shapes, machine), config, EmulatedDevice(h2d_bytes_per_s=2e9, d2h_bytes_per_s=2e9)
    )


def check(trace: Trace, ahead: int, trained: int) -> list[StepState]:
    """Check the invariants of every state of a step that trains `trained` layers."""
    timeline = StateTimeline.of(trace)
    seen = [timeline.at_event(i) for i in range(timeline.count)]
    shares: dict[tuple[str, int], float] = {}
    loads = {key: 0 for key in timeline.keys}
    before: StepState | None = None
    for state, event in zip(seen, trace.events, strict=True):
        layers = [slot.layer for slot in state.slots if slot.layer is not None]
        assert len(state.slots) == ahead + 1
        assert len(layers) == len(set(layers)), state
        assert state.layer is None or state.layer in layers, state
        if event.kind in ("forward", "backward"):
            assert state.layer == event.layer and state.k == event.k and state.phase == event.kind
            assert next(slot for slot in state.slots if slot.layer == event.layer).share == 1.0
        assert state.line == line_index(event.kind, event.layer, state.line > 4)
        for place, slot in enumerate(state.slots):
            assert 0.0 <= slot.share <= 1.0
            if slot.layer is None or before is None:
                continue
            if before.slots[place].layer != slot.layer:
                loads[slot.layer] += 1
            else:
                assert slot.share >= before.slots[place].share, state
            shares[slot.layer, loads[slot.layer]] = slot.share
        assert before is None or state.updated[: len(before.updated)] == before.updated
        assert state.num_stashed >= 0
        before = state
    end = timeline.at_time(timeline.end_s)
    assert len(end.updated) == len(set(end.updated)) == trained
    assert end.num_stashed == 0 and not end.arrived and not end.pushing and end.accumulating is None
    assert set(shares.values()) == {1.0}, "every load that began had ended before its slot was reused"
    return seen


@settings
def test_every_state_of_a_real_step_is_consistent(ahead: int, stash: str) -> None:
    check(recorded(ahead, stash), ahead, trained=5)


@pytest.mark.parametrize("frozen, trained", [((0, 1), 3), ((2,), 4), ((3, 4), 3)])
@pytest.mark.parametrize("stash", ["device", "host"])
def test_frozen_layers_are_not_updated(frozen: tuple[int, ...], trained: int, stash: str) -> None:
    trace = recorded(stash=stash, frozen=frozen)
    check(trace, 1, trained)


@settings
def test_every_state_of_a_simulated_step_is_consistent(ahead: int, stash: str) -> None:
    check(simulated(12, 4, ahead, stash), ahead, trained=12)


def test_deferred_updates_wait_in_the_eps() -> None:
    seen = check(recorded(update="deferred"), 1, trained=5)
    assert max(len(state.arrived) for state in seen) == 5


@settings
def test_slots_change_as_often_as_layers_are_loaded(ahead: int, stash: str) -> None:
    """V visits load 2V - min(V, ahead + 1) layers: the last ones are still on the device when backward begins."""
    timeline = StateTimeline.of(recorded(ahead, stash))
    changes = 0
    before: tuple[str | None, ...] = (None,) * (ahead + 1)
    for i in range(timeline.count):
        now = tuple(slot.layer for slot in timeline.at_event(i).slots)
        changes += sum(a != b for a, b in zip(before, now, strict=True))
        before = now
    assert changes == 2 * 5 - (ahead + 1)


@pytest.mark.parametrize("make", [recorded, partial(simulated, 8, 4)], ids=["recorded", "simulated"])
def test_an_event_and_its_time_agree(make: Callable[[], Trace]) -> None:
    trace = make()
    timeline = StateTimeline.of(trace)
    starts = [event.start_s for event in trace.events]
    for i, start_s in enumerate(starts):
        if i + 1 == len(starts) or starts[i + 1] > start_s:
            assert timeline.at_time(start_s) == timeline.at_event(i)


def test_bytes_are_those_of_the_samples() -> None:
    trace = recorded()
    timeline = StateTimeline.of(trace)
    for t_s in (0.0, trace.span_s / 3, trace.span_s):
        state = timeline.at_time(t_s)
        for place, used in (("device", state.device), ("host", state.host)):
            samples = [s for s in trace.memory if s.place == place and s.t_s <= t_s]
            assert sum(used.values()) == (samples[-1].total if samples else 0)
    assert timeline.at_event(0).device_peak_bytes == trace.peak_bytes("device")


def test_a_load_in_pieces_counts_bytes() -> None:
    """Half of the first piece, then all of it, of a load of 400 bytes; computed by hand."""
    events = [
        Event("h2d", "load", 0.0, 2.0, "L000", nbytes=100, slot=0, piece=0, pieces=2),
        Event("h2d", "fetch", 2.0, 3.0, "L000", k=0, nbytes=7),
        Event("h2d", "load", 3.0, 4.0, "L000", nbytes=300, slot=0, piece=1, pieces=2),
        Event("compute", "forward", 5.0, 6.0, "L000", k=0, visit=0),
    ]
    timeline = StateTimeline.of(Trace.of(events, []))
    shares = [timeline.at_time(t_s).slots[0].share for t_s in (0.0, 1.0, 2.5, 3.5, 4.0)]
    assert shares == [0.0, 0.125, 0.25, 0.625, 1.0]
    assert timeline.at_time(1.0).waits_for == "L000" and timeline.at_time(1.0).phase == "fill"


def test_the_size_of_an_unfinished_copy_follows_from_its_pieces() -> None:
    """One of four pieces has ended, so a quarter of the copy is done."""
    events = [Event("h2d", "load", 0.0, 1.0, "L000", nbytes=100, slot=1, piece=0, pieces=4)]
    timeline = StateTimeline(Columns.of(Trace.of(events, [])), ["L000"], live=True)
    assert [slot.share for slot in timeline.at_time(1.0).slots] == [0.0, 0.25]


def test_events_that_start_together_are_shown_together() -> None:
    events = [
        Event("d2h", "stash", 1.0, 1.5, "", k=0, nbytes=7, visit=0),
        Event("compute", "forward", 0.0, 1.0, "L000", k=0, visit=0),
        Event("compute", "forward", 1.0, 2.0, "L000", k=1, visit=0),
    ]
    state = StateTimeline.of(Trace.of(events, [])).at_event(1)
    assert state.lanes["d2h"] is not None and state.lanes["compute"] is not None
    assert state.lanes["compute"].k == state.k == 1


@pytest.mark.parametrize("stash", ["device", "host"])
@pytest.mark.parametrize("resident, keep, kept", [(0, 0, 1), (0, 1, 1), (2, 3, 3), (1, 9, 3), (9, 9, 5)])
def test_kept_graphs_are_not_recomputed(resident: int, keep: int, kept: int, stash: str) -> None:
    """Compared with the number of calls of each layer, in a step that is not metered."""
    config = RelayConfig(micro_batches=3, resident=resident, keep=keep, stash=stash)
    model, calls = Stack(5), Counter[str]()

    def counted(name: str, forward: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
        def run(x: Tensor) -> Tensor:
            calls.update([name])
            return forward(x)

        return run

    for i, block in enumerate(model.blocks):  # not by a hook, which is disabled in a recompute
        block.inner.forward = counted(f"L{i:03d}", block.inner.forward)
    with Relay(
        model, partial(torch.optim.SGD, lr=0.1), loss=squared, layers=list(model.blocks), config=config
    ) as relay:
        relay.step((torch.randn(6, 4),))
        calls.clear()
        trace = relay.step((torch.randn(6, 4),)).trace
    timeline = StateTimeline.of(trace)
    seen = [timeline.at_event(i) for i in range(timeline.count)]
    layers_by_line: dict[str, set[str]] = {}
    for event, state in zip(trace.events, seen, strict=True):
        if event.kind == "backward":
            assert state.line is not None
            layers_by_line.setdefault(line_text(state.line, state.graph_kept), set()).add(event.layer)
    assert layers_by_line["no recompute, back-propagate"] == {key for key in timeline.keys if calls[key] == 3}
    assert len(layers_by_line["no recompute, back-propagate"]) == kept
    assert layers_by_line.get("recompute, back-propagate", set()) == {key for key in timeline.keys if calls[key] == 6}
    assert not any(state.graph_kept for state in seen if state.phase != "backward")


def test_a_kept_graph_whose_weights_have_left_is_recomputed() -> None:
    """The settings keep both layers, but the first one was loaded a second time; computed by hand."""
    events = [
        Event("h2d", "load", 0.0, 1.0, "L000", slot=0),
        Event("compute", "forward", 1.0, 2.0, "L000", k=0, visit=0, stay=0),
        Event("h2d", "load", 2.0, 3.0, "L001", slot=1),
        Event("compute", "forward", 3.0, 4.0, "L001", k=0, visit=1, stay=1),
        Event("compute", "backward", 4.0, 5.0, "L001", k=0, visit=2, stay=1),
        Event("h2d", "load", 5.0, 6.0, "L000", slot=0),
        Event("compute", "backward", 6.0, 7.0, "L000", k=0, visit=3, stay=2),
    ]
    trace = Trace.of(events, [], settings={"keep": 2, "ahead": 1, "resident": 0})
    timeline = StateTimeline.of(trace)
    assert [timeline.at_event(i).graph_kept for i in range(len(events))] == [
        False,
        False,
        False,
        False,
        True,
        False,
        False,
    ], "during the load of a layer, its own graph counts"


@pytest.mark.parametrize("stash", ["device", "host"])
def test_a_running_step_never_flickers(stash: str) -> None:
    """In real time, from the first layer event to the last, a resident layer computes, in the right order."""
    trace = recorded(stash=stash)
    arrivals, keys = trace.events_since(0)[0], StateTimeline.of(trace).keys
    order: list[str] = []
    passes = [e for e in arrivals if e.kind in ("forward", "backward")]
    full = StateTimeline.of(trace)
    for t_s in sorted(e.stop_s for e in arrivals if passes[0].stop_s <= e.stop_s <= passes[-1].stop_s):
        ended = [e for e in arrivals if e.stop_s <= t_s]
        memory = [s for s in trace.memory if s.t_s <= t_s]
        now = Columns.of(Trace.of(ended, memory))
        state = StateTimeline(now, keys, micro_batches=3, ahead=1, stash=stash, previous=full, live=True).at_time(t_s)
        assert state.layer is not None or state.waits_for is not None, state
        assert state.layer is None or state.layer in [slot.layer for slot in state.slots], state
        assert state.phase in ("forward", "backward")
        if state.layer is not None and order[-1:] != [state.layer]:
            order.append(state.layer)
    assert order == [*keys, *reversed(keys[:-1])]


@pytest.mark.parametrize("stash", ["device", "host"])
def test_a_frozen_layer_of_a_running_step_has_no_gradient(stash: str) -> None:
    """At every event of a running step, with the previous step given."""
    trace = recorded(stash=stash, frozen=(1, 3))
    arrivals, full = trace.events_since(0)[0], StateTimeline.of(trace)
    with_gradient = set()
    for event in arrivals:
        ended = [e for e in arrivals if e.stop_s <= event.stop_s]
        now = Columns.of(Trace.of(ended, []))
        state = StateTimeline(now, full.keys, micro_batches=3, ahead=1, stash=stash, previous=full, live=True).at_time(
            event.stop_s
        )
        with_gradient |= {state.accumulating, *(push.layer for push in state.pushing)} - {None}
    assert with_gradient == {full.keys[i] for i in (0, 2, 4)}


def test_the_stash_counts_inputs_until_their_recompute() -> None:
    trace = simulated(6, 4, stash="device")
    timeline = StateTimeline.of(trace)
    assert (
        max(timeline.at_event(i).num_stashed for i in range(timeline.count)) == 6 * 4 - 3
    )  # the last layer starts its backward at once
    long_step = StateTimeline.of(simulated(400, 32))
    assert max(long_step.at_event(i).num_stashed for i in range(0, long_step.count, 5)) == 400 * 32


def test_the_busiest_event_is_in_backward() -> None:
    for trace in (recorded(), simulated(24, 8)):
        timeline = StateTimeline.of(trace)
        state = timeline.at_event(timeline.busiest_event())
        assert state.phase == "backward" and state.layer is not None
    assert state.updated and any(slot.share < 1 for slot in state.slots)


def test_compute_waits_for_a_layer_that_is_not_loaded_yet() -> None:
    """The link is so slow that every load takes longer than a visit; ahead=0."""
    timeline = StateTimeline.of(simulated(4, 1, ahead=0, stash="device"))
    loads = [e for e in simulated(4, 1, ahead=0, stash="device").events if e.kind == "load" and e.layer != "shell"]
    for load in loads:
        state = timeline.at_time((load.start_s + load.stop_s) / 2)
        assert state.waits_for == load.layer and state.layer is None
        assert state.slots[0].layer == load.layer and state.slots[0].share == pytest.approx(0.5)
    assert len(loads) == 2 * 4 - 1


def test_an_empty_trace_has_a_state() -> None:
    timeline = StateTimeline.of(Trace())
    assert timeline.count == 0 and timeline.at_time(1.0).phase == "idle" and timeline.busiest_event() == 0
    with pytest.raises(ValueError, match="event 0: the step has 0 events"):
        timeline.at_event(0)
    live = StateTimeline(Columns.of(Trace()), ["L000"], live=True).at_time(0.1)
    assert live.layer is None and live.line is None


def test_after_the_end_of_a_step_the_relay_is_idle() -> None:
    trace = recorded()
    timeline = StateTimeline.of(trace)
    after = timeline.at_time(timeline.end_s + 1)
    assert after.phase == "idle" and after.layer is None and not any(after.lanes.values()) and after.line is None


def test_samples_without_events_are_shown() -> None:
    trace = Trace.of([], [MemorySample(0.0, "device", {"weights": 3}), MemorySample(0.5, "host", {"stash": 4})])
    state = StateTimeline.of(trace).at_time(1.0)
    assert state.device == {"weights": 3} and state.host == {"stash": 4}


@pytest.mark.parametrize("backward", [False, True])
def test_every_kind_of_event_has_a_line(backward: bool) -> None:
    words = {
        kind: BREADTH_FIRST_LINES[line_index(kind, "L000", backward)].text
        for kind in ("forward", "loss", "backward", "load", "push", "stash", "reduce", "update", "shell", "batch")
    }
    assert "run layer" in words["forward"] and "loss" in words["loss"] and "recompute" in words["backward"]
    assert words["load"].startswith("load") and words["push"].startswith("push") and "update" in words["update"]
    assert line_index("load", "L000", backward) == (6 if backward else 1)
    assert ("reversed" in words["shell"]) == backward
