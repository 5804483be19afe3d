"""Depth, freezing and layers that sit out as functions of the step."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from small import keys, make_batch, make_gpt, make_relay
from torch import nn

from l2l_core import (
    Depth,
    Drop,
    EmulatedDevice,
    Freezing,
    LayerDrop,
    Relay,
    Schedule,
    dropping_by_influence,
    gradual_stacking,
    growing_by_identity,
    stacking_by_doubling,
)
from l2l_core.edits.schedules import draw_skipped


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
        (gradual_stacking(3, every=1, depth=12), ["012", "012012", "012012012", "012012012012"]),
        (gradual_stacking(2, every=1, depth=7, grow="top"), ["01", "0101", "010101", "0101011"]),
        (stacking_by_doubling(3, every=2, depth=12), ["012", "012", "012012", "012012", "012012012012"]),
        (Depth({0: 3, 2: 5}, "middle"), ["012", "012", "01012"]),
        (Depth(5, "middle"), ["01123"] * 3),
        (Depth({0: 4, 1: 6}, "middle"), ["0123", "010123"]),
        (Depth({0: 3, 1: 5}, "interleaved"), ["012", "00122"]),
        (Depth({1: 8}, "interleaved"), ["0123", "00112233"]),
        (Depth({1: 9}, "top"), ["0123", "012301233"]),
        (growing_by_identity(2, every=1, depth=5, by=2), ["01", "0011", "00111"]),
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
    schedule = dropping_by_influence({0: 3, 2: 2})
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
    assert dropping_by_influence({0: 1}).edits(relay) == [], "three must go, and two are known"
    assert [edit.layers for edit in dropping_by_influence({0: 2}).edits(relay)] == ["L001", "L003"]


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


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: Depth(3), TypeError, "depth=3"),
        (lambda: Depth({}), ValueError, "from some step on"),
        (lambda: Depth({0: 0}), ValueError, "depth from step 0 on is 0"),
        (lambda: Depth({-1: 3}), ValueError, "a step of depth is -1"),
        (lambda: Depth({0: 3}, "outwards"), ValueError, "grow='outwards'"),
        (lambda: Depth({0: 3}, shrink="random"), ValueError, "shrink='random'"),
        (lambda: Depth({0: 3}, optimizer="half"), ValueError, "optimizer='half'"),
        (lambda: Depth({0: 3}, warmup=-1), ValueError, "warmup=-1"),
        (lambda: Depth({0: 3}, park="tape"), ValueError, "park='tape'"),
        (lambda: gradual_stacking(0, 10, 12), ValueError, "the first depth is 0"),
        (lambda: gradual_stacking(13, 10, 12), ValueError, "no growth"),
        (lambda: stacking_by_doubling(3, 0, 12), ValueError, "every is 0"),
        (lambda: growing_by_identity(3, 1, 12, by=0), ValueError, "at a time is 0"),
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
