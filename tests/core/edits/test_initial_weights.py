"""`Insert(init="fresh")` gives the values that the model's own constructor gives, or is refused with a remedy that does."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from small import make_gpt, make_relay
from torch import Tensor, nn

from l2l_core import Insert, Relay

WIDTH = 8


def draw(module: nn.Module) -> None:
    """Initial weights of some paper, without random numbers so that they can be compared."""
    if isinstance(module, nn.Linear):
        nn.init.constant_(module.weight, 0.02)
        nn.init.zeros_(module.bias)


class Plain(nn.Module):
    """Initialised by PyTorch alone."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.inner = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.inner(self.norm(x)))


class InConstructor(Plain):
    def __init__(self) -> None:
        super().__init__()
        draw(self.inner)
        nn.init.constant_(self.norm.weight, 0.5)


class ByApply(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.apply(draw)


class ByMethod(Plain):
    """Draws its weights in a method of any name, and by a function."""

    def __init__(self) -> None:
        super().__init__()
        self.set_up()

    def set_up(self) -> None:
        draw(self.inner)


class WithGain(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.full((WIDTH,), 0.1))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.gain * super().forward(x)


class WithReset(WithGain):
    """Sets after its parts what these have set."""

    def __init__(self) -> None:
        super().__init__()
        self.reset_parameters()

    def reset_parameters(self) -> None:
        draw(self.inner)
        nn.init.constant_(self.gain, 0.1)


class WithOwnInit(InConstructor):
    """As the refusal says."""

    def reset_parameters(self) -> None:
        draw(self.inner)
        nn.init.constant_(self.norm.weight, 0.5)


class Model(nn.Module):
    def __init__(self, layer: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layer() for _ in range(3))
        self.head = nn.Linear(WIDTH, 2)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


class Applies(Model):
    def __init__(self, layer: Callable[[], nn.Module]) -> None:
        super().__init__(layer)
        self.apply(draw)


class LikeTransformers(Model):
    def __init__(self, layer: Callable[[], nn.Module]) -> None:
        super().__init__(layer)
        self.apply(self._init_weights)

    def _init_weights(self, module: nn.Module) -> None:
        draw(module)


class Around(nn.Module):
    """A part of the model knows how its layers are drawn."""

    def __init__(self, layer: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.body = LikeTransformers(layer)

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x)


class ScalesSome(LikeTransformers):
    def __init__(self, layer: Callable[[], nn.Module]) -> None:
        super().__init__(layer)
        for inner in self.layers:
            nn.init.constant_(inner.inner.weight, 0.01)


def trained(model: nn.Module) -> Relay:
    relay = make_relay(model, loss=lambda out, batch: out.square().mean(), loss_over="micro-batch")
    relay.step((torch.randn(4, WIDTH),))
    return relay


def values(module: nn.Module) -> dict[str, Tensor]:
    return {name: param.detach().clone() for name, param in module.named_parameters()}


@pytest.mark.parametrize(
    "make",
    [
        lambda: Model(WithReset),
        lambda: Model(WithOwnInit),
        lambda: LikeTransformers(Plain),
        lambda: Around(Plain),
    ],
)
def test_a_fresh_layer_has_the_values_of_a_new_model(make: Callable[[], Any]) -> None:
    new = make()
    expected = values((new.body if isinstance(new, Around) else new).layers[1])
    with trained(make()) as relay:
        relay.apply(Insert(1, init="fresh"))
        now = values(relay.stack[1].module)
    assert now.keys() == expected.keys() and all(torch.equal(now[name], expected[name]) for name in now)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Model(InConstructor), r"InConstructor.__init__ sets weights itself \(constant_, zeros_\)"),
        (lambda: Model(ByMethod), r"ByMethod.__init__ sets weights itself \(constant_, zeros_\)"),
        (lambda: Model(ByApply), r"ByApply.__init__ sets weights itself \(apply, constant_, zeros_\)"),
        (lambda: Model(WithGain), "neither .* sets gain"),
        (lambda: LikeTransformers(WithGain), "neither .* sets gain"),
        (lambda: Applies(Plain), "Applies.__init__ sets weights by apply"),
    ],
)
def test_a_layer_that_is_drawn_in_another_way_is_refused(make: Callable[[], Any], message: str) -> None:
    new = make().layers[1]
    with trained(make()) as relay:
        before = values(relay.model)
        with pytest.raises(ValueError, match=f"{message}.*pass it as module="):
            relay.apply(Insert(1, init="fresh"))
        assert all(torch.equal(before[name], value) for name, value in values(relay.model).items())
        relay.apply(Insert(1, module=new))
        relay.step((torch.randn(4, WIDTH),))


def test_a_model_that_sets_some_weights_after_its_own_init_is_warned_of() -> None:
    with trained(ScalesSome(Plain)) as relay, pytest.warns(UserWarning, match=r"ScalesSome.__init__ sets .*constant_"):
        relay.apply(Insert(1, init="fresh"))


class Encoder(nn.TransformerEncoderLayer):
    def __init__(self) -> None:
        super().__init__(WIDTH, 2, 16, batch_first=True, dropout=0.0)


def test_attention_of_pytorch_is_drawn_as_new() -> None:
    with trained(Model(Encoder)) as relay:
        relay.apply(Insert(1, init="fresh"))
        layer: Any = relay.stack[1].module
        bound = (6 / (WIDTH + 3 * WIDTH)) ** 0.5  # of Xavier's uniform numbers
        assert 0.8 * bound < layer.self_attn.in_proj_weight.abs().max() <= bound
        assert not layer.self_attn.in_proj_bias.any() and not layer.self_attn.out_proj.bias.any()


def test_a_fresh_layer_of_a_loaded_model_is_drawn(tmp_path: Path) -> None:
    """transformers marks loaded weights, and its `_init_weights` leaves these alone."""
    model = make_gpt(3)
    model.save_pretrained(tmp_path)
    with make_relay(type(model).from_pretrained(tmp_path)) as relay:
        relay.apply(Insert(1, init="fresh"))
        weight = relay.stack[1].module.mlp.c_fc.weight
        assert not torch.equal(weight, relay.stack[0].module.mlp.c_fc.weight)
        assert 0.5 * 0.02 < weight.std() < 1.5 * 0.02
