"""Edits of layers that share weights with one another."""

from __future__ import annotations

import copy
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from small import assert_same, keys, make_relay, state_of
from torch import nn

from l2l_core import Drop, Duplicate, EmulatedDevice, Freeze, Insert, Interpolate, Relay, RelayConfig, Swap
from l2l_core.edits.edit import Edit


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.b(torch.tanh(self.a(x)))


@pytest.mark.parametrize(
    "edit",
    [
        Drop(1), Drop(2), Drop(0), Insert(at=2, init="copy", optimizer="copy"), Duplicate(2), Swap(1, 2), Freeze(1),
        Insert(at=2, init="interpolate"), Interpolate(1, 2, 0.3), Interpolate(0, 2),
    ],
    ids=repr,
)  # fmt: skip
def test_layers_that_share_weights(edit: Edit, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(Residual() for _ in range(4)))
    model[2].a.weight = model[1].a.weight
    batch = (torch.randn(4, 4),)
    options: dict[str, Any] = {"loss": lambda out, _: (out**2).mean()}
    with make_relay(model, **options) as relay:
        relay.step(batch)
        before, loss, held = state_of(relay), relay.evaluate(batch), relay.host.by_category()
        inverse = relay.apply(edit)
        assert relay.verify(batch).equal
        relay.apply(inverse)
        assert_same(state_of(relay), before)
        assert relay.evaluate(batch) == loss and relay.host.by_category()["weights"] == held["weights"]
        relay.undo()
        for _ in range(2):
            relay.step(batch)
        relay.fork("other")
        relay.step(batch)
        relay.save(tmp_path)
        names = dict(relay.model.named_parameters())
        twin = copy.deepcopy(relay.model)
        with Relay.load(
            tmp_path, twin, partial(torch.optim.AdamW, lr=1e-2), device=EmulatedDevice(), **options
        ) as again:
            assert dict(again.model.named_parameters()).keys() == names.keys()
            assert again.step(batch).loss == relay.step(batch).loss
        relay.switch("main")
        assert relay.verify(batch).equal


def test_the_last_layer_with_shared_weights_stays() -> None:
    model = nn.Sequential(*(Residual() for _ in range(4)))
    model[2].a.weight = model[1].a.weight
    with make_relay(model, loss=lambda out, _: (out**2).mean()) as relay:
        relay.apply(Drop(1))
        with pytest.raises(ValueError, match=r"layers L001, L002 share the weights 1\.a\.weight.*untie"):
            relay.apply(Drop("L002"))
        assert keys(relay) == ["L000", "L002", "L003"]
        assert relay.verify((torch.randn(4, 4),)).equal


def test_undoing_an_interpolation_leaves_weights_alone_that_both_layers_share() -> None:
    class Sharing(nn.Module):
        def __init__(self, shared: nn.Parameter) -> None:
            super().__init__()
            self.own, self.shared = nn.Linear(4, 4), shared

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + torch.tanh(self.own(x) @ self.shared)

    shared = nn.Parameter(torch.eye(4))
    model, batch = nn.Sequential(*(Sharing(shared) for _ in range(3))), (torch.ones(2, 4),)
    with make_relay(model, loss=lambda y, b: y.square().mean(), config=RelayConfig()) as relay:
        relay.step(batch)
        relay.apply(Interpolate(0, 1))
        relay.step(batch)
        learned = shared.detach().clone()
        relay.undo()
        assert torch.equal(shared, learned)
