"""What a step says of each layer: the norm of its gradient and the size of its update, against plain autograd."""

from __future__ import annotations

import copy
from functools import partial

import pytest
import torch
from torch import nn

from l2l_core import EmulatedDevice, Relay, RelayConfig


class Residual(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.linear(x))


def make_model(shared: bool) -> nn.Module:
    torch.manual_seed(0)
    layer = Residual(8)
    return nn.Sequential(nn.Linear(4, 8), layer, Residual(8), layer if shared else Residual(8), nn.Linear(8, 1))


def mse(outputs: torch.Tensor, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    return nn.functional.mse_loss(outputs, batch[1])


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("update", ["eager", "deferred"])
def test_statistics_of_a_step_are_those_of_plain_training(shared: bool, update: str) -> None:
    model = make_model(shared)
    plain = copy.deepcopy(model)
    batch = (torch.randn(8, 4), torch.randn(8, 1))
    mse(plain(batch[0]), batch).backward()
    optimizer = partial(torch.optim.SGD, lr=0.1)
    layers = list(dict.fromkeys(list(model)[1:4]))
    config = RelayConfig(micro_batches=4, update=update)
    with Relay(model, optimizer, EmulatedDevice(), layers, mse, config=config) as relay:
        relay.step(batch)
        for unit, theirs in zip(relay.stack, dict.fromkeys(list(plain)[1:4]), strict=True):
            grad_norm = torch.linalg.vector_norm(torch.cat([p.grad.flatten() for p in theirs.parameters()]))
            weight_norm = torch.linalg.vector_norm(torch.cat([p.detach().flatten() for p in theirs.parameters()]))
            assert unit.stats["grad_norm"] == pytest.approx(float(grad_norm), rel=1e-5)
            assert unit.stats["update_ratio"] == pytest.approx(0.1 * float(grad_norm / weight_norm), rel=1e-4)


def test_the_size_of_an_update_is_told_from_a_sample_of_large_layers() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 150), Residual(150), Residual(150), nn.Linear(150, 1))
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    with Relay(model, partial(torch.optim.AdamW, lr=1e-2), EmulatedDevice(), list(model)[1:3], mse) as relay:
        relay.step((torch.randn(8, 4), torch.randn(8, 1)))
        for unit in relay.stack:
            own = {name: p.detach() for name, p in model.named_parameters() if name.startswith(f"{unit.name}.")}
            moved = torch.linalg.vector_norm(torch.cat([(p - before[name]).flatten() for name, p in own.items()]))
            size = torch.linalg.vector_norm(torch.cat([before[name].flatten() for name in own]))
            assert unit.stats["update_ratio"] == pytest.approx(float(moved / size), rel=0.1)


def test_the_running_trace_can_be_followed() -> None:
    model = make_model(shared=False)
    with Relay(model, partial(torch.optim.SGD, lr=0.1), EmulatedDevice(), list(model)[1:4], mse) as relay:
        assert relay.trace is None
        seen: list[int] = []
        hook = model[3].register_forward_hook(lambda *_: seen.append(len(relay.trace.events_since(0)[0])))
        result = relay.step((torch.randn(8, 4), torch.randn(8, 1)))
        hook.remove()
        assert relay.trace is result.trace
        assert 0 < seen[0] < len(result.trace.events)


def test_a_link_gets_new_figures_between_steps() -> None:
    device = EmulatedDevice()
    device.throttle(h2d_bytes_per_s=1e6, latency_s=0.001)
    assert device.figures() == {
        "memory_bytes": None,
        "h2d_bytes_per_s": 1e6,
        "d2h_bytes_per_s": None,
        "latency_s": 0.001,
    }
    with pytest.raises(ValueError, match="h2d_bytes_per_s=-1"):
        device.throttle(h2d_bytes_per_s=-1)
    assert device.figures()["h2d_bytes_per_s"] == 1e6
    device.close()
