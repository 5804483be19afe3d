"""What a step checks of the model before it trains anything: parameters behind its back, gradient checkpointing."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from by_hand import chain_of
from oracle import copy_state
from torch import nn
from zoo import BY_NAME, WIDTH, ResidualMlp

from l2l_core import Relay


@pytest.mark.parametrize(
    "change",
    [
        lambda model: model.to(torch.float64),
        lambda model: model.half(),
        lambda model: model.to("meta"),
        lambda model: setattr(model.layers[1].fc1, "weight", nn.Parameter(torch.zeros(2 * WIDTH, WIDTH))),
        lambda model: setattr(model.layers[1].fc1.weight, "data", torch.zeros(2 * WIDTH, WIDTH)),
        lambda model: model.load_state_dict(copy_state(model), assign=True),
    ],
    ids=["double", "half", "meta", "new parameter", "new data", "assigned"],
)
def test_changed_model_is_noticed(change: Callable[[nn.Module], Any]) -> None:
    kind = chain_of(ResidualMlp)
    model = kind.make_model()
    with Relay(model, loss=kind.loss) as relay:
        relay.step(kind.make_batch(4, 0))
        change(model)
        for act in (relay.step, relay.evaluate, relay.forward):
            with pytest.raises(RuntimeError, match="behind the relay's back|moved or cast"):
                act(kind.make_batch(4, 1))


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_gradient_checkpointing_is_refused(name: str) -> None:
    kind = BY_NAME[name]
    model = kind.make_model()
    enable = getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)  # the newer name
    enable()
    with pytest.raises(ValueError, match="checkpointing_disable"):
        Relay(model)
    model = kind.make_model()
    with Relay(model) as relay:
        getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)()
        with pytest.raises(ValueError, match="checkpointing_disable"):
            relay.step(kind.make_batch(4, 0))
