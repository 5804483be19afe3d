"""Gradients of `prod` and `masked_fill`, which PyTorch computes otherwise under a dispatch mode, are those of plain training."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from l2l_core import EmulatedDevice, Relay, RelayConfig

STEPS = 3


class Product(nn.Module):
    def __init__(self, keeps: bool) -> None:
        super().__init__()
        self.linear, self.keeps = nn.Linear(8, 8), keeps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        factors = self.linear(x)[:, :3]  # none is zero
        return x + (factors.prod(-1, keepdim=True) if self.keeps else torch.prod(factors))


class Filled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.value = nn.Linear(8, 8), nn.Parameter(torch.tensor(0.0))  # so that updates keep all bits

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x.masked_fill(x > 0, self.value))


class Seen(TorchDispatchMode):
    """Does nothing, and is on in plain training too."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def make_model(place: str) -> nn.Sequential:
    torch.manual_seed(0)
    layers = [nn.Sequential(Product(keeps=True), nn.Tanh()) if place == "layer" else nn.Linear(8, 8) for _ in range(3)]
    return nn.Sequential(Product(keeps=place == "shell"), *layers, nn.Linear(8, 4))


def area(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    x, target = batch
    return (model(x) - target).clamp(0).prod(-1).sub(0.3).square().mean()


@pytest.mark.all_cases
@pytest.mark.parametrize("config", [{"stash": "host"}, {"stash": "device"}, {"schedule": "depth_first"}], ids=str)
@pytest.mark.parametrize("place", ["layer", "shell"])
@pytest.mark.parametrize("mode", [False, True], ids=["plain", "under a mode of the user"])
def test_products_have_the_gradients_of_plain_training(config: dict[str, Any], place: str, mode: bool) -> None:
    model = make_model(place)
    plain = copy.deepcopy(model)
    optimizer, twin = (torch.optim.AdamW(each.parameters(), lr=1e-2) for each in (model, plain))
    layers = [f"{i}" for i in (1, 2, 3)]
    settings = RelayConfig(micro_batches=2, **config)
    with Relay(model, optimizer, EmulatedDevice(), layers, objective=area, config=settings) as relay:
        for step in range(STEPS):
            # Where the first batches have a factor of zero, both formulas may agree, and the first comparison sees nothing.
            x, target = torch.randn(32, 8), torch.full((32, 4), -9.0 if step else 0.0)
            with Seen() if mode else torch.enable_grad():
                relay.step((x, target))
                for part in zip(x.chunk(2), target.chunk(2), strict=True):
                    (area(plain, part) / 2).backward()
                twin.step()
                twin.zero_grad()
            assert all(map(torch.equal, model.parameters(), plain.parameters())), step


@pytest.mark.all_cases
@pytest.mark.parametrize("stash", ["host", "device"])
def test_a_learned_value_that_fills_has_the_gradient_of_plain_training(stash: Any) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(Filled(), *[nn.Sequential(Filled(), nn.Tanh()) for _ in range(3)], nn.Linear(8, 4))
    plain = copy.deepcopy(model)
    optimizer, twin = (torch.optim.SGD(each.parameters(), lr=1e-1) for each in (model, plain))

    def objective(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        return (model(batch[0]) - batch[1]).square().mean()

    settings = RelayConfig(micro_batches=2, stash=stash)
    with Relay(model, optimizer, EmulatedDevice(), ["1", "2", "3"], objective=objective, config=settings) as relay:
        for _ in range(STEPS):
            batch = torch.randn(512, 8), torch.randn(512, 4)
            relay.step(batch)
            for part in zip(*(each.chunk(2) for each in batch), strict=True):
                (objective(plain, part) / 2).backward()
            twin.step()
            twin.zero_grad()
            assert all(map(torch.equal, model.parameters(), plain.parameters()))
