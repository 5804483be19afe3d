"""Depth, freezing and layers that sit out as functions of the step."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from small import assert_same, keys, make_batch, make_gpt, make_relay, state_of
from torch import nn

import l2l_core
from l2l_core import (
    ActiveLayers,
    Depth,
    Drop,
    EmulatedDevice,
    Freezing,
    LayerDrop,
    Relay,
    RelayConfig,
    Schedule,
    WarmupStableDecay,
)
from l2l_core.edits.skip_schedules import draw_skipped


@pytest.fixture
def relay() -> Iterator[Relay]:
    with make_relay(make_gpt(), loss_over="micro-batch") as made:  # a bad batch fails in the step itself
        yield made


def origins(relay: Relay) -> str:
    """By layer, the number of the original layer that it goes back to."""
    return "".join(str(int(relay._editor.registry.origin[unit.key][1:])) for unit in relay.stack)


def run(schedule: Schedule, relay: Relay, until: int) -> list[str]:
    """Step up to a number of steps; the origins of the layers at every step."""
    seen = []
    while relay.steps < until:
        schedule.step(relay, make_batch(relay.steps))
        seen.append(origins(relay))
    return seen


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        (Depth({0: 3, 1: 6, 2: 9, 3: 12}, "middle"), ["012", "012012", "012012012", "012012012012"]),
        (Depth({0: 2, 1: 4, 2: 6, 3: 7}, "top"), ["01", "0101", "010101", "0101011"]),
        (Depth({0: 3, 2: 6, 4: 12}, "top"), ["012", "012", "012012", "012012", "012012012012"]),
        (Depth({0: 3, 2: 5}, "middle"), ["012", "012", "01012"]),
        (Depth(5, "middle"), ["01123"] * 3),
        (Depth({0: 4, 1: 6}, "middle"), ["0123", "010123"]),
        (Depth({0: 3, 1: 5}, "interleaved"), ["012", "00122"]),
        (Depth({1: 8}, "interleaved"), ["0123", "00112233"]),
        (Depth({1: 9}, "top"), ["0123", "012301233"]),
        (Depth({0: 2, 1: 4, 2: 5}, "identity"), ["01", "0011", "00111"]),
        (Depth(lambda step: 4 - step, shrink="top"), ["0123", "012", "01"]),
        (Depth(lambda step: 4 - step, shrink="bottom"), ["0123", "123", "23"]),
    ],
)
def test_depth_follows_the_step(relay: Relay, schedule: Schedule, expected: list[str]) -> None:
    if len(expected[0]) < 4:
        relay.apply(Drop(slice(len(expected[0]), None)))
    assert run(schedule, relay, len(expected)) == expected
    assert schedule.edits(relay) == () or not isinstance(schedule.depth, dict)
    assert relay.verify(make_batch()).equal and relay.model.config.n_layer == len(relay.stack)


def test_growth_by_identity_does_not_move_the_loss(relay: Relay) -> None:
    schedule = Depth({1: 11}, "identity", warmup=3)
    relay.step(make_batch())
    loss = relay.evaluate(make_batch(1))
    schedule.prepare(relay)
    assert len(relay.stack) == 11 and len(relay.journal) == 1
    assert relay.evaluate(make_batch(1)) == pytest.approx(loss, abs=1e-6)


def test_layers_of_least_influence_go_once_it_is_known(relay: Relay) -> None:
    schedule = Depth({0: 3, 2: 2}, shrink="influence")
    assert schedule.edits(relay) == []
    schedule.step(relay, make_batch())
    assert len(relay.stack) == 4, "nothing was known"
    for depth in (3, 2):
        least = min(relay.stack, key=lambda unit: unit.stats["influence"])
        schedule.step(relay, make_batch(relay.steps))
        assert len(relay.stack) == depth and least not in relay.stack
    schedule.step(
        relay,
        make_batch(3),
    )
    assert len(relay.stack) == 2


def test_a_layer_whose_influence_is_not_known_stays(relay: Relay) -> None:
    relay.step(make_batch(), skip=["L000", "L002"])
    assert Depth({0: 1}, shrink="influence").edits(relay) == [], "three must go, and two are known"
    assert [edit.layers for edit in Depth({0: 2}, shrink="influence").edits(relay)] == ["L001", "L003"]


MIXED: Callable[[], Schedule] = lambda: (  # noqa: E731
    Depth({0: 3, 2: 6, 5: 4}, "identity", optimizer="copy", warmup=2) + Freezing({1: 1, 3: 2, 4: 0}) + LayerDrop(0.3)
)


@pytest.mark.parametrize("pause", [2, 3, 5])
def test_a_run_that_was_saved_and_loaded_goes_on_to_the_bit(pause: int, tmp_path: Path) -> None:
    with make_relay(make_gpt()) as relay:
        run(MIXED(), relay, pause)
        relay.save(tmp_path)
        run(MIXED(), relay, 7)
        with Relay.load(tmp_path, make_gpt(), partial(torch.optim.AdamW, lr=1e-2), device=EmulatedDevice()) as again:
            run(MIXED(), again, 7)
            assert keys(again) == keys(relay) and [e.what for e in again.journal] == [e.what for e in relay.journal]
            for a, b in zip(again.model.parameters(), relay.model.parameters(), strict=True):
                assert torch.equal(a, b)
            assert again.evaluate(make_batch()) == relay.evaluate(make_batch())


def test_a_step_that_is_tried_again_does_the_same(relay: Relay) -> None:
    schedule = Depth({0: 6}, "top") + LayerDrop(0.5)
    bad = {"input_ids": torch.full((4, 8), 99), "labels": make_batch()["labels"]}
    with pytest.raises(IndexError):
        schedule.step(relay, bad)
    skipped = schedule.skip(relay)
    assert len(relay.stack) == 6 and len(relay.journal) == 1
    moved = {event.layer for event in schedule.step(relay, make_batch()).trace.events if event.kind == "forward"}
    assert moved == set(keys(relay)) - set(skipped) and len(relay.journal) == 1


def test_frozen_layers_are_frozen_from_the_bottom_and_thaw(relay: Relay) -> None:
    schedule = Freezing({1: 2, 2: 3, 3: 1, 4: 9, 5: 0})
    seen = []
    for step in range(6):
        schedule.step(relay, make_batch(step))
        seen.append("".join("-+"[not unit.frozen] for unit in relay.stack))
    assert seen == ["++++", "--++", "---+", "-+++", "----", "++++"]
    assert [e.what for e in relay.journal][:3] == [
        "Freeze(layers=slice(0, 2, None))",
        "Freeze(layers=slice(2, 3, None))",
        "Unfreeze(layers=slice(1, 3, None))",
    ], "only what needs it"
    assert relay.verify(make_batch()).equal


def test_a_frozen_bottom_is_neither_loaded_nor_run_in_backward() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(32, 16), *(nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(5)))
    model[0].requires_grad_(False)
    optimizer = partial(torch.optim.SGD, lr=0.1)
    x = torch.randint(32, (4, 8))
    with Relay(model, optimizer, EmulatedDevice(), list(model)[1:], lambda y, b: y.square().mean()) as relay:
        result = Freezing({0: 3}).step(relay, (x,))
        backward = [event.layer for event in result.trace.events if event.kind == "backward"]
        loads = [event.layer for event in result.trace.events if event.kind == "load" and event.layer != "shell"]
        assert backward == ["L004", "L003"] and sorted(loads) == ["L000", "L001", "L002", "L003", "L004"]


def test_schedules_add_up_and_each_finds_what_the_one_before_left(relay: Relay) -> None:
    schedule = Depth({0: 8}, "interleaved") + Freezing({0: 5}) + LayerDrop(lambda x: float(x == 1))
    schedule.step(relay, make_batch())
    assert origins(relay) == "00112233" and [unit.frozen for unit in relay.stack] == [True] * 5 + [False] * 3
    assert schedule.skip(relay) == [relay.stack[-1].key] and relay.stack[-1].version == 0
    assert [entry.what.split("(")[0] for entry in relay.journal] == ["Duplicate", "Freeze"]
    with pytest.raises(TypeError, match="unsupported operand"):
        schedule + 3  # noqa: B018


@pytest.mark.parametrize(
    ("rate", "expected"),
    [
        (0.25, lambda x, step: 0.25),
        (lambda x: 0.5 * x, lambda x, step: 0.5 * x),
        (lambda x, step: x * (1 - math.exp(-step / 500)), lambda x, step: x * (1 - math.exp(-step / 500))),
    ],
)
def test_layers_sit_out_as_often_as_the_rate_says(rate: Any, expected: Callable[[float, int], float]) -> None:
    names, steps = [f"L{i:03d}" for i in range(8)], 4000
    schedule, counts = LayerDrop(rate), dict.fromkeys(names, 0)
    for step in range(steps):
        for key in draw_skipped(0, step, schedule.rates(names, step)):
            counts[key] += 1
    for i, key in enumerate(names):
        mean = sum(expected(i / 7, step) for step in range(steps)) / steps
        assert counts[key] / steps == pytest.approx(mean, abs=4 * math.sqrt(0.25 / steps))


def test_draws_depend_on_seed_step_and_layer_alone(relay: Relay) -> None:
    rates = dict.fromkeys((f"L{i:03d}" for i in range(50)), 0.5)
    first = draw_skipped(0, 7, rates)
    torch.manual_seed(5)
    assert draw_skipped(0, 7, dict(reversed(rates.items()))) == first[::-1]
    assert draw_skipped(1, 7, rates) != first != draw_skipped(0, 8, rates)
    assert all(len(draw_skipped(0, step, dict.fromkeys(rates, 1.0))) == 49 for step in range(20)), "never all of them"
    assert draw_skipped(0, 0, {"L000": 1.0}) == [] and draw_skipped(0, 0, dict.fromkeys(rates, 0.0)) == []
    assert (
        LayerDrop(1.0).skip(relay) == draw_skipped(0, 0, dict.fromkeys(keys(relay), 1.0))
        and len(LayerDrop(1.0).skip(relay)) == 3
    )


def test_an_empty_group_of_edits_is_refused(relay: Relay) -> None:
    with pytest.raises(ValueError, match="without an edit"):
        relay.apply()
    assert relay.journal == ()


@pytest.mark.all_cases
@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: Depth("3"), TypeError, "depth='3'"),
        (lambda: Depth({}), ValueError, "pass at least one value by its first step"),
        (lambda: Depth({0: 0}), ValueError, "depth from step 0 on is 0"),
        (lambda: Depth({-1: 3}), ValueError, "a step of depth is -1"),
        (lambda: Depth({0: 3}, "outwards"), ValueError, "grow='outwards'"),
        (lambda: Depth({0: 3}, shrink="random"), ValueError, "shrink='random'"),
        (lambda: Depth({0: 3}, optimizer="half"), ValueError, "optimizer='half'"),
        (lambda: Depth({0: 3}, warmup=-1), ValueError, "warmup=-1"),
        (lambda: Depth({0: 3}, park="tape"), ValueError, "park='tape'"),
        (lambda: Freezing({0: -1}), ValueError, "frozen from step 0 on is -1"),
        (lambda: LayerDrop(1.5), ValueError, "rate=1.5"),
        (lambda: LayerDrop("half"), ValueError, "rate='half'"),
        (lambda: LayerDrop(lambda: 0.5), TypeError, "relative depth"),
    ],
)
def test_a_schedule_that_makes_no_sense_cannot_be_made(
    make: Callable[[], Schedule], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        make()


@pytest.mark.parametrize(
    ("schedule", "message"),
    [
        (Depth(lambda step: 2.5), r"depth\(0\) is 2.5"),
        (Depth({0: 3}, stack="encoder"), r"there are 'transformer.h' \(4 layers\)"),
        (LayerDrop(0.5, stack="encoder"), "there are 'transformer.h'"),
        (LayerDrop(lambda x: 2 * x), r"rate=1.33\d* for L002 in step 0"),
    ],
)
def test_what_does_not_fit_the_relay_is_refused_before_the_step(relay: Relay, schedule: Schedule, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        schedule.step(relay, make_batch())
    assert relay.steps == 0 and len(relay.stack) == 4


# -- layers that begin to run later --------------------------------------------------------------------------------------


def without_dropout(model: nn.Module) -> nn.Module:
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    return model


def train_plainly(model: nn.Module, steps: int, layers: int) -> list[float]:
    """Losses of plain training by AdamW, of a model whose first `layers` layers run."""
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=1e-2), []
    model.transformer.h = model.transformer.h[:layers]
    for step in range(steps):
        loss = model(**make_batch(step), use_cache=False).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("count", [0, 1])
def test_a_model_with_few_running_layers_trains_as_the_shallow_one(count: int) -> None:
    plain = without_dropout(make_gpt())
    initial = copy.deepcopy(plain).state_dict()
    expected = train_plainly(plain, 4, count)
    with make_relay(without_dropout(make_gpt()), config=RelayConfig(micro_batches=1)) as relay:
        schedule = ActiveLayers({0: count, 4: 4})
        assert [schedule.step(relay, make_batch(step)).loss for step in range(4)] == expected
        trained = dict(plain.named_parameters())
        for name, param in relay.model.named_parameters():
            assert torch.equal(param, trained.get(name, initial[name])), name
        idle = [key for key in state_of(relay) if key.startswith(f"transformer.h.{count}.") and "/" in key]
        assert not idle  # no optimizer state
        assert schedule.skip(relay) == [] and schedule.step(relay, make_batch(4)).loss > 0
        assert relay.verify(make_batch(5)).equal


@pytest.mark.parametrize("count", [0, 1])
def test_the_evaluated_model_is_the_one_that_trains(count: int) -> None:
    """The shallow model until the step in which all layers run is done; to the bit, and without a trace in training."""
    shallow = make_gpt()
    shallow.transformer.h = shallow.transformer.h[:count]
    with make_relay(make_gpt()) as relay, make_relay(make_gpt()) as other, torch.no_grad():
        schedule = ActiveLayers({0: count, 1: 4}) + WarmupStableDecay(3)
        for step in range(2):
            for each in (relay, other):
                schedule.step(each, make_batch(step))
            skip = schedule.skip_in_evaluation(relay)
            assert skip == [f"L{i:03}" for i in range(count if step == 0 else 4, 4)]
            shallow.load_state_dict(relay.model.state_dict(), strict=False)
            parts = [{key: value[rows] for key, value in make_batch(9).items()} for rows in (slice(2), slice(2, 4))]
            losses = [shallow.eval()(**part, use_cache=False).loss for part in parts]
            expected = (losses[0] / 2 + losses[1] / 2).item()
            probed = relay.probe([make_batch(9)], skip=skip)
            assert probed == [relay.evaluate(make_batch(9), skip=skip)]
            assert (probed == [expected]) == (step == 0) and relay.evaluate(make_batch(9)) != expected
        assert_same(state_of(relay), state_of(other))
        assert relay.verify(make_batch(5)).equal
    assert not LayerDrop(0.5).skip_in_evaluation(relay)  # whose model is the whole one


def test_zero_running_layers_are_refused_where_no_layer_can_stand_aside() -> None:
    """A residual sum around the layer: the layer's output is not as its input."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(4, 2) for _ in range(2))

        def forward(self, x: torch.Tensor) -> SimpleNamespace:
            for layer in self.layers:
                x = torch.cat([x[:, :2], layer(x)], 1)
            return SimpleNamespace(loss=x.square().mean())

    relay = Relay(Model(), partial(torch.optim.SGD, lr=0.1), EmulatedDevice(), config=RelayConfig())
    with relay:
        with pytest.raises(ValueError, match="one layer must run"):
            ActiveLayers(0).step(relay, {"x": torch.ones(2, 4)})
        assert ActiveLayers(1).step(relay, {"x": torch.ones(2, 4)}).loss > 0  # the remedy


# -- the learning rate ---------------------------------------------------------------------------------------------------


def test_the_rate_rises_stays_and_falls() -> None:
    schedule = WarmupStableDecay(10, warmup=2, decay=4)
    factors = [schedule.factor(step) for step in range(12)]
    assert factors == pytest.approx([0.5, 1, 1, 1, 1, 1, 0.8, 0.6, 0.4, 0.2, 0.2, 0.2])
    restarted = WarmupStableDecay(10, warmup=2, decay=2, restarts=(4,))
    assert [restarted.factor(step) for step in range(3, 7)] == [1, 0.5, 1, 1]
    assert {WarmupStableDecay(3).factor(step) for step in range(5)} == {1}


def test_every_group_of_the_optimizer_gets_the_factor(relay: Relay) -> None:
    """From its own rate, in every step anew, for layers that grow too, and in a loaded relay."""
    relay.optimizer.param_groups[0]["lr"] = 0.5
    schedule = Depth({0: 4, 2: 6}) + WarmupStableDecay(4, warmup=2, decay=1)
    rates = []
    for step in range(4):
        schedule.step(relay, make_batch(step))
        rates.append(relay.optimizer.param_groups[0]["lr"])
    assert rates == [0.25, 0.5, 0.5, 0.25] and len(relay.stack) == 6


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: ActiveLayers(-1), "active"),
        (lambda: WarmupStableDecay(0), "steps is 0"),
        (lambda: WarmupStableDecay(10, warmup=-1), "warmup is -1"),
        (lambda: WarmupStableDecay(10, warmup=6, decay=5), "more than steps=10: shorten"),
        (lambda: WarmupStableDecay(10, restarts=[-2]), "a restart is -2"),
    ],
)
def test_schedules_of_rate_and_running_layers_check_their_values(make: Callable[[], Schedule], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def test_schedules_of_a_former_release_name_what_to_use() -> None:
    with pytest.raises(ImportError, match=r"l2l_core.gradual_stacking was removed: use a schedule as Depth\(") as told:
        exec("from l2l_core import gradual_stacking")
    schedule = eval(str(told.value).partition(" as ")[2])
    assert schedule.depth == {0: 3, 100: 6, 200: 9}
    with pytest.raises(AttributeError, match="no attribute 'SGD'"):
        l2l_core.SGD  # noqa: B018
