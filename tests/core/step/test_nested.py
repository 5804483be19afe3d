"""Nested tensors: whole with one micro-batch, and in several if a function cuts them."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from l2l_core import EmulatedDevice, Relay, RelayConfig

WIDTH = 8


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.inner = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.inner(self.norm(x)))


class OverSequences(nn.Module):
    """Layers on sequences of unequal length, and a head on the mean of each."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(Residual() for _ in range(3))
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(torch.stack([rows.mean(0) for rows in x.unbind()]))


class Padded(OverSequences):
    """Layers get a padded tensor; the shell reads the nested one before and after them."""

    def forward(self, x: Tensor) -> Tensor:
        lengths: Any = x.offsets().diff()  # type: ignore[operator]
        h = torch.nested.to_padded_tensor(x, 0.0)
        for layer in self.layers:
            h = layer(h)
        ends = torch.stack([h[k, n - 1] for k, n in enumerate(lengths.tolist())])
        return self.head(ends) + torch.stack([rows.mean() for rows in x.unbind()])[:, None]


def batch(step: int, layout: Any = torch.jagged) -> tuple[Tensor, Tensor]:
    noise = torch.Generator().manual_seed(step)
    rows = [torch.randn(length, WIDTH, generator=noise) for length in (3, 5, 2, 4)]
    return torch.nested.nested_tensor(rows, layout=layout), torch.randn(4, 1, generator=noise)


def cut(batch: Any, count: int) -> list[Any]:
    rows, targets = [*batch[0].unbind()], batch[1].chunk(count)
    size = len(rows) // count
    parts = [[row.clone() for row in rows[k * size :][:size]] for k in range(count)]
    return [
        (torch.nested.nested_tensor(part, layout=torch.jagged), target)
        for part, target in zip(parts, targets, strict=True)
    ]


def loss(outputs: Tensor, batch: Any) -> Tensor:
    return nn.functional.mse_loss(outputs, batch[1])


def sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1)


@pytest.mark.all_cases
@pytest.mark.parametrize("kind", [OverSequences, Padded])
@pytest.mark.parametrize("micro_batches", [1, 2])
@pytest.mark.parametrize("settings", [{}, {"stash": "host"}, {"schedule": "depth_first"}], ids=str)
def test_nested_tensors_train_as_in_core(kind: Any, micro_batches: int, settings: Any) -> None:
    model, plain = kind(), kind()
    optimizer, config = sgd(plain.parameters()), RelayConfig(micro_batches=micro_batches, **settings)
    device = EmulatedDevice(memory_bytes=10_000_000)
    with Relay(model, sgd, device, loss=loss, split=None if micro_batches == 1 else cut, config=config) as relay:
        for step in range(3):
            relay.step(batch(step))
            for part in cut(batch(step), micro_batches):
                (loss(plain(part[0]), part) / micro_batches).backward()
            optimizer.step()
            optimizer.zero_grad()
    assert all(map(torch.equal, model.parameters(), plain.parameters()))


def test_a_nested_tensor_that_would_be_cut_is_refused() -> None:
    with Relay(OverSequences(), sgd, loss=loss, config=RelayConfig(micro_batches=2)) as relay:
        with pytest.raises(
            TypeError, match=r"batch\[0\] is a nested tensor, which cannot be cut.*micro_batches=1.*split="
        ):
            relay.step(batch(0))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch calls this layout a prototype
            strided = batch(0, torch.strided)
        with pytest.raises(TypeError, match=r"make it with layout=torch\.jagged"):
            relay.step(strided)
        assert relay.steps == 0
