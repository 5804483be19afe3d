"""A kind of the zoo trained from files and in core, from the same state on the same micro-batches."""

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from norms import ByNorms
from oracle import InCore, MakeOptimizer, adamw, micro_batches_of
from torch import Tensor, nn
from zoo import BY_NAME, Chain, Kind, ResidualMlp, loss_of

from l2l_core import EmulatedDevice, FileShelf, Relay, RelayConfig, empty_weights, in_bf16

ROWS, ENOUGH = 7, "8 MB"
CONFIG = RelayConfig(seed=0, micro_batches=3)

OPTIMIZERS: dict[str, Callable[..., Any]] = {
    "fused": partial(torch.optim.AdamW, fused=True, lr=1e-2),
    "momentum": partial(torch.optim.SGD, momentum=0.9, dampening=0.1, lr=1e-2),
    "sgd": partial(torch.optim.SGD, lr=1e-2),  # keeps nothing
    "bf16": partial(in_bf16(torch.optim.AdamW), lr=1e-2),
    "adafactor": partial(torch.optim.Adafactor, lr=1e-2),  # state of other shapes
    "adagrad": partial(torch.optim.Adagrad, lr=1e-2),  # state before the first step
    "amsgrad": partial(torch.optim.Adam, amsgrad=True, lr=1e-2),
    "norms": ByNorms,
    "rate in a tensor": lambda params: torch.optim.AdamW(params, lr=torch.tensor(1e-2)),
}


def relay_on(folder: Path, kind: Kind, optimizer: MakeOptimizer = adamw, **options: Any) -> Relay:
    """Make a relay over a shelf; `memory_bytes`, `weights` and `resume` go to it, other options to the relay."""
    of_shelf = {name: options.pop(name) for name in ("memory_bytes", "weights", "resume") if name in options}
    model = options.pop("model", None) or kind.make_model()
    made = optimizer(model) if "made" not in options else options.pop("made")
    settings: dict[str, Any] = {"loss": kind.loss, "layers": kind.layers, "config": CONFIG, "device": EmulatedDevice()}
    settings["loss_over"] = kind.loss_over
    shelf = FileShelf(folder=folder, **{"memory_bytes": ENOUGH, **of_shelf})
    return Relay(model, made, shelf=shelf, **(settings | options))


def in_core(kind: Kind, optimizer: MakeOptimizer = adamw, config: RelayConfig = CONFIG) -> InCore:
    """Make the in-core side."""
    model = kind.make_model()
    return InCore(kind, model, optimizer(model), config)


def weights_of(relay: Relay) -> dict[str, Tensor]:
    """Copies of all weights of a relay on a shelf, and its buffers."""
    assert relay.shelf is not None
    return {name: tensor.clone() for name, tensor in relay.shelf.weights()} | buffers_of(relay.model)


def buffers_of(model: nn.Module) -> dict[str, Tensor]:
    return {f"buffer {name}": buffer.clone() for name, buffer in model.named_buffers()}


def state_of(model: nn.Module) -> dict[str, Tensor]:
    """The same of an ordinary model."""
    return {name: param.detach().clone() for name, param in model.named_parameters()} | buffers_of(model)


def assert_same(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> None:
    """Insist on equal bits."""
    assert ours.keys() == theirs.keys()
    unequal = [name for name, tensor in ours.items() if not torch.equal(tensor, theirs[name])]
    assert not unequal, unequal[:8]


@contextmanager
def compared(
    folder: Path, kind: Kind, optimizer: MakeOptimizer = adamw, **options: Any
) -> Iterator[tuple[Relay, InCore]]:
    """Yield both sides; when the block ends, their weights and buffers must be the same."""
    with relay_on(folder, kind, optimizer, **options) as relay:
        plain = in_core(kind, optimizer, relay.config)
        yield relay, plain
        assert_same(weights_of(relay), state_of(plain.model))


def train(relay: Relay, plain: InCore, steps: int) -> None:
    """Train both sides on the batches whose turn it is; losses must be the same."""
    for _ in range(steps):
        batch = plain.kind.make_batch(ROWS, plain.steps)
        assert relay.step(batch).loss == plain.step(batch)


def empty(kind: Kind) -> nn.Module:
    with empty_weights():
        return kind.make_model()


def in_core_loss(kind: Kind, model: nn.Module, seed: int) -> float:
    """The loss of a batch in evaluation mode, in core, of the micro-batches one by one."""

    batch = kind.make_batch(ROWS, seed)
    model.eval()
    with torch.no_grad():
        parts = micro_batches_of(batch, CONFIG.micro_batches)
        total = sum(loss_of(kind, model, part) / (ROWS / len(part[0])) for part in parts)
    model.train()
    return float(total)


def stack(depth: int) -> Kind:
    """A chain of so many layers."""
    chain = BY_NAME["chain"]
    return Kind("stack", lambda: seeded(depth), chain.make_batch, chain.loss)


def seeded(depth: int) -> nn.Module:
    torch.manual_seed(0)
    return Chain([ResidualMlp() for _ in range(depth)])


def smallest(folder: Path, kind: Kind, **options: Any) -> int:
    """The bytes that the refusal of a single one names."""
    with pytest.raises(ValueError, match="the smallest that works is") as refused:
        relay_on(folder, kind, memory_bytes=1, **options)
    found = re.search(r"the smallest that works is ([\d,]+)", str(refused.value))
    assert found is not None
    return int(found[1].replace(",", ""))
