"""A paced layer computes what the layer computes, and waits until the moments that its speed implies."""

from copy import deepcopy

import pytest
import torch
from torch import nn

from workbench.lessons import paced_layer
from workbench.lessons.paced_layer import PacedLayer


def test_it_computes_what_the_layer_computes() -> None:
    layer = nn.Linear(4, 4)
    slow = PacedLayer(deepcopy(layer), flops_per_s=1e12)
    x, y = (torch.arange(24.0).reshape(2, 3, 4).requires_grad_() for _ in range(2))
    slow(x).square().sum().backward()
    layer(y).square().sum().backward()
    assert x.grad is not None and y.grad is not None and torch.equal(x.grad, y.grad)
    assert torch.equal(slow.layer.weight.grad, layer.weight.grad)


def test_it_waits_as_long_as_the_speed_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    """20 parameters, 6 tokens, 40 operations per second: 6 s forward, 12 s backward, each from its own beginning."""
    clock, until = iter([100.0, 500.0]), []
    monkeypatch.setattr(paced_layer.time, "perf_counter", lambda: next(clock))
    monkeypatch.setattr(paced_layer, "sleep_until", until.append)
    y = PacedLayer(nn.Linear(4, 4), flops_per_s=40.0)(torch.ones(2, 3, 4, requires_grad=True))
    assert until == [106.0]
    y.sum().backward()
    assert until == [106.0, 512.0]


@pytest.mark.parametrize("speed", [0, -1.0, float("nan")])
def test_no_speed_is_refused(speed: float) -> None:
    with pytest.raises(ValueError, match="flops_per_s="):
        PacedLayer(nn.Linear(1, 1), speed)
