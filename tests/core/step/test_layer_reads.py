"""Tensors that a layer reads and is not given, and tensors that the model leaves on a layer that does not read them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from oracle import assert_equal, both, copy_state, run_both
from torch import Tensor, nn
from zoo import BY_NAME, WIDTH, Chain, Kind, ResidualMlp, sequences

from l2l_core import RelayConfig


class Scaled(ResidualMlp):
    """Its output is scaled by what `read` returns, or by a second argument."""

    read: Callable[[], Tensor] | None = None

    def forward(self, x: Tensor, scale: Tensor | None = None) -> Tensor:
        if self.read is not None:
            scale = self.read()
        return super().forward(x) * (1 if scale is None else scale)


class ReadsElsewhere(Chain):
    """Layer 2 reads a differentiable tensor by `way`, from a variable or an attribute; or is given it, in `passes`."""

    def __init__(self, way: str, passes: bool) -> None:
        super().__init__([Scaled() for _ in range(4)])
        self.gain = nn.Parameter(torch.linspace(0.9, 1.1, WIDTH))
        self.made: dict[str, Tensor] = {}
        layers = self.layers
        read = {
            "hidden state": lambda made: made["entered"].sigmoid(),
            "output of another layer": lambda made: made["first"].sigmoid(),
            "parameter of the model": lambda made: self.gain,
            "made of one": lambda made: made["gain"],
            "weight of another layer": lambda made: layers[0].fc1.weight.mean(),
            "weight of a later layer": lambda made: layers[3].fc1.bias.mean(),
        }[way]
        self.read, self.passes = read, passes
        if not passes:
            layers[2].read = lambda: read(self.made)

    def walk(self, h: Tensor) -> Tensor:
        made = {"entered": h, "gain": self.gain * 2}
        for i, layer in enumerate(self.layers):
            self.made.update(made)
            h = layer(h, self.read(made)) if self.passes and i == 2 else layer(h)
            if i == 0:
                made["first"] = h
        return h


def kind_of(make: Callable[[], nn.Module]) -> Kind:
    chain = BY_NAME["chain"]

    def make_model() -> nn.Module:
        torch.manual_seed(0)
        return make()

    return Kind("reads", make_model, chain.make_batch, chain.loss, loss_over="micro-batch")


@pytest.mark.all_cases
@pytest.mark.parametrize("micro_batches", [1, 2])
@pytest.mark.parametrize(
    "way, remedy",
    [
        ("hidden state", "argument"),
        ("output of another layer", "argument"),
        ("parameter of the model", "argument"),
        ("made of one", "argument"),
        ("weight of another layer", "depth first"),
        ("weight of a later layer", "depth first"),
    ],
)
def test_a_layer_that_reads_what_it_was_not_given_is_refused(way: str, remedy: str, micro_batches: int) -> None:
    """Also where no step is compared with training in core; without this check some would differ by 4e-9 and less."""
    config = RelayConfig(micro_batches=micro_batches, stash="host", verify="never")
    kind = kind_of(lambda: ReadsElsewhere(way, passes=False))
    with both(kind, config) as pair:
        before = copy_state(pair.relay.model)
        said = "not given as arguments.*Pass them as arguments|not passed as an argument.*pass it as an argument"
        with pytest.raises(RuntimeError, match=f"(?s){said}"):
            pair.relay.step(kind.make_batch(4, 0))
        assert all(torch.equal(before[name], value) for name, value in copy_state(pair.relay.model).items())
    if remedy == "argument":
        assert_equal(run_both(kind_of(lambda: ReadsElsewhere(way, passes=True)), 3, config, rows=4))
    else:
        config = RelayConfig(micro_batches=micro_batches, schedule="depth_first", verify="never")
        assert_equal(run_both(kind, 3, config, rows=4))


class LeavesOnLayers(Chain):
    """Leaves the hidden state of its begin on every layer, whose forward does not read it; its own code does."""

    def walk(self, h: Tensor) -> Tensor:
        for layer in self.layers:
            layer.entered = h
        for layer in self.layers:
            h = layer(h)
        return h + sum(layer.entered for layer in self.layers)


@pytest.mark.parametrize("keep", [0, 2])
@pytest.mark.parametrize("stash", ["device", "host"])
def test_a_tensor_that_the_model_leaves_on_a_layer_is_no_output_of_it(stash: Any, keep: int) -> None:
    kind = kind_of(lambda: LeavesOnLayers([ResidualMlp() for _ in range(3)]))
    assert_equal(run_both(kind, 3, RelayConfig(micro_batches=1, stash=stash, keep=keep), rows=6))


class SharesBox(Chain):
    """Gives layer 2 a tensor from a dictionary that all micro-batches share, or, with `own`, from one of its own."""

    def __init__(self, differentiable: bool, own: bool) -> None:
        super().__init__([Scaled() for _ in range(4)])
        self.differentiable, self.own, self.box = differentiable, own, {}

    def walk(self, h: Tensor) -> Tensor:
        box = {} if self.own else self.box
        box["scale"] = (h if self.differentiable else h.detach()).mean((0, 1)).sigmoid()
        for i, layer in enumerate(self.layers):
            h = layer(h, box["scale"]) if i == 2 else layer(h)
        return h


@pytest.mark.all_cases
@pytest.mark.parametrize("keep", [0, 2])
@pytest.mark.parametrize("differentiable", [False, True])
def test_an_argument_of_another_micro_batch_is_refused(differentiable: bool, keep: int) -> None:
    """It is passed on without an operation of the model that would read it."""
    config = RelayConfig(micro_batches=3, keep=keep, verify="never")
    shared = kind_of(lambda: SharesBox(differentiable, own=False))
    with both(shared, config) as pair, pytest.raises(RuntimeError, match="made for micro-batch 2.*in a local variable"):
        pair.relay.step(shared.make_batch(6, 0))
    assert_equal(run_both(kind_of(lambda: SharesBox(differentiable, own=True)), 3, config, rows=6))


class Masked(ResidualMlp):
    """Makes a table at its first call and keeps it."""

    table: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.table is None:
            self.table = torch.linspace(0, 0.1, x.shape[-1])
        return super().forward(x) + self.table


def test_a_table_that_an_evaluation_in_inference_mode_made_trains() -> None:
    """Such a tensor counts no writes in place."""

    def make() -> nn.Module:
        model = Chain([Masked() for _ in range(3)])
        with torch.inference_mode():
            model(*sequences(2)[:-1])
        return model

    assert_equal(run_both(kind_of(make), 3, RelayConfig(micro_batches=2)))
