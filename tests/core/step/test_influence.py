"""How much each layer changes its hidden state, against hooks on a plain copy of the model."""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from l2l_core import EmulatedDevice, Relay, RelayConfig
from l2l_core.eps.blocks import build_layer
from l2l_core.step.micro_batch.influence import Influence


class Residual(nn.Module):
    def __init__(self, width: int = 8, scale: float = 1.0) -> None:
        super().__init__()
        self.linear, self.scale = nn.Linear(width, width), scale

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.scale * torch.tanh(self.linear(x))


class Noise(nn.Module):
    """No parameters, and another result every time."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.randn_like(x)


def make_model(*layers: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), *layers, nn.Linear(8, 1))


def make_relay(model: nn.Module, **options: Any) -> Relay:
    layers = list(model)[1:-1]
    options.setdefault("config", RelayConfig(micro_batches=2))
    return Relay(model, partial(torch.optim.SGD, lr=0.1), EmulatedDevice(), list(dict.fromkeys(layers)), mse, **options)


def mse(outputs: torch.Tensor, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    return nn.functional.mse_loss(outputs, batch[1])


def make_batch(rows: int = 7, length: int = 5) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(rows, length, 4), torch.randn(rows, length, 1)


def plain_influence(model: nn.Module, inputs: torch.Tensor) -> list[float]:
    """1 - mean cosine over all tokens and all calls, by layer."""
    cosines = defaultdict(list)

    def look(layer: nn.Module, args: Any, out: torch.Tensor) -> None:
        cosines[layer].append(torch.cosine_similarity(args[0].double(), out.double(), dim=-1).flatten())

    handles = [layer.register_forward_hook(look) for layer in dict.fromkeys(list(model)[1:-1])]
    with torch.no_grad():
        model(inputs)
    for handle in handles:
        handle.remove()
    return [1 - float(torch.cat(found).mean()) for found in cosines.values()]


@pytest.mark.parametrize("stash", ["device", "host"])
@pytest.mark.parametrize("shared", [False, True])
def test_influence_is_that_of_the_plain_model(stash: str, shared: bool) -> None:
    torch.manual_seed(0)
    layer = Residual(scale=0.1)
    model, batch = make_model(layer, Residual(), layer if shared else Residual(scale=3.0)), make_batch()
    model[2].requires_grad_(False)
    expected = plain_influence(copy.deepcopy(model), batch[0])
    with make_relay(model, config=RelayConfig(micro_batches=3, stash=stash)) as relay:
        for _ in range(2):  # metered, and not
            relay.step(batch)
            found = [unit.stats["influence"] for unit in relay.stack]
            assert found == pytest.approx(expected, rel=1e-5, abs=1e-6)  # cosines are float32
            expected = plain_influence(copy.deepcopy(model), batch[0])
        assert "grad_norm" not in relay.stack[1].stats, "a frozen layer has an influence all the same"
        assert relay.verify(batch).equal
        assert [unit.stats["influence"] for unit in relay.stack] == found, "a trial is no step"


def test_a_layer_that_gives_back_what_it_is_given_has_none_and_one_that_changes_the_shape_has_no_entry() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.Identity(), nn.Linear(6, 8), Residual(), nn.Linear(8, 1))
    with make_relay(model) as relay:
        relay.step(make_batch())
        assert relay.stack[0].stats == {"influence": pytest.approx(0.0, abs=1e-7)}
        assert "influence" not in relay.stack[1].stats and "grad_norm" in relay.stack[1].stats
        assert 0 < relay.stack[2].stats["influence"] < 1


def test_a_step_that_fails_leaves_nothing_half_done() -> None:
    torch.manual_seed(0)
    model, batch = make_model(Residual(), nn.Identity(), Residual()), make_batch()
    with make_relay(model) as relay:
        relay.step(batch)
        assert all(unit.stats for unit in relay.stack)
        with pytest.raises(FloatingPointError):
            relay.step((batch[0] * float("inf"), batch[1]))
        assert not any(unit.stats for unit in relay.stack)


def test_nobody_sees_that_layers_are_looked_at() -> None:
    """Neither modes that the model stands in, nor random streams, nor autograd."""

    class Log(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(func.overloadpacket._qualified_op_name)
            return func(*args, **(kwargs or {}))

    class Logged(nn.Sequential):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with Log():
                return super().forward(x)

    seen: list[str] = []
    torch.manual_seed(0)
    model, batch = Logged(nn.Linear(4, 8), Residual(), Noise(), Residual(), nn.Linear(8, 1)), make_batch()
    with make_relay(model) as relay:
        relay.step(batch)
        relay.step(batch)
        assert relay.verify(batch).equal
        assert all("influence" in unit.stats for unit in relay.stack)
    assert "aten::addmm" in seen and not [name for name in seen if "cosine" in name or "vector_norm" in name]


@pytest.mark.parametrize("make", [lambda x: x, lambda x: x.transpose(0, 1).contiguous().transpose(0, 1)])
def test_many_tokens_are_sampled_evenly(make: Callable[[torch.Tensor], torch.Tensor]) -> None:
    torch.manual_seed(0)
    came = make(torch.randn(64, 32, 8))
    position = torch.linspace(0, 2, 32)[None, :, None]  # the cosine depends on the place in the sequence
    left = came + position * torch.randn(64, 32, 8)
    unit, influence = build_layer("L000", "layer", Residual()), Influence()
    influence.record(unit, [torch.ones(3), came], {"hidden": left, "other": came})
    influence.write_stats()
    assert unit.stats["influence"] == pytest.approx(1 - float(torch.cosine_similarity(came, left, -1).mean()), rel=0.1)


def test_calls_count_by_their_tokens() -> None:
    unit, influence = build_layer("L000", "layer", Residual()), Influence()
    x = torch.ones(6, 2)
    influence.record(unit, [x], x)
    influence.record(unit, [x[:2]], -x[:2])
    influence.record(unit, [torch.ones(2, 3)], torch.ones(2, 4))
    influence.record(unit, [torch.ones(())], [torch.ones(())])
    influence.record(unit, [torch.ones(0, 2)], [torch.ones(0, 2)])
    influence.record(unit, [torch.arange(4)], None)
    influence.write_stats()
    assert unit.stats["influence"] == pytest.approx(0.5)
