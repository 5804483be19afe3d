"""Profiles and their replay: the same events and bytes as the recorded step, and times that can be checked by hand."""

from __future__ import annotations

import importlib
import json
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from deep_models import Chain, chain_batch, squared_error
from oracle import adamw, both
from patience import rarely
from zoo import BY_NAME, Kind

from l2l_core import EmulatedDevice, Machine, Profile, Relay, RelayConfig, Shapes, Trace, simulate

KINDS = (
    "chain", "gpt2", "gpt2_untied", "bert", "t5", "whisper", "qwen3_moe", "albert", "resnet", "unet", "lstm_stack",
    "spectral_norm_old", "tied_layers", "frozen_prefix", "lora", "lora_tied", "lora_llama", "lora_albert",
)  # fmt: skip
kinds = pytest.mark.parametrize("kind", [BY_NAME[name] for name in KINDS], ids=str)
DEPTH_FIRST: dict[str, Any] = {"schedule": "depth_first", "keep": 12, "resident": 12}
LANES = ("compute", "h2d", "d2h", "eps")


def recorded(config: RelayConfig, device: EmulatedDevice | None = None, depth: int = 4) -> Trace:
    """The third step of a small chain."""
    batch = chain_batch(config.micro_batches)
    optimizer = partial(torch.optim.AdamW, lr=1e-3)
    with Relay(Chain(depth), optimizer, device=device or EmulatedDevice(), loss=squared_error, config=config) as relay:
        return [relay.step(batch) for _ in range(3)][-1].trace


def shape_of(trace: Trace, lane: str) -> list[tuple[Any, ...]]:
    """What happened on a lane, without times."""
    return [(e.kind, e.layer, e.k, e.nbytes, e.visit, e.stay, e.slot, e.piece, e.pieces) for e in trace.lanes[lane]]


# -- a recorded step -------------------------------------------------------------------------------------------------


@kinds
@pytest.mark.parametrize("stash", ["device", "host"])
@pytest.mark.parametrize("ahead, update", [rarely(0, "eager"), (1, "eager"), rarely(1, "deferred"), (2, "eager")])
def test_a_replay_has_the_same_events_and_bytes(kind: Kind, stash: str, ahead: int, update: str) -> None:
    """Invariant 4, on every lane in order, and every memory sample."""
    check_replay(kind, RelayConfig(micro_batches=3, stash=stash, ahead=ahead, update=update))


@kinds
@pytest.mark.parametrize("ahead, update", [(1, "eager"), rarely(0, "eager"), rarely(1, "deferred")])
def test_a_replay_depth_first(kind: Kind, ahead: int, update: str) -> None:
    check_replay(kind, RelayConfig(micro_batches=3, ahead=ahead, update=update, **DEPTH_FIRST))


def check_replay(kind: Kind, config: RelayConfig) -> None:
    with both(kind, config) as pair:
        trace = [pair.relay.step(kind.make_batch(7, seed)) for seed in range(3)][-1].trace
        replay = simulate(Profile.of(trace), config, pair.relay.device)
    for lane in LANES:
        assert shape_of(replay, lane) == shape_of(trace, lane), lane
    assert [(m.place, m.bytes_by_category) for m in replay.memory] == [
        (m.place, m.bytes_by_category) for m in trace.memory
    ]
    assert replay.peak_bytes("device") == trace.peak_bytes("device")


@pytest.mark.parametrize("micro_batches", [1, 2, 5])
@pytest.mark.parametrize("stash", ["device", "host"])
def test_a_replay_takes_the_recorded_compute_and_the_stated_link(stash: str, micro_batches: int) -> None:
    config = RelayConfig(micro_batches=micro_batches, stash=stash)
    trace = recorded(config)
    link = EmulatedDevice(h2d_bytes_per_s=1e6, d2h_bytes_per_s=2e6, latency_s=1e-3)
    replay = simulate(Profile.of(trace), config, link)
    assert replay.busy_s("compute") == pytest.approx(trace.busy_s("compute"))
    assert replay.busy_s("eps") == pytest.approx(trace.busy_s("eps"))
    for lane, bytes_per_s in (("h2d", 1e6), ("d2h", 2e6)):
        events = replay.lanes[lane]
        assert sum(e.nbytes for e in events) == sum(e.nbytes for e in trace.lanes[lane])
        for event in events:
            assert event.stop_s - event.start_s == pytest.approx(1e-3 + event.nbytes / bytes_per_s)
    assert replay.settings["h2d_bytes_per_s"] == 1e6 and replay.settings["ahead"] == 1


@pytest.mark.parametrize("ahead", [0, 1, 3])
@pytest.mark.parametrize("stash", ["device", "host"])
def test_lanes_are_serial_and_nothing_is_used_before_it_is_there(stash: str, ahead: int) -> None:
    config = RelayConfig(micro_batches=3, stash=stash, ahead=ahead)
    replay = simulate(Profile.of(recorded(config)), config, EmulatedDevice(h2d_bytes_per_s=3e6, d2h_bytes_per_s=3e6))
    for lane in LANES:
        for before, after in pairwise(replay.lanes[lane]):
            assert after.start_s >= before.stop_s - 1e-12, (before, after)
    for load in (e for e in replay.events if e.kind == "load"):
        used = [e for e in replay.events if e.kind in ("forward", "backward") and e.layer == load.layer]
        later = [e for e in used if e.start_s >= load.stop_s]
        between = [e for e in used if load.start_s < e.stop_s and e.start_s < load.stop_s]
        assert not between and (later or load.layer == "shell")
    for update in (e for e in replay.events if e.kind == "update"):
        pushed = [e for e in replay.events if e.kind == "push" and e.layer == update.layer]
        assert max(e.stop_s for e in pushed) <= update.start_s
    arrived = {(e.visit, e.k): e.stop_s for e in replay.events if e.kind == "fetch" and e.visit >= 0}
    for event in replay.lanes["compute"]:
        assert arrived.get((event.visit, event.k), 0.0) <= event.start_s + 1e-12


def test_without_overlap_a_replay_is_a_row() -> None:
    config = RelayConfig(micro_batches=2, stash="host", ahead=0)
    replay = simulate(Profile.of(recorded(config)), config, EmulatedDevice(h2d_bytes_per_s=3e6, d2h_bytes_per_s=3e6))
    for before, after in pairwise(replay.events):
        assert after.start_s >= before.stop_s - 1e-12, (before, after)


def test_other_numbers_of_micro_batches_repeat_the_recorded_ones() -> None:
    trace = recorded(RelayConfig(micro_batches=2))
    profile = Profile.of(trace)
    replay = simulate(profile, RelayConfig(micro_batches=6))
    assert {e.k for e in replay.events if e.kind == "forward"} == set(range(6))
    assert replay.busy_s("compute") == pytest.approx(3 * trace.busy_s("compute"))
    assert sum(e.nbytes for e in replay.events if e.kind == "load") == sum(
        e.nbytes for e in trace.events if e.kind == "load"
    )
    assert profile.with_micro_batches(2) is profile


def test_running_further_ahead_loads_less_and_is_never_slower() -> None:
    profile = Profile.of(recorded(RelayConfig(micro_batches=2), depth=6))
    link = EmulatedDevice(h2d_bytes_per_s=2e7, d2h_bytes_per_s=2e7)
    replays = [simulate(profile, RelayConfig(micro_batches=2, ahead=ahead), link) for ahead in (0, 1, 2)]
    assert [sum(e.kind == "load" and e.layer != "shell" for e in r.events) for r in replays] == [11, 10, 9]
    assert replays[0].span_s > replays[1].span_s >= replays[2].span_s - 1e-9


def test_a_profile_survives_a_file(tmp_path: Path) -> None:
    config = RelayConfig(micro_batches=3, stash="host")
    profile = Profile.of(recorded(config))
    again = Profile.load(profile.save(tmp_path / "profile.json"))
    assert again == profile
    assert simulate(again, config).events == simulate(profile, config).events


@pytest.mark.parametrize(
    "damage",
    [lambda t: t[: len(t) // 2], lambda t: t.replace("l2l-profile", "other"), lambda t: "[]", lambda t: "{}"],
)
def test_a_damaged_file_is_named(tmp_path: Path, damage: Any) -> None:
    path = Profile.of(recorded(RelayConfig())).save(tmp_path / "profile.json")
    path.write_text(damage(path.read_text()))
    with pytest.raises(ValueError, match=r"profile\.json: not a file of Profile.save"):
        Profile.load(path)


def test_a_profile_of_another_version_is_refused(tmp_path: Path) -> None:
    path = Profile.of(recorded(RelayConfig())).save(tmp_path / "profile.json")
    path.write_text(path.read_text().replace('"version": 1', '"version": 9'))
    with pytest.raises(
        ValueError, match=r"profile\.json has version 9 of .*reads version 1: save the profile of a new step"
    ):
        Profile.load(path)


def test_a_trace_saved_and_read_gives_the_same_profile(tmp_path: Path) -> None:
    trace = recorded(RelayConfig(micro_batches=2, stash="host"))
    trace.to_jsonl(tmp_path / "step.jsonl")
    assert Profile.of(Trace.from_jsonl(tmp_path / "step.jsonl")) == Profile.of(trace)


def test_bytes_of_another_setting_are_refused() -> None:
    profile = Profile.of(recorded(RelayConfig(micro_batches=2)))
    with pytest.raises(ValueError, match=r"stash='host'.*record a step"):
        simulate(profile, RelayConfig(micro_batches=2, stash="host"))
    with pytest.raises(ValueError, match="precision='bf16'"):
        simulate(profile, RelayConfig(micro_batches=2, precision="bf16"))
    with pytest.raises(ValueError, match="not a whole training step"):
        Profile.of(Trace())


# -- by formula ------------------------------------------------------------------------------------------------------

MACHINE = Machine(flops_per_s=1e9, update_params_per_s=1e6, h2d_bytes_per_s=1e6, d2h_bytes_per_s=1e6)


def formula(depth: int = 4, params: int = 1000, **options: Any) -> Profile:
    sizes = {"tokens": 500, "boundary_bytes": 100, "micro_batches": 2} | options
    return Profile.of_shapes(Shapes(layer_params=[params] * depth, shell_params=10, **sizes), MACHINE)


@pytest.mark.parametrize(
    "config",
    [RelayConfig(micro_batches=2, keep=12, resident=12), RelayConfig(micro_batches=3, **DEPTH_FIRST)],
    ids=["breadth first", "other micro-batches"],
)
def test_a_step_depth_first_tells_of_no_other_one(config: RelayConfig) -> None:
    trace = recorded(RelayConfig(micro_batches=2, **DEPTH_FIRST))
    with pytest.raises(ValueError, match=r"schedule='depth_first'.*record a step with these settings, or rehearse one"):
        simulate(Profile.of(trace), config)
    with pytest.raises(ValueError, match="schedule='breadth_first', but 2 with schedule='depth_first'"):
        simulate(Profile.of(recorded(RelayConfig(micro_batches=2))), RelayConfig(micro_batches=2, **DEPTH_FIRST))


def test_compute_by_formula_is_eight_operations_per_token_and_parameter() -> None:
    """2 forward, 6 in backward; the last layer's backward 4; three times the forward of the shell at the loss."""
    replay = simulate(formula(depth=5), RelayConfig(micro_batches=2))
    per_layer_s = 2 * 1000 * 500 / 1e9
    expected_s = 2 * (5 * per_layer_s + 4 * 3 * per_layer_s + 2 * per_layer_s + 3 * 2 * 10 * 500 / 1e9)
    assert replay.busy_s("compute") == pytest.approx(expected_s)


def test_a_schedule_by_hand() -> None:
    """Three layers, one micro-batch, a link that takes 4 ms for a load or push against 1 ms of forward compute."""
    profile = formula(depth=3, micro_batches=1)
    replay = simulate(profile, RelayConfig())
    starts = {(e.kind, e.layer): round(e.start_s * 1e3, 3) for e in replay.lanes["compute"]}
    shell, load, forward = 0.04, 4.0, 1.0
    first = shell + load
    assert starts["forward", "L000"] == pytest.approx(first)
    assert starts["forward", "L001"] == pytest.approx(first + load), "loaded while L000 computed for 1 ms"
    assert starts["forward", "L002"] == pytest.approx(first + 2 * load), "issued when L001 began, in L000's slot"
    turn = first + 2 * load + forward
    assert starts["loss", "shell"] == pytest.approx(turn)
    assert starts["backward", "L002"] == pytest.approx(turn + 0.03)
    assert starts["backward", "L001"] == pytest.approx(turn + 0.03 + 2 * forward), "still in its slot"
    assert starts["backward", "L000"] == pytest.approx(turn + 0.03 + 2 * forward + load), "issued when L001 began"
    assert [e.layer for e in replay.lanes["h2d"]] == ["shell", "L000", "L001", "L002", "L000"]
    tail = starts["backward", "L000"] + 3 * forward
    pushes = [round(e.stop_s * 1e3, 3) for e in replay.lanes["d2h"]]
    assert pushes[-2:] == pytest.approx([tail + 5, tail + 5.04]), "the push of L001 took another millisecond"
    assert replay.span_s * 1e3 == pytest.approx(tail + 5 + 1 + 0.01), "L000's update, then the shell's"


def test_a_slow_link_binds_and_the_number_of_micro_batches_that_hides_it_does() -> None:
    """The whole circle: simulate, ask what binds, follow the advice, simulate again."""
    profile = formula(depth=30, micro_batches=2)
    slow = simulate(profile, RelayConfig(micro_batches=2))
    (forward,) = [bound for bound in slow.bound_by() if bound.phase == "forward"]
    assert forward.lane == "h2d" and forward.settings == {"micro_batches": 4}
    hidden = simulate(profile, RelayConfig(micro_batches=4))
    assert next(b for b in hidden.bound_by() if b.phase == "forward").lane == "compute"
    still = simulate(profile, RelayConfig(micro_batches=3))
    assert next(b for b in still.bound_by() if b.phase == "forward").lane == "h2d"


@pytest.mark.parametrize("stash", ["device", "host"])
def test_beyond_20000_events_micro_batches_count_as_one(stash: str) -> None:
    profile = formula(depth=400, micro_batches=32, stash=stash)
    replay = simulate(profile, RelayConfig(micro_batches=32, stash=stash))
    assert 400 < len(replay.events) < 20_000
    assert {e.k for e in replay.events} == {-1}
    whole = 32 * sum(op.seconds for stay in profile.stays for op in stay.turns[0].ops)
    assert replay.busy_s("compute") == pytest.approx(whole)
    moved = sum(turn.fetch_bytes for stay in profile.stays for turn in stay.turns)
    assert sum(e.nbytes for e in replay.events if e.kind == "fetch") == moved


def test_taken_together_micro_batches_keep_their_sums(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also of gradients that leave apart, as those of tied embeddings do."""
    config = RelayConfig(micro_batches=3, stash="host")
    with both(BY_NAME["gpt2"], config) as pair:
        trace = [pair.relay.step(BY_NAME["gpt2"].make_batch(7, seed)) for seed in range(2)][-1].trace
    profile = Profile.of(trace)
    whole = simulate(profile, config)
    monkeypatch.setattr(importlib.import_module("l2l_core.simulator.simulation"), "MAX_EVENTS", 0)
    together = simulate(profile, config)
    assert {e.k for e in together.events} == {-1}
    assert any(e.k >= 0 for e in whole.events if e.kind == "push")
    for lane in ("h2d", "d2h"):
        for kind in {e.kind for e in whole.lanes[lane]}:
            sums = [sum(e.nbytes for e in t.lanes[lane] if e.kind == kind) for t in (whole, together)]
            assert sums[0] == sums[1], kind
    for lane in ("compute", "eps"):
        assert together.busy_s(lane) == pytest.approx(whole.busy_s(lane))


def test_advice_on_micro_batches_taken_together_counts_the_real_ones() -> None:
    profile = formula(depth=400, micro_batches=32, boundary_bytes=1, tokens=10)
    replay = simulate(profile, RelayConfig(micro_batches=32))
    assert {e.k for e in replay.events} == {-1}
    forward = next(bound for bound in replay.bound_by() if bound.phase == "forward")
    assert forward.lane == "h2d" and "instead of 32" in str(forward)
    assert forward.settings["micro_batches"] == 200, "4 ms of load under 0.02 ms of compute per micro-batch"


def test_shapes_that_make_no_relay_are_refused() -> None:
    with pytest.raises(ValueError, match="at least one layer"):
        formula(depth=0)
    with pytest.raises(ValueError, match="tokens=0"):
        formula(tokens=0)
    with pytest.raises(ValueError, match="flops_per_s=0"):
        Machine(0, 1, 1, 1)


def test_a_profile_by_formula_survives_a_file(tmp_path: Path) -> None:
    path = formula().save(tmp_path / "formula.json")
    assert json.loads(path.read_text())["schema"] == "l2l-profile"
    assert Profile.load(path) == formula()


def test_several_workers_are_refused_depth_first() -> None:
    kind, config = BY_NAME["gpt2"], RelayConfig(schedule="depth_first")
    model, batch = kind.make_model(), kind.make_batch(2)
    with Relay(model, adamw(model), EmulatedDevice(), config=config) as relay:
        with pytest.raises(ValueError, match="schedule='depth_first' is not there for several workers"):
            relay.forecast(batch, workers=2)
        with pytest.raises(ValueError, match="schedule='depth_first' is not there for several workers"):
            simulate(Profile.of(relay.step(batch).trace), config, workers=2)
