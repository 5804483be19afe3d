"""What is cut at a layer call: tensors keep their identity, gradients the sums and strides of plain training.
R6 is rule 6 of the design's paused-forwards.md.
"""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from by_hand import assert_trains, chain_of, kind_of, stashes
from torch import Tensor, nn
from zoo import BY_NAME, STEPS, WIDTH, Chain, Mlp, ResidualMlp

from l2l_core import Relay

# --- R6, R7: what is cut ---------------------------------------------------------------------------------------------


class Views(Chain):
    """Slices, transposes and halves of one tensor enter layers; the shell reads the whole before and after."""

    def walk(self, h: Tensor) -> Tensor:
        a = self.layers[0](h[:, 1:])
        b = self.layers[1](h.transpose(1, 2).contiguous().transpose(1, 2))
        left, right = h.sigmoid().split(STEPS // 2, dim=1)
        return torch.cat([a, self.layers[2](left) + right, b * h], dim=1)


@stashes
def test_views_enter_layers(stash: str) -> None:
    """R6: a view cannot be detached in place."""
    assert_trains(chain_of(ResidualMlp, Views), stash)


class ReadsBefore(Chain):
    """The shell reads a tensor before it enters a layer, and between layers."""

    def walk(self, h: Tensor) -> Tensor:
        gate = h.sigmoid()
        for layer in self.layers:
            doubled, total = h * 2, h.sum(-1, keepdim=True)
            h = layer(h) * gate + doubled + total.tanh() + h
        return h


class Squares(Chain):
    """Autograd saves the very tensors that enter layers: views, their bases, and neither."""

    def walk(self, h: Tensor) -> Tensor:
        view = h[:, :]
        square = view * view
        h = self.layers[0](view) + square
        half = h[:, :4]
        h = self.layers[1](h) + half.mean(1, keepdim=True) * half.sum(1, keepdim=True)
        return self.layers[2](h) + F.gelu(h) * h


class ReadsLate(Chain):
    """What early code has made enters layers far later, some of it for the second time."""

    def walk(self, h: Tensor) -> Tensor:
        a, b = h.sin(), h.cos()
        c = a * b
        h = self.layers[0](a)
        d = h * c
        return self.layers[2](c) + self.layers[1](b + d) * a + d * self.layers[0](c)


@pytest.mark.parametrize("shell", [ReadsBefore, Squares, ReadsLate])
@pytest.mark.parametrize("layer", [Mlp, ResidualMlp])
@stashes
def test_sums_in_the_order_of_plain_training(stash: str, layer: type, shell: type[Chain]) -> None:
    """R6, R8: shell code is back-propagated in the reverse order of its making, whatever lies between."""
    assert_trains(chain_of(layer, shell), stash)


class Passing(Mlp):
    """Returns its first input as it is, its output twice, a slice of its input, and things that are no tensors."""

    def forward(self, x: Tensor, skip: Tensor | None = None) -> dict[str, Any]:
        y = super().forward(x)
        return {"x": x, "y": (y, [y]), "skip": skip, "slice": x[:, :1], "class": y.argmax(-1), "none": None, "n": 3}


class AssertsIdentity(Chain):
    def walk(self, h: Tensor) -> Tensor:
        first = h
        for layer in self.layers:
            out = layer(h, skip=first)
            assert out["x"] is h and out["skip"] is first and out["y"][0] is out["y"][1][0]
            assert out["none"] is None and out["n"] == 3
            h = h + out["y"][0] * out["n"] + out["slice"] + F.one_hot(out["class"], WIDTH) + 0.1 * out["skip"]
        return h


@stashes
def test_tensors_keep_their_identity(stash: str) -> None:
    """R7"""
    assert_trains(chain_of(Passing, AssertsIdentity), stash)


class WeightOut(ResidualMlp):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return super().forward(x), self.norm.weight, self.fc1.bias.detach()[:WIDTH]


class UsesWeight(Chain):
    def walk(self, h: Tensor) -> Tensor:
        for layer in self.layers:
            h, weight, bias = layer(h)
            h = h * weight + bias
        return h


@stashes
def test_layer_gives_out_its_weights(stash: str) -> None:
    """R6: the slot will hold another layer's soon."""
    assert_trains(chain_of(WeightOut, UsesWeight), stash)


class Gate(ResidualMlp):
    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        return super().forward(x) * gate


class ShellParameterAsArgument(Chain):
    def __init__(self, layers: list[nn.Module]) -> None:
        super().__init__(layers)
        self.gate = nn.Parameter(torch.ones(WIDTH))

    def walk(self, h: Tensor) -> Tensor:
        for layer in self.layers:
            h = layer(h, self.gate) + layer(h, h)
        return h


@stashes
def test_arguments_met_before(stash: str) -> None:
    """R6, R8, R14: a parameter of the shell, and one tensor twice, as arguments; each layer is visited twice."""
    assert_trains(chain_of(Gate, ShellParameterAsArgument), stash)


class TensorHooks(Chain):
    """The user's own hooks on tensors that enter and leave layers; clamping shows how often and on what they run."""

    def walk(self, h: Tensor) -> Tensor:
        for layer in self.layers:
            h = h * 1.5
            h.register_hook(lambda grad: grad.clamp(-1e-2, 1e-2))
            y = layer(h)
            y.register_hook(lambda grad: grad * 2)
            h = h + y
        return h


@stashes
def test_tensor_hooks_of_the_user(stash: str) -> None:
    """R6, R18: on the whole gradient, once."""
    assert_trains(chain_of(Mlp, TensorHooks), stash)


def test_tensor_hook_on_a_skip_connection() -> None:
    """R6, R18: a layer's output that is read by two layers further on."""

    class Skips(Chain):
        def walk(self, h: Tensor) -> Tensor:
            a = self.layers[0](h)
            a.register_hook(lambda grad: grad.clamp(-1e-2, 1e-2))
            b = self.layers[1](a)
            return self.layers[2](b * 1.5 + a) + a

    assert_trains(chain_of(ResidualMlp, Skips))


def test_gradient_taken_inside_a_layer() -> None:
    """R6: an energy's gradient by autograd.grad, as part of the layer's forward."""

    class Energy(ResidualMlp):
        def forward(self, x: Tensor) -> Tensor:
            y = super().forward(x)
            return y + torch.autograd.grad(y.square().sum(), x, create_graph=True)[0]

    assert_trains(chain_of(Energy))


# --- R9, R11: bits that a relay changes easily -----------------------------------------------------------------------


class ChannelsLast(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(8, 8, 3, padding=1), nn.LayerNorm(8)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.norm(self.conv(x).permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


class Images(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.layers = nn.ModuleList(ChannelsLast() for _ in range(3))
        self.head = nn.Linear(8, 5)
        self.to(memory_format=torch.channels_last)

    def forward(self, x: Tensor) -> Tensor:
        h = self.stem(x.to(memory_format=torch.channels_last))
        for layer in self.layers:
            h = layer(h)
        return self.head(h.mean((2, 3)))


@stashes
def test_gradients_keep_their_strides(stash: str) -> None:
    """R9: boundary gradients come by a hook, not from `.grad`; weights stay channels-last."""
    kind = kind_of(Images, BY_NAME["inplace"].make_batch)
    assert_trains(kind, stash)
    model = kind.make_model()
    with Relay(model, loss=kind.loss, loss_over=kind.loss_over) as relay:
        relay.step(kind.make_batch(4, 0))
        assert model.layers[0].conv.weight.is_contiguous(memory_format=torch.channels_last)
