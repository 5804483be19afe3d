"""What a forward leaves on modules, attributes and buffers: each micro-batch meets its own.
R15 is rule 15 of the design's paused-forwards.md.
"""

import copy
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from by_hand import assert_refused_or_trains, assert_trains, chain_of, kind_of, stashes
from oracle import assert_state, copy_state, micro_batches_of
from patience import HANG_S
from torch import Tensor, nn
from zoo import BY_NAME, WIDTH, Chain, ResidualMlp

from l2l_core import Relay, RelayConfig

# --- R15, R19: tensors that reach a layer by other ways --------------------------------------------------------------


class ReadsAttribute(ResidualMlp):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x * (1 + self.bias))


class SetsAttribute(Chain):
    """A tensor of this micro-batch for all layers, without gradient."""

    def walk(self, h: Tensor) -> Tensor:
        bias = h.detach().mean(-1, keepdim=True)
        for layer in self.layers:
            layer.bias = bias
        return super().walk(h)


@pytest.mark.parametrize("micro_batches", [1, 2, 3])
def test_attribute_per_forward(micro_batches: int) -> None:
    """R19, R15: not another micro-batch's value, in forward and in the recompute."""
    assert_refused_or_trains(chain_of(ReadsAttribute, SetsAttribute), "argument", "device", micro_batches)


class SetsNumber(Chain):
    """A number for all layers, another one for the smaller last micro-batch."""

    def walk(self, h: Tensor) -> Tensor:
        for layer in self.layers:
            layer.bias = 0.1 * len(h)
        return super().walk(h) * len(h)


class CountsUp(ResidualMlp):
    """A plain counter that matters: the recompute must neither see a later value nor count again."""

    count = 0

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        return super().forward(x) * (1 + 0.01 * self.count)


@pytest.mark.parametrize("micro_batches", [1, 3])
def test_counter_in_a_layer(micro_batches: int) -> None:
    """R16 for what is no buffer."""
    assert_refused_or_trains(chain_of(CountsUp), "counter", "host", micro_batches)


def test_number_per_forward() -> None:
    assert_refused_or_trains(chain_of(ReadsAttribute, SetsNumber), "attribute", "device", 3)


class SharesBetweenLayers(ResidualMlp):
    """The first layer computes something that the later ones read from a shared place."""

    def forward(self, x: Tensor) -> Tensor:
        if self.first:
            self.shared["bias"] = x.detach().mean(-1, keepdim=True)
        return super().forward(x * (1 + self.shared["bias"]))


def sharing_chain() -> nn.Module:
    model, shared = Chain([SharesBetweenLayers() for _ in range(3)]), {}
    for index, layer in enumerate(model.layers):
        layer.first, layer.shared = index == 0, shared
    return model


def test_tensor_shared_between_layers() -> None:
    """R19, R15: layers must not find another micro-batch's tensor."""
    assert_refused_or_trains(kind_of(sharing_chain), "argument", "device", micro_batches=3)


class ScalesItself(Chain):
    """The shell leaves something on itself, goes through the layers and reads it again."""

    def walk(self, h: Tensor) -> Tensor:
        self.scale, self.rows = h.detach().abs().mean(), len(h)
        return super().walk(h) * self.scale / self.rows


class CountsForwards(Chain):
    """The same with a buffer that it changes in place."""

    def __init__(self, layers: list[nn.Module]) -> None:
        super().__init__(layers)
        self.register_buffer("count", torch.zeros(()))

    def walk(self, h: Tensor) -> Tensor:
        self.count += 1
        return super().walk(h) * self.count


HANDED_OVER = {
    "attribute": chain_of(ReadsAttribute, SetsAttribute),
    "number": chain_of(ReadsAttribute, SetsNumber),
    "shared": kind_of(sharing_chain),
    "shell": chain_of(ResidualMlp, ScalesItself),
    "buffer": chain_of(ResidualMlp, CountsForwards),
}


@pytest.mark.parametrize("name", HANDED_OVER)
def test_inference_sees_its_own_micro_batch(name: str) -> None:
    """R19: without a step before it, so without anything learnt from one."""
    kind = HANDED_OVER[name]
    model, batch = kind.make_model().eval(), kind.make_batch(7, 0)
    twin = copy.deepcopy(model)
    with torch.no_grad():
        expected = torch.cat([twin(part[0]) for part in micro_batches_of(batch, 3)])
    with Relay(model, loss=kind.loss, loss_over=kind.loss_over, config=RelayConfig(micro_batches=3)) as relay:
        try:
            assert torch.equal(relay.forward(batch), expected)
        except RuntimeError as error:
            assert "micro-batch" in str(error)


@pytest.mark.parametrize("name", ["shell", "buffer"])
def test_shell_reads_what_it_has_left(name: str) -> None:
    """R19: after a pause, in which other micro-batches have run the same code."""
    assert_refused_or_trains(HANDED_OVER[name], "micro-batch", "device", micro_batches=3)


PARKED = """
import torch
from test_module_state import HANDED_OVER, RelayConfig, Relay
from oracle import run_both
kind = HANDED_OVER["attribute"]
config = RelayConfig(micro_batches=1, stash="host")
with Relay(kind.make_model(), loss=kind.loss, loss_over=kind.loss_over, config=config) as relay:
    relay.evaluate(kind.make_batch(4, 0))
assert all(step.equal for step in run_both(kind, 3, config))
"""


def test_parked_attribute_is_not_read() -> None:
    """R19: an unguarded read of an emptied storage would end the process, so it has one of its own."""
    environment = dict(os.environ, PYTHONPATH=os.pathsep.join([str(Path(__file__).parent), *filter(None, sys.path)]))
    done = subprocess.run(
        [sys.executable, "-c", PARKED], capture_output=True, text=True, env=environment, timeout=HANG_S
    )
    assert done.returncode == 0, f"{done.returncode}\n{done.stderr}"


class CachesTable(Chain):
    """A table that the shell makes once, at the first forward, and keeps."""

    def walk(self, h: Tensor) -> Tensor:
        if not hasattr(self.layers[0], "bias"):
            table = torch.arange(h.shape[1]).view(-1, 1) / 10
            for layer in self.layers:
                layer.bias = table
        return super().walk(h)


@pytest.mark.parametrize("micro_batches", [1, 3])
@stashes
def test_cached_constant(stash: str, micro_batches: int) -> None:
    """R19: it stays on the device."""
    assert_trains(chain_of(ReadsAttribute, CachesTable), stash, micro_batches)


class ReadsPython(Chain):
    """Numbers of a tensor, taken after a pause by ways that no dispatcher sees."""

    def walk(self, h: Tensor) -> Tensor:
        lengths, weights = torch.arange(h.shape[1]) % 3, torch.rand(4)
        for layer in self.layers:
            total = sum(lengths.tolist()) + sum(float(w) for w in weights) + float(weights.numpy().sum())
            h = layer(h) * (1 + 0.01 * total)
        return h


@stashes
def test_python_reads_a_parked_tensor(stash: str) -> None:
    """R19: guard everything or keep it."""
    assert_trains(chain_of(ResidualMlp, ReadsPython), stash)


# --- R16: buffers ----------------------------------------------------------------------------------------------------


class Averages(ResidualMlp):
    """Buffers that every forward moves on: in place, and by assignment."""

    def __init__(self, assigns: bool) -> None:
        super().__init__()
        self.assigns = assigns
        self.register_buffer("average", torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x + self.average)
        new = 0.9 * self.average + 0.1 * y.detach().mean((0, 1))
        if self.assigns:
            self.average = new
        else:
            self.average.copy_(new)
        return y


@pytest.mark.parametrize("assigns", [False, True])
@stashes
def test_buffers(stash: str, assigns: bool) -> None:
    """R16: recompute from what the forward saw; the newest values afterwards."""
    assert_trains(chain_of(lambda: Averages(assigns)), stash)


def test_buffers_after_an_error() -> None:
    """R16 and invariant 6: statistics come back too."""
    kind = BY_NAME["batch_norm"]
    model = kind.make_model()
    with Relay(model, loss=kind.loss, loss_over=kind.loss_over, config=RelayConfig(micro_batches=2)) as relay:
        relay.step(kind.make_batch(6, 0))
        before = copy_state(model)
        relay.model.head.register_forward_pre_hook(boom)
        with pytest.raises(ValueError, match="boom"):
            relay.step(kind.make_batch(6, 1))
        assert_state(model, before)


def boom(module: nn.Module, args: Any) -> None:
    raise ValueError("boom")
