"""Moments of real and simulated steps: what is where, checked at every event against the trace itself."""

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
    """The second step of a small stack, three micro-batches."""
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
    """What holds in every moment of a step that trains so many layers."""
    moments = StateTimeline.of(trace)
    seen = [moments.at_event(i) for i in range(moments.count)]
    shares: dict[tuple[str, int], float] = {}
    loads = {key: 0 for key in moments.keys}
    before: StepState | None = None
    for moment, event in zip(seen, trace.events, strict=True):
        held = [slot.layer for slot in moment.slots if slot.layer is not None]
        assert len(moment.slots) == ahead + 1
        assert len(held) == len(set(held)), moment
        assert moment.layer is None or moment.layer in held, moment
        if event.kind in ("forward", "backward"):
            assert moment.layer == event.layer and moment.k == event.k and moment.phase == event.kind
            assert next(slot for slot in moment.slots if slot.layer == event.layer).share == 1.0
        assert moment.line == line_index(event.kind, event.layer, moment.line > 4)
        for place, slot in enumerate(moment.slots):
            assert 0.0 <= slot.share <= 1.0
            if slot.layer is None or before is None:
                continue
            if before.slots[place].layer != slot.layer:
                loads[slot.layer] += 1
            else:
                assert slot.share >= before.slots[place].share, moment
            shares[slot.layer, loads[slot.layer]] = slot.share
        assert before is None or moment.updated[: len(before.updated)] == before.updated
        assert moment.num_stashed >= 0
        before = moment
    end = moments.at_time(moments.end_s)
    assert len(end.updated) == len(set(end.updated)) == trained
    assert end.num_stashed == 0 and not end.arrived and not end.pushing and end.accumulating is None
    assert set(shares.values()) == {1.0}, "every load that began was over before its slot was given away"
    return seen


@settings
def test_every_moment_of_a_real_step_is_consistent(ahead: int, stash: str) -> None:
    check(recorded(ahead, stash), ahead, trained=5)


@pytest.mark.parametrize("frozen, trained", [((0, 1), 3), ((2,), 4), ((3, 4), 3)])
@pytest.mark.parametrize("stash", ["device", "host"])
def test_frozen_layers_are_not_updated(frozen: tuple[int, ...], trained: int, stash: str) -> None:
    trace = recorded(stash=stash, frozen=frozen)
    check(trace, 1, trained)


@settings
def test_every_moment_of_a_simulated_step_is_consistent(ahead: int, stash: str) -> None:
    check(simulated(12, 4, ahead, stash), ahead, trained=12)


def test_deferred_updates_wait_in_the_eps() -> None:
    seen = check(recorded(update="deferred"), 1, trained=5)
    assert max(len(moment.arrived) for moment in seen) == 5


@settings
def test_the_number_of_residencies_is_the_number_of_loads(ahead: int, stash: str) -> None:
    """V visits load 2V - min(V, ahead + 1) layers: at the turn the last ones are still there."""
    moments = StateTimeline.of(recorded(ahead, stash))
    came = 0
    before: tuple[str | None, ...] = (None,) * (ahead + 1)
    for i in range(moments.count):
        now = tuple(slot.layer for slot in moments.at_event(i).slots)
        came += sum(a != b for a, b in zip(before, now, strict=True))
        before = now
    assert came == 2 * 5 - (ahead + 1)


@pytest.mark.parametrize("make", [recorded, partial(simulated, 8, 4)], ids=["recorded", "simulated"])
def test_an_event_and_its_time_agree(make: Callable[[], Trace]) -> None:
    trace = make()
    moments = StateTimeline.of(trace)
    starts = [event.start_s for event in trace.events]
    for i, start_s in enumerate(starts):
        if i + 1 == len(starts) or starts[i + 1] > start_s:
            assert moments.at_time(start_s) == moments.at_event(i)


def test_bytes_are_those_of_the_samples() -> None:
    trace = recorded()
    moments = StateTimeline.of(trace)
    for t_s in (0.0, trace.span_s / 3, trace.span_s):
        moment = moments.at_time(t_s)
        for place, used in (("device", moment.device), ("host", moment.host)):
            samples = [s for s in trace.memory if s.place == place and s.t_s <= t_s]
            assert sum(used.values()) == (samples[-1].total if samples else 0)
    assert moments.at_event(0).device_peak_bytes == trace.peak_bytes("device")


def test_a_load_in_pieces_counts_bytes() -> None:
    """Half of the first piece, then all of it, of a load of 400 bytes; the numbers are by hand."""
    events = [
        Event("h2d", "load", 0.0, 2.0, "L000", nbytes=100, slot=0, piece=0, pieces=2),
        Event("h2d", "fetch", 2.0, 3.0, "L000", k=0, nbytes=7),
        Event("h2d", "load", 3.0, 4.0, "L000", nbytes=300, slot=0, piece=1, pieces=2),
        Event("compute", "forward", 5.0, 6.0, "L000", k=0, visit=0),
    ]
    moments = StateTimeline.of(Trace.of(events, []))
    shares = [moments.at_time(t_s).slots[0].share for t_s in (0.0, 1.0, 2.5, 3.5, 4.0)]
    assert shares == [0.0, 0.125, 0.25, 0.625, 1.0]
    assert moments.at_time(1.0).waits_for == "L000" and moments.at_time(1.0).phase == "fill"


def test_a_copy_under_way_is_as_large_as_its_pieces_say() -> None:
    """One of four pieces is over: a quarter is there, whatever an earlier step had."""
    events = [Event("h2d", "load", 0.0, 1.0, "L000", nbytes=100, slot=1, piece=0, pieces=4)]
    moments = StateTimeline(Columns.of(Trace.of(events, [])), ["L000"], live=True)
    assert [slot.share for slot in moments.at_time(1.0).slots] == [0.0, 0.25]


def test_what_happens_together_is_seen_together() -> None:
    events = [
        Event("d2h", "stash", 1.0, 1.5, "", k=0, nbytes=7, visit=0),
        Event("compute", "forward", 0.0, 1.0, "L000", k=0, visit=0),
        Event("compute", "forward", 1.0, 2.0, "L000", k=1, visit=0),
    ]
    moment = StateTimeline.of(Trace.of(events, [])).at_event(1)
    assert moment.lanes["d2h"] is not None and moment.lanes["compute"] is not None
    assert moment.lanes["compute"].k == moment.k == 1


@pytest.mark.parametrize("stash", ["device", "host"])
@pytest.mark.parametrize("resident, keep, kept", [(0, 0, 1), (0, 1, 1), (2, 3, 3), (1, 9, 3), (9, 9, 5)])
def test_backward_says_where_nothing_is_recomputed(resident: int, keep: int, kept: int, stash: str) -> None:
    """As the layers themselves have counted it, in a step that is not metered."""
    config = RelayConfig(micro_batches=3, resident=resident, keep=keep, stash=stash)
    model, ran = Stack(5), Counter[str]()

    def counted(name: str, forward: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
        def run(x: Tensor) -> Tensor:
            ran.update([name])
            return forward(x)

        return run

    for i, block in enumerate(model.blocks):  # not by a hook: those are silent where a layer is recomputed
        block.inner.forward = counted(f"L{i:03d}", block.inner.forward)
    with Relay(
        model, partial(torch.optim.SGD, lr=0.1), loss=squared, layers=list(model.blocks), config=config
    ) as relay:
        relay.step((torch.randn(6, 4),))
        ran.clear()
        trace = relay.step((torch.randn(6, 4),)).trace
    moments = StateTimeline.of(trace)
    seen = [moments.at_event(i) for i in range(moments.count)]
    said: dict[str, set[str]] = {}
    for event, moment in zip(trace.events, seen, strict=True):
        if event.kind == "backward":
            assert moment.line is not None
            said.setdefault(line_text(moment.line, moment.graph_kept), set()).add(event.layer)
    assert said["no recompute, back-propagate"] == {key for key in moments.keys if ran[key] == 3}
    assert len(said["no recompute, back-propagate"]) == kept
    assert said.get("recompute, back-propagate", set()) == {key for key in moments.keys if ran[key] == 6}
    assert not any(moment.graph_kept for moment in seen if moment.phase != "backward")


def test_a_kept_graph_whose_weights_have_left_is_recomputed() -> None:
    """By hand: the settings promise both layers, and the first one was loaded a second time."""
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
    moments = StateTimeline.of(trace)
    assert [moments.at_event(i).graph_kept for i in range(len(events))] == [
        False,
        False,
        False,
        False,
        True,
        False,
        False,
    ], "while the next layer is loaded, its own fate counts"


@pytest.mark.parametrize("stash", ["device", "host"])
def test_a_step_under_way_never_flickers(stash: str) -> None:
    """Played in real time: from the first layer's event to the last one a resident layer computes, in the right order."""
    trace = recorded(stash=stash)
    arrivals, keys = trace.events_since(0)[0], StateTimeline.of(trace).keys
    order: list[str] = []
    passes = [e for e in arrivals if e.kind in ("forward", "backward")]
    full = StateTimeline.of(trace)
    for t_s in sorted(e.stop_s for e in arrivals if passes[0].stop_s <= e.stop_s <= passes[-1].stop_s):
        known = [e for e in arrivals if e.stop_s <= t_s]
        memory = [s for s in trace.memory if s.t_s <= t_s]
        now = Columns.of(Trace.of(known, memory))
        moment = StateTimeline(now, keys, micro_batches=3, ahead=1, stash=stash, previous=full, live=True).at_time(t_s)
        assert moment.layer is not None or moment.waits_for is not None, moment
        assert moment.layer is None or moment.layer in [slot.layer for slot in moment.slots], moment
        assert moment.phase in ("forward", "backward")
        if moment.layer is not None and order[-1:] != [moment.layer]:
            order.append(moment.layer)
    assert order == [*keys, *reversed(keys[:-1])]


@pytest.mark.parametrize("stash", ["device", "host"])
def test_a_frozen_layer_under_way_has_no_gradient(stash: str) -> None:
    """At every event of a step under way, beside the one before it."""
    trace = recorded(stash=stash, frozen=(1, 3))
    arrivals, full = trace.events_since(0)[0], StateTimeline.of(trace)
    adding = set()
    for event in arrivals:
        known = [e for e in arrivals if e.stop_s <= event.stop_s]
        now = Columns.of(Trace.of(known, []))
        moment = StateTimeline(now, full.keys, micro_batches=3, ahead=1, stash=stash, previous=full, live=True).at_time(
            event.stop_s
        )
        adding |= {moment.accumulating, *(travel.layer for travel in moment.pushing)} - {None}
    assert adding == {full.keys[i] for i in (0, 2, 4)}


def test_the_stash_counts_inputs_until_their_recompute() -> None:
    trace = simulated(6, 4, stash="device")
    moments = StateTimeline.of(trace)
    assert (
        max(moments.at_event(i).num_stashed for i in range(moments.count)) == 6 * 4 - 3
    )  # the last layer goes back at once
    together = StateTimeline.of(simulated(400, 32))
    assert max(together.at_event(i).num_stashed for i in range(0, together.count, 5)) == 400 * 32


def test_the_telling_moment_is_in_backward_and_busy() -> None:
    for trace in (recorded(), simulated(24, 8)):
        moments = StateTimeline.of(trace)
        moment = moments.at_event(moments.busiest_event())
        assert moment.phase == "backward" and moment.layer is not None
    assert moment.updated and any(slot.share < 1 for slot in moment.slots)


def test_compute_waits_for_a_layer_that_is_not_there_yet() -> None:
    """A link so slow that every load takes longer than a visit; nothing runs ahead."""
    moments = StateTimeline.of(simulated(4, 1, ahead=0, stash="device"))
    loads = [e for e in simulated(4, 1, ahead=0, stash="device").events if e.kind == "load" and e.layer != "shell"]
    for load in loads:
        moment = moments.at_time((load.start_s + load.stop_s) / 2)
        assert moment.waits_for == load.layer and moment.layer is None
        assert moment.slots[0].layer == load.layer and moment.slots[0].share == pytest.approx(0.5)
    assert len(loads) == 2 * 4 - 1


def test_nothing_has_a_moment_too() -> None:
    moments = StateTimeline.of(Trace())
    assert moments.count == 0 and moments.at_time(1.0).phase == "idle" and moments.busiest_event() == 0
    with pytest.raises(ValueError, match="event 0: the step has 0 events"):
        moments.at_event(0)
    live = StateTimeline(Columns.of(Trace()), ["L000"], live=True).at_time(0.1)
    assert live.layer is None and live.line is None


def test_after_the_end_of_a_step_nothing_is_under_way() -> None:
    trace = recorded()
    moments = StateTimeline.of(trace)
    after = moments.at_time(moments.end_s + 1)
    assert after.phase == "idle" and after.layer is None and not any(after.lanes.values()) and after.line is None


def test_samples_without_events_are_shown() -> None:
    trace = Trace.of([], [MemorySample(0.0, "device", {"weights": 3}), MemorySample(0.5, "host", {"stash": 4})])
    moment = StateTimeline.of(trace).at_time(1.0)
    assert moment.device == {"weights": 3} and moment.host == {"stash": 4}


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
