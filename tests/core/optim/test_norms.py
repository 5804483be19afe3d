"""LAMB and LARS by their papers' formulas, in float64, and in a relay with warm-up."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import LinearLR

from l2l_core import Relay, RelayConfig
from l2l_core.optim import LAMB, LARS

RATE, DECAY = 0.1, 0.01


def lamb(w: Any, grads: Any, max_norm: float = 10.0) -> Any:
    """Algorithm 2 of arXiv 1904.00962."""
    m, v = np.zeros_like(w), np.zeros_like(w)
    for t, g in enumerate(grads, start=1):
        m, v = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g**2
        r = m / (1 - 0.9**t) / (np.sqrt(v / (1 - 0.999**t)) + 1e-6) + DECAY * w
        size = min(np.linalg.norm(w), max_norm)
        w = w - RATE * (size / np.linalg.norm(r) if size else 1.0) * r
        yield w


def lars(w: Any, grads: Any) -> Any:
    """Algorithm 1 of arXiv 1708.03888."""
    b = np.zeros_like(w)
    for g in grads:
        size = np.linalg.norm(w)
        local = 1e-3 * size / (np.linalg.norm(g) + DECAY * size) if size else 1.0
        b = 0.9 * b + RATE * local * (g + DECAY * w)
        w = w - b
        yield w


@pytest.mark.parametrize("kind, formula", [(LAMB, lamb), (LARS, lars)])
@pytest.mark.parametrize("size", [0.0, 0.3, 40.0], ids=["zeros", "small", "beyond max_norm"])
def test_each_step_is_the_formulas(kind: type, formula: Any, size: float) -> None:
    noise = torch.Generator().manual_seed(0)
    param = nn.Parameter(size * torch.randn(7, 5, generator=noise, dtype=torch.float64))
    grads = [torch.randn(7, 5, generator=noise, dtype=torch.float64) for _ in range(8)]
    optimizer = kind([param], lr=RATE, weight_decay=DECAY)
    for grad, expected in zip(grads, formula(param.detach().numpy().copy(), [g.numpy() for g in grads]), strict=True):
        param.grad = grad
        optimizer.step()
        np.testing.assert_allclose(param.detach().numpy(), expected, rtol=1e-6, atol=1e-9 * max(size, 1))


def test_a_step_of_lamb_is_as_long_as_the_rate_says() -> None:
    param = nn.Parameter(torch.rand(50, 40))
    before, param.grad = param.detach().clone(), 1e4 * torch.randn(50, 40)
    LAMB([param], lr=0.03, max_norm=1e9).step()
    assert ((param - before).norm() / before.norm()).item() == pytest.approx(0.03, rel=1e-4)


@pytest.mark.parametrize("kind", [LAMB, LARS])
def test_they_warm_up_in_a_relay_as_in_plain_training(kind: type) -> None:
    """Norms are over whole parameters, which a relay's blocks hold whole."""

    def net() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(*(nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(3)), nn.Linear(16, 2))

    def batch(step: int) -> Any:
        noise = torch.Generator().manual_seed(step)
        return torch.randn(4, 16, generator=noise), torch.randn(4, 2, generator=noise)

    def warm_up(optimizer: torch.optim.Optimizer) -> LinearLR:
        return LinearLR(optimizer, start_factor=0.1, total_iters=3)

    core = net()
    optimizer = kind(core.parameters(), lr=RATE)
    schedule = warm_up(optimizer)
    for step in range(5):
        x, y = batch(step)
        for part, target in zip(x.chunk(2), y.chunk(2), strict=True):
            (nn.functional.mse_loss(core(part), target) / 2).backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
    config = RelayConfig(micro_batches=2)
    loss = lambda outputs, batch: nn.functional.mse_loss(outputs, batch[1])  # noqa: E731
    with Relay(model := net(), partial(kind, lr=RATE), loss=loss, config=config) as relay:
        assert not relay.store.masters.findings.elementwise, "so workers share it between parameters"
        schedule = warm_up(relay.optimizer)
        for step in range(5):
            relay.step(batch(step))
            schedule.step()
        assert all(torch.equal(a, b) for a, b in zip(core.parameters(), model.parameters(), strict=True))


@pytest.mark.parametrize(
    "kind, setting", [(LAMB, {"betas": (0.9, 1.0)}), (LAMB, {"max_norm": 0.0}), (LARS, {"trust": 0.0})]
)
def test_settings_out_of_range_are_refused(kind: type, setting: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=f"{kind.__name__}: lr="):
        kind([nn.Parameter(torch.ones(2))], **setting)
