"""Models of a few layers with something beside them, and relays of them to be edited."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from oracle import adamw, assert_state, copy_state
from torch import Tensor, nn
from zoo import Chain, Kind, ResidualMlp, cross_entropy, sequences

from l2l_core import EmulatedDevice, Relay, RelayConfig

DEPTH = 4


class Beside(Chain):
    """Layers, and one thing of some kind beside them."""

    def __init__(self) -> None:
        super().__init__([ResidualMlp() for _ in range(DEPTH)])

    def walk(self, h: Tensor) -> Tensor:
        for i, layer in enumerate(self.layers):
            h = layer(self.at(i, h))
        return h

    def at(self, i: int, h: Tensor) -> Tensor:
        raise NotImplementedError


def parameter(*shape: int) -> nn.Parameter:
    return nn.Parameter(1 + 0.1 * torch.randn(shape))


def kind_of(model: Callable[[], nn.Module]) -> Kind:
    def make_model() -> nn.Module:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            return model().train()

    return Kind("beside", make_model, sequences, loss=cross_entropy)


def relay_of(kind: Kind) -> Relay:
    model = kind.make_model()
    return Relay(
        model,
        adamw(model),
        EmulatedDevice(),
        loss=kind.loss,
        loss_over=kind.loss_over,
        config=RelayConfig(micro_batches=2),
    )


def assert_refused(relay: Relay, edit: Any, match: str) -> None:
    """Refused, and nothing has changed."""
    before, stack, held = copy_state(relay.model), relay.stack, copy.copy(vars(relay.model))
    with pytest.raises(ValueError, match=match):
        relay.apply(edit)
    assert relay.stack == stack and relay.journal == () and vars(relay.model) == held
    assert_state(relay.model, before)
