"""Kinds of the zoo trained on a GPU, in core and by relay, with an optimizer whose updates round alike on GPU and host."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from oracle import InCore
from torch import nn
from torch.utils import _pytree as pytree
from zoo import Kind

from l2l_core import CudaDevice, Device, Relay, RelayConfig

# cuBLAS reads it once, when it is first used; then its results do not depend on what else runs.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    """An optimizer that keeps rounding small: Adam's first steps blow noise around zero up to the learning rate."""
    return torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.05, momentum=0.9)


def to_gpu(batch: Any) -> Any:
    return pytree.tree_map_only(torch.Tensor, lambda tensor: tensor.cuda(), batch)


def model_on_gpu(kind: Kind) -> nn.Module:
    """A kind's model with all that belongs to it: `nn.Module.to` leaves the scales of 8-bit codes of bitsandbytes behind."""
    model = kind.make_model()
    for module in model.modules():
        if type(weight := module._parameters.get("weight")).__name__ == "Int8Params":
            module.weight = weight.to("cuda")
    return model.cuda()


def train_in_core(kind: Kind, config: RelayConfig, steps: int = 3) -> tuple[list[float], nn.Module]:
    """Plain training on the GPU, moved to the host afterwards."""
    model = model_on_gpu(kind)
    side = InCore(kind, model, sgd(model), config)
    losses = [side.step(to_gpu(kind.make_batch(7, step))) for step in range(steps)]
    return losses, model.cpu()


def relay_on_gpu(
    kind: Kind, config: RelayConfig, device: Device | None = None, model: nn.Module | None = None, **options: Any
) -> Relay:
    """A relay of a kind on the GPU, or on `device`."""
    model = kind.make_model() if model is None else model
    options = {"layers": kind.layers, "loss": kind.loss, "loss_over": kind.loss_over, **options}
    return Relay(model, sgd(model), device or CudaDevice(), config=config, **options)


def train_by_relay(
    kind: Kind, config: RelayConfig, device: Device | None = None, steps: int = 3
) -> tuple[list[float], nn.Module]:
    with relay_on_gpu(kind, config, device) as relay:
        return [relay.step(kind.make_batch(7, step)).loss for step in range(steps)], relay.model


def unequal(one: nn.Module, other: nn.Module) -> list[str]:
    """Names of parameters and buffers whose bits differ."""
    ours, theirs = one.state_dict(), other.state_dict()
    same = ours.keys() == theirs.keys()
    return (
        [name for name, tensor in ours.items() if not torch.equal(tensor.cpu(), theirs[name].cpu())]
        if same
        else ["names"]
    )


@contextmanager
def deterministic() -> Iterator[None]:
    """PyTorch's deterministic algorithms, as equal bits on a GPU need."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)
