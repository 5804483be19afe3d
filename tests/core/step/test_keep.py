"""Layers that stay on the device, and graphs that are kept: the same bits, fewer loads, fewer recomputes."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from by_hand import chain_of, stashes
from oracle import assert_equal, both
from patience import rarely, sampled
from torch import Tensor, nn
from zoo import BY_NAME, KINDS, WIDTH, Kind, ResidualMlp

from l2l_core import EmulatedDevice, Machine, Profile, Relay, RelayConfig, Shapes, TornStep, simulate
from l2l_core.schedule_rules import kept_layers, weight_slots


def counted(relay: Relay, kind: str) -> Counter[str]:
    assert relay.trace is not None
    return Counter(event.layer for event in relay.trace.events if event.kind == kind and event.layer != "shell")


@stashes
@pytest.mark.parametrize("kind", sampled(KINDS, 4), ids=str)
def test_any_model_keeps(kind: Kind, stash: Any) -> None:
    """Metered and not, with more graphs than slots to begin with."""
    with both(kind, RelayConfig(micro_batches=3, stash=stash, resident=1, keep=9)) as pair:
        assert_equal([pair.step(kind.make_batch(7, seed)) for seed in range(3)])


@stashes
@pytest.mark.parametrize("ahead", [0, 1, rarely(2)])
@pytest.mark.parametrize(
    "resident, keep",
    [(0, 0), rarely(0, 1), (0, 2), rarely(1, 1), rarely(2, 0), (2, 3), rarely(9, 3), (9, 9)],
)
def test_loads_and_recomputes_are_as_many_as_the_rules_say(resident: int, keep: int, ahead: int, stash: Any) -> None:
    kind, count = BY_NAME["gpt2"], 3
    config = RelayConfig(micro_batches=count, stash=stash, ahead=ahead, resident=resident, keep=keep)
    with both(kind, config) as pair:
        steps = [pair.step(kind.make_batch(7, seed)) for seed in range(3)]
        assert_equal(steps)
        relay, trace = pair.relay, steps[-1].result.trace
    depth = len(relay.stack)
    whole = [e for e in trace.events if e.kind == "load" and e.layer != "shell" and e.piece == 0]
    slots = min(depth, weight_slots(ahead, resident))
    assert len(whole) == 2 * depth - slots, "the last layers of forward are still there in backward"
    assert {e.slot for e in whole} == set(range(slots))
    kept = min(depth, kept_layers(keep, ahead, resident))
    reads = measured_recomputes(kind, config)
    assert [reads[unit.name] for unit in relay.stack] == [2 * count] * (depth - max(kept, 1)) + [count] * max(kept, 1)


def measured_recomputes(kind: Kind, config: RelayConfig) -> Counter[str]:
    """How often every layer's own forward runs in a step that is not metered."""
    ran: Counter[str] = Counter()
    with both(kind, config) as pair:
        pair.relay.step(kind.make_batch(7, 0))
        for unit in pair.relay.stack:
            inner = next(unit.module.children())
            inner.forward = counting(inner.forward, ran, unit.name)  # type: ignore[method-assign]
        pair.relay.step(kind.make_batch(7, 1))
    return ran


def counting(forward: Any, ran: Counter[str], name: str) -> Any:
    def counted(*args: Any, **kwargs: Any) -> Any:
        ran[name] += 1
        return forward(*args, **kwargs)

    return counted


class Rectified(nn.Module):
    """Its graph saves what it gives out, which is parked when the stash is on the host."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return torch.sigmoid(self.lin(x))


class Averaged(nn.Module):
    """Its graph reads a buffer that every micro-batch changes."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("mean", torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        y = self.lin(x) * self.mean.clone()
        self.mean.mul_(0.9).add_(0.1 * x.detach().mean((0, 1)))
        return y


class SometimesAveraged(Averaged):
    """Some micro-batches put another tensor in the buffer's place, so that some graphs could be kept and others not."""

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(self.lin(x) * self.mean)
        if int(float(x.detach().sum()) * 1e3) % 2:
            self.mean = self.mean * 0.9 + 0.1 * x.detach().mean((0, 1))
        return y


class ReadyOnce(Rectified):
    """Its first run sets a flag, so that of all micro-batches only the first one's graph is not kept."""

    is_ready = False

    def forward(self, x: Tensor) -> Tensor:
        self.is_ready = True
        return super().forward(x)


@pytest.mark.all_cases
@stashes
@pytest.mark.parametrize("layer", [Rectified, Averaged, SometimesAveraged, ReadyOnce])
def test_what_graphs_save_is_there(layer: type[nn.Module], stash: Any) -> None:
    kind = chain_of(layer, count=5)
    with both(kind, RelayConfig(micro_batches=3, stash=stash, resident=3, keep=5)) as pair:
        assert_equal([pair.step(kind.make_batch(7, seed)) for seed in range(3)])


@stashes
def test_what_is_kept_costs_device_bytes_and_is_booked(stash: Any) -> None:
    kind = chain_of(ResidualMlp, count=6)
    peaks = []
    for keep in (0, 3, 6):
        config = RelayConfig(micro_batches=3, stash=stash, resident=4, keep=keep)
        with Relay(
            kind.make_model(), loss=kind.loss, loss_over=kind.loss_over, device=EmulatedDevice(), config=config
        ) as relay:
            results = [relay.step(kind.make_batch(7, seed)) for seed in range(3)]
            assert results[0].peak_device_bytes == results[1].peak_device_bytes == results[2].peak_device_bytes
            assert sum(relay.forecast(kind.make_batch(7, 3)).device_bytes.values()) == results[2].peak_device_bytes
            peaks.append(results[2].peak_device_bytes)
    assert peaks[0] < peaks[1] < peaks[2]


class DrawsElsewhere(ResidualMlp):
    """Draws from NumPy's generator, which all micro-batches share."""

    late = True

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (1 + float(np.random.rand())) if self.late else super().forward(x)


@stashes
@pytest.mark.parametrize("steps", [0, 2])
def test_draws_that_nobody_can_carry_are_refused_where_graphs_are_kept_too(steps: int, stash: Any) -> None:
    """From the first step on, or later: nothing compares a kept graph with a recompute."""
    kind = chain_of(DrawsElsewhere)
    with both(kind, RelayConfig(micro_batches=3, stash=stash, resident=9, keep=9)) as pair:
        for layer in pair.relay.model.layers:
            layer.late = False
        for seed in range(steps):
            pair.relay.step(kind.make_batch(7, seed))
        before = [param.clone() for param in pair.relay.model.parameters()]
        for layer in pair.relay.model.layers:
            layer.late = True
        with pytest.raises(RuntimeError, match="when it was recomputed") as caught:
            pair.relay.step(kind.make_batch(7, steps))
        assert not isinstance(caught.value, TornStep)
        assert all(map(torch.equal, before, pair.relay.model.parameters()))


def test_more_graphs_than_layers_are_as_many_as_there_are() -> None:
    kind = BY_NAME["gpt2"]
    config = RelayConfig(micro_batches=2, resident=9, keep=9)
    with Relay(
        kind.make_model(), loss=kind.loss, loss_over=kind.loss_over, device=EmulatedDevice(), config=config
    ) as relay:
        for seed in range(2):
            trace = relay.step(kind.make_batch(4, seed)).trace
        profile = Profile.of(trace)
        assert simulate(profile, replace(config, keep=len(relay.stack))).span_s > 0
        with pytest.raises(ValueError, match="kept the graphs"):
            simulate(profile, replace(config, keep=1))
    shapes = Shapes(layer_params=[100] * 3, shell_params=100, tokens=8, boundary_bytes=64)
    with pytest.raises(ValueError, match="kept the graphs of 1"):  # a formula recomputes all layers but the last one
        simulate(Profile.of_shapes(shapes, Machine(1e9, 1e9, 1e9, 1e9)), RelayConfig(resident=1, keep=3))
