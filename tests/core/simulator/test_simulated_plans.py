"""Plans on a virtual clock: the events of the real step by the same plan, lane by lane and across lanes."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from by_hand import stashes
from deep_models import Chain, chain_batch, squared_error
from oracle import assert_equal, both
from patience import rarely
from random_plans import shuffled
from zoo import BY_NAME

from l2l_core import (
    Event,
    Machine,
    PlanError,
    Profile,
    Relay,
    RelayConfig,
    Shapes,
    StepPlan,
    Trace,
    simulate,
)
from l2l_core.plan import ScheduleSettings, serial
from l2l_core.simulator import ComputeOp, TurnCost
from l2l_core.step.traffic.compute_events import ComputeClock
from l2l_core.step.traffic.lanes import Lane

NAMES = ["chain", "gpt2", "tied_layers", "batch_norm"]
TURNS = "IFXBWGHST"  # kinds that make up turns
Issued = tuple[str, str, str, int, int]  # lane, kind, layer, micro-batch, visit


def shape_of(trace: Trace, lane: str) -> list[tuple[Any, ...]]:
    """What happened on a lane, without times."""
    return [(e.kind, e.layer, e.k, e.nbytes, e.visit, e.stay, e.slot, e.piece, e.pieces) for e in trace.lanes[lane]]


@contextmanager
def noting_issues(issued: list[Issued], monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Note compute and copies of a real step in the order in which the training thread issues them, across lanes."""
    start, send = ComputeClock.start, Lane.send

    def noted_start(clock: Any, kind: str, layer: str, k: int, visit: int = -1) -> None:
        issued.append(("compute", kind, layer, k, visit))
        start(clock, kind, layer, k, visit)

    def noted_send(lane: Any, kind: str, layer: str, copies: Any, k: int = -1, visit: int = -1, **piece: int) -> Any:
        issued.append((lane.name, kind, layer, k, visit))
        return send(lane, kind, layer, copies, k, visit, **piece)

    with monkeypatch.context() as patch:
        patch.setattr(ComputeClock, "start", noted_start)
        patch.setattr(Lane, "send", noted_send)
        yield


def issues_of(replay: Trace) -> list[Issued]:
    """The same of a simulated step, in which events arrive as they are issued; the EPS is another thread."""
    events: list[Event] = replay.events_since(0)[0]
    return [(e.lane, e.kind, e.layer, e.k, e.visit) for e in events if e.lane != "eps"]


def assert_same_events(replay: Trace, trace: Trace, issued: list[Issued]) -> None:
    for lane in ("compute", "h2d", "d2h", "eps"):
        assert shape_of(replay, lane) == shape_of(trace, lane), lane
    begins = ("h2d", "load", "shell", -1, -1)
    last = len(issued) - 1 - issued[::-1].index(begins)  # the first step of a kind is tried before it trains
    assert issues_of(replay) == issued[last:]


# -- the same events as the real step ------------------------------------------------------------------------------------


@stashes
@pytest.mark.parametrize("seed", [*range(4), *map(rarely, range(4, 20))])
@pytest.mark.parametrize("name", NAMES)
def test_a_plan_is_simulated_as_it_runs(name: str, seed: int, stash: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Any order with the stash on the device; with it on the host, turns keep theirs, so that the same bytes move."""
    monkeypatch.setattr("l2l_core.schedule_rules.MIN_CHUNK_BYTES", 64)  # small layers travel in pieces, too
    kind, rng, issued = BY_NAME[name], random.Random(seed), list[Issued]()
    config = RelayConfig(
        micro_batches=rng.choice([1, 2, 3]),
        stash=stash,
        ahead=rng.choice([0, 1, 2]),
        resident=rng.choice([0, 1]),
        keep=1,
    )
    with both(kind, config) as pair:
        steps = [pair.step(kind.make_batch(6, seed)) for seed in range(2)]
        profile, batch = Profile.of(steps[-1].result.trace), kind.make_batch(6, 2)
        plan = shuffled(pair.relay.plan(batch), rng, fixed="" if stash == "device" else TURNS)
        with noting_issues(issued, monkeypatch):
            steps.append(pair.step(batch, plan=plan))
        assert_equal(steps)
        replay = simulate(profile, config, pair.relay.device, plan=plan)
    assert_same_events(replay, steps[-1].result.trace, issued)


@stashes
@pytest.mark.parametrize(
    "micro_batches, ahead", [(1, 1), (3, 1), rarely(1, 2), rarely(2, 1), rarely(1, 0), rarely(2, 0)]
)
@pytest.mark.parametrize(
    "name", [*NAMES, "mixtral", *map(rarely, ["spectral_norm_old", "t5", "albert", "frozen_prefix"])]
)
def test_a_replay_issues_in_the_order_of_the_step(
    name: str, micro_batches: int, ahead: int, stash: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Across lanes. With one micro-batch the next turn is unknown until the layer has run, so its stash comes late."""
    kind, issued = BY_NAME[name], list[Issued]()
    config = RelayConfig(micro_batches=micro_batches, ahead=ahead, stash=stash)
    with both(kind, config) as pair:
        for seed in range(2):
            pair.relay.step(kind.make_batch(6, seed))
        with noting_issues(issued, monkeypatch):
            trace = pair.relay.step(kind.make_batch(6, 2)).trace
        replay = simulate(Profile.of(trace), config, pair.relay.device)
        assert_same_events(replay, trace, issued)
        if (
            name in NAMES
        ):  # layers that change their state, or need no backward, run by another plan than the expected one
            plan = pair.relay.plan(kind.make_batch(6, 2))
            by_plan = simulate(Profile.of(trace), config, pair.relay.device, plan=plan)
            assert by_plan.events_since(0) == replay.events_since(0)


@stashes
@pytest.mark.parametrize("ahead, resident", [(2, 0), (1, 1), rarely(0, 0), rarely(0, 1)])
@pytest.mark.parametrize("name", ["chain", "batch_norm", rarely("tied_layers")])
def test_the_peak_of_a_plan_has_its_slots(name: str, ahead: int, resident: int, stash: Any) -> None:
    """With the stash on the host, a plan that copies without overlap needs no ring, and gets no samples."""
    kind, config = BY_NAME[name], RelayConfig(micro_batches=3, stash=stash)
    with both(kind, config) as pair:
        trace = [pair.relay.step(kind.make_batch(6, seed)).trace for seed in range(2)][-1]
        batch = kind.make_batch(6, 2)
        plan = pair.relay.plan(batch, replace(pair.relay.config, ahead=ahead, resident=resident))
        replay = simulate(Profile.of(trace), config, plan=plan)
        if stash == "host" and not ahead:
            assert not replay.memory
        else:
            peak = pair.relay.step(batch, plan=plan).trace.peak_bytes("device")
            assert replay.peak_bytes("device") == peak != trace.peak_bytes("device")


def test_in_another_order_a_plan_has_no_memory_samples() -> None:
    text = str(plan_of()).replace("| F0/turn X0 B0 F1/turn X1 B1 P U", "| F0/turn F1/turn X0 B0 X1 B1 P U")
    trace = simulate(formula(), RelayConfig(micro_batches=2), plan=StepPlan.parse(text))
    assert trace.events and not trace.memory
    assert simulate(formula(), RelayConfig(micro_batches=2), plan=plan_of()).memory


# -- costs ---------------------------------------------------------------------------------------------------------------

LAYERS = 3
FORWARD_S = 1.0


def formula(**options: Any) -> Profile:
    """Three layers of equal size: forward takes 1 s, backward 3 s with recompute and 2 s without, a copy 0.25 s."""
    machine = Machine(flops_per_s=2000.0, update_params_per_s=1e6, h2d_bytes_per_s=16_000.0, d2h_bytes_per_s=16_000.0)
    sizes: dict[str, Any] = {"tokens": 1, "boundary_bytes": 4, "micro_batches": 2} | options
    return Profile.of_shapes(Shapes(layer_params=[1000] * LAYERS, shell_params=0, **sizes), machine)


def plan_of(settings: ScheduleSettings | None = None) -> StepPlan:
    layers = [f"L{index:03d}" for index in range(LAYERS)]
    return StepPlan.expected(settings or ScheduleSettings(2), layers, layers)


TOO_FAR_AHEAD = StepPlan.parse(str(plan_of()).replace("ahead=1", "ahead=2"))


def seconds_of(trace: Trace, kind: str) -> dict[str, float]:
    """Seconds of one micro-batch by layer."""
    return {e.layer: e.stop_s - e.start_s for e in trace.lanes["compute"] if (e.kind, e.k) == (kind, 0)}


@pytest.mark.parametrize("kept", [0, 1, 2, 3])
def test_a_kept_graph_saves_the_seconds_of_a_forward(kept: int) -> None:
    """The last layer is never recomputed; the profile is of a step that recomputes the others."""
    trace = simulate(
        formula(), RelayConfig(micro_batches=2), plan=plan_of(ScheduleSettings(2, slots=3, kept_graphs=kept))
    )
    recomputed = LAYERS - max(1, kept)
    backward_s = seconds_of(trace, "backward")
    assert [backward_s[f"L{i:03d}"] for i in range(LAYERS)] == pytest.approx(
        [3 * FORWARD_S] * recomputed + [2 * FORWARD_S] * (LAYERS - recomputed)
    )


def test_a_graph_that_is_dropped_costs_the_seconds_of_a_forward() -> None:
    text = str(plan_of()).replace("F0/turn X0 B0 F1/turn X1 B1 P U", "F0 X0 B0 F1 X1 B1 P U")
    trace = simulate(formula(), RelayConfig(micro_batches=2), plan=StepPlan.parse(text))
    assert seconds_of(trace, "backward")["L002"] == pytest.approx(3 * FORWARD_S)
    assert not trace.memory, "its activations are unknown"


def test_a_backward_that_was_split_by_a_wait_is_shortened_once() -> None:
    profile = formula()

    def halved(op: ComputeOp) -> list[ComputeOp]:
        return [op._replace(seconds=op.seconds / 2)] * 2 if op.kind == "backward" else [op]

    def split(_: int, turns: Sequence[TurnCost]) -> list[TurnCost]:
        return [turn._replace(ops=tuple(half for op in turn.ops for half in halved(op))) for turn in turns]

    plan = plan_of(ScheduleSettings(2, slots=3, kept_graphs=3))
    trace = simulate(profile.map_turns(split), RelayConfig(micro_batches=2), plan=plan)
    assert trace.busy_s("compute") == pytest.approx(2 * (LAYERS * FORWARD_S + LAYERS * 2 * FORWARD_S))
    assert trace.settings["keep"] == 3


def test_a_graph_does_not_outlive_the_slot_of_its_layer() -> None:
    """Two slots: by the time L000 goes back, another layer had its slot, so that it is recomputed."""
    text = str(plan_of()).replace("F0 F1", "F0/graph F1/graph")
    trace = simulate(formula(), RelayConfig(micro_batches=2), plan=StepPlan.parse(text))
    assert seconds_of(trace, "backward") == pytest.approx({"L002": 2.0, "L001": 2.0, "L000": 3.0})


def test_a_serial_plan_waits_for_every_copy_by_hand() -> None:
    """One slot, each layer loaded when it is visited: five loads of 0.25 s, none of them behind compute."""
    text = """
    plan micro_batches=1 ahead=0 slots=1
    -   -     I0
    0   L000  L:L000>0 | F0
    1   L001  L:L001>0 | F0
    2   L002  L:L002>0 | F0/turn X0 B0 P U
    -   -     T
    1'  L001  L:L001>0 | B0 P U
    0'  L000  L:L000>0 | B0 P U
    -   -     P:shell
    """
    trace = simulate(formula(micro_batches=1), RelayConfig(), plan=StepPlan.parse(text))
    update_s, copy_s, compute_s = 1000 / 1e6, 0.25, 3 * FORWARD_S + 2 * FORWARD_S + 2 * 3 * FORWARD_S
    assert [e.layer for e in trace.lanes["h2d"]] == ["shell", "L000", "L001", "L002", "L001", "L000"]
    assert trace.span_s == pytest.approx(compute_s + 5 * copy_s + 3 * (copy_s + update_s))
    assert (trace.settings["ahead"], trace.settings["resident"]) == (0, 0)


SGD = partial(torch.optim.SGD, lr=0.01)


@pytest.mark.parametrize("given", ["function", "plan"])
def test_a_schedule_of_the_settings_is_simulated(given: str) -> None:
    config, batch = RelayConfig(micro_batches=2, verify="never", seed=0), chain_batch(2)
    with Relay(Chain(4), SGD, "cpu", loss=squared_error, config=config) as relay:
        profile = Profile.of(relay.step(batch).trace)
        plan = relay.plan(batch, replace(config, schedule=serial))
        issued = relay.step(batch, plan=plan).trace
    simulated = simulate(profile, replace(config, schedule=serial if given == "function" else plan))
    for lane in ("compute", "h2d", "d2h"):
        assert shape_of(simulated, lane) == shape_of(issued, lane)
    own = simulate(profile, config)
    assert own.span_s < simulated.span_s, "it waits for every load"


@pytest.mark.parametrize("recorded", [(1, 1), (2, 1), (3, 1), (2, 0), (4, 2)])
@pytest.mark.parametrize("wanted", [(1, 0), (1, 1), (2, 1), (3, 1), (4, 0)])
def test_fetches_of_a_stash_are_simulated_or_refused(recorded: tuple[int, int], wanted: tuple[int, int]) -> None:
    """With few micro-batches and overlapping copies, tensors are still on the device when they are needed again."""
    was, config = (RelayConfig(micro_batches=k, ahead=ahead, stash="host", seed=0) for k, ahead in (recorded, wanted))
    rows = 12 // was.micro_batches * config.micro_batches
    with Relay(Chain(4), SGD, "cpu", loss=squared_error, config=was) as relay:
        profile = Profile.of(relay.step(chain_batch(1, 12)).trace)
        batch = chain_batch(1, rows)
        plan, forecast = relay.plan(batch, config), relay.forecast(batch, config)
        relay.config = config
        step = relay.step(batch).trace
    for given in (None, plan):
        try:
            simulated = simulate(profile, config, plan=given)
        except ValueError as error:
            assert "rehearse one with relay.forecast(batch, config)" in str(error)
            simulated = simulate(Profile.of(forecast.trace), config, plan=given)
        for lane in ("h2d", "d2h"):
            assert shape_of(simulated, lane) == shape_of(step, lane)


def test_a_plan_of_more_micro_batches_repeats_the_recorded_ones() -> None:
    trace = simulate(formula(), RelayConfig(), plan=plan_of(ScheduleSettings(5)))
    assert trace.busy_s("compute") == pytest.approx(5 * (3 + 2 + 2 * 3) * FORWARD_S)


def test_a_turn_that_is_not_offloaded_leaves_with_the_next_one() -> None:
    profile, config = formula(stash="host", micro_batches=2), RelayConfig(micro_batches=2, stash="host")
    plan = plan_of(ScheduleSettings(2, offloads=True))
    dropped = next(i for i, a in enumerate(plan.actions) if (a.kind, a.k, a.visit) == ("S", 0, 0))
    fewer = replace(plan, actions=plan.actions[:dropped] + plan.actions[dropped + 1 :])
    moved = [[(e.k, e.visit, e.nbytes) for e in simulate(profile, config, plan=p).lanes["d2h"] if e.kind == "stash"]
             for p in (plan, fewer)]  # fmt: skip
    assert (0, 0, 4) in moved[0] and (0, 1, 4) in moved[0]
    assert [each for each in moved[0] if each not in ((0, 0, 4), (0, 1, 4))] == [
        each for each in moved[1] if each != (0, 1, 8)
    ]


# -- refusals ------------------------------------------------------------------------------------------------------------


def of_other_settings(**settings: Any) -> Callable[[Profile], Trace]:
    return lambda profile: simulate(profile, RelayConfig(micro_batches=2, **settings), plan=plan_of())


@pytest.mark.all_cases
@pytest.mark.parametrize(
    "run, message",
    [
        (of_other_settings(stash="host"), "stash='host', where the plan has offloads=False"),
        (of_other_settings(schedule="depth_first"), "schedule='depth_first'"),
        (lambda p: simulate(p, RelayConfig(), workers=2, plan=plan_of()), "several workers"),
        (lambda p: simulate(p.aggregated(), RelayConfig(), plan=plan_of()), "micro-batches are merged"),
        (lambda p: simulate(p, RelayConfig(), plan=TOO_FAR_AHEAD), "2 slots, too few for the plan's ahead=2"),
        (
            lambda p: simulate(p, RelayConfig(), plan=plan_of(ScheduleSettings(2, loss_per_micro_batch=False))),
            "one loss of the batch",
        ),
    ],
)
def test_what_has_no_plan_is_refused(run: Callable[[Profile], Trace], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        run(formula())
    assert simulate(formula(), RelayConfig(), plan=plan_of()).events, "a plan of its step"


def test_a_plan_of_other_layers_is_refused() -> None:
    profile = Profile.of_shapes(
        Shapes(layer_params=[1000] * 2, shell_params=0, tokens=1, boundary_bytes=4), Machine(1e3, 1e6, 1e6, 1e6)
    )
    with pytest.raises(ValueError, match="the plan visits L000, L001, L002, and the profile's step visits L000, L001"):
        simulate(profile, RelayConfig(), plan=plan_of())


def test_a_broken_plan_is_refused_before_it_is_simulated() -> None:
    plan = plan_of()
    with pytest.raises(PlanError, match="append P:shell"):
        simulate(formula(), RelayConfig(), plan=replace(plan, actions=plan.actions[:-1]))


def test_layers_that_need_no_backward_are_refused() -> None:
    kind = BY_NAME["frozen_prefix"]
    with both(kind, RelayConfig(micro_batches=2)) as pair:
        profile = Profile.of(pair.relay.step(kind.make_batch(4, 0)).trace)
        plan = pair.relay.plan(kind.make_batch(4, 0))
    with pytest.raises(ValueError, match="has no backward in the profile"):
        simulate(profile, RelayConfig(micro_batches=2), plan=plan)
    assert simulate(profile, RelayConfig(micro_batches=2)).events, "the remedy"
