"""LAMB and LARS of timm train in a relay."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import LinearLR

from l2l_core import Relay, RelayConfig

NEEDS = 'needs timm: pip install -e ".[vision]"'


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(3)), nn.Linear(16, 2))


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    noise = torch.Generator().manual_seed(step)
    return torch.randn(4, 16, generator=noise), torch.randn(4, 2, generator=noise)


def loss(outputs: torch.Tensor, batch: Any) -> torch.Tensor:
    return nn.functional.mse_loss(outputs, batch[1])


def warm_up(optimizer: torch.optim.Optimizer) -> LinearLR:
    return LinearLR(optimizer, start_factor=0.1, total_iters=3)


def in_core(model: nn.Module, make: Callable[..., Any]) -> Iterator[None]:
    """Train in core, a step of two micro-batches at a time."""
    optimizer = make(model.parameters())
    schedule = warm_up(optimizer)
    for step in range(5):
        for x, y in zip(*(part.chunk(2) for part in batch(step)), strict=True):
            (loss(model(x), (x, y)) / 2).backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        yield


@pytest.mark.parametrize("update", ["eager", "deferred"])
@pytest.mark.parametrize("name", ["Lamb", "Lars"])
def test_in_a_relay_they_train_as_in_core(name: str, update: str) -> None:
    """Their norms are over whole parameters, which a relay's blocks hold whole."""
    settings = {"Lamb": {"max_grad_norm": None}, "Lars": {"momentum": 0.9}}[name]
    kind = getattr(pytest.importorskip("timm.optim", reason=NEEDS), name)
    make = partial(kind, lr=0.1, weight_decay=0.01, always_adapt=True, **settings)
    config = RelayConfig(micro_batches=2, update=update)
    core, model = net(), net()
    with Relay(model, make, loss=loss, config=config) as relay:
        assert not relay.store.masters.findings.elementwise, "so workers share it between parameters"
        schedule = warm_up(relay.optimizer)
        for step, _ in enumerate(in_core(core, make)):
            relay.step(batch(step))
            schedule.step()
        assert all(torch.equal(a, b) for a, b in zip(core.parameters(), model.parameters(), strict=True))
        assert relay.verify(batch(9)).equal


def test_a_norm_over_all_gradients_couples_layers() -> None:
    lamb = pytest.importorskip("timm.optim", reason=NEEDS).Lamb
    with pytest.raises(ValueError, match="couples parameters of different layers"):
        Relay(net(), lamb, loss=loss)
