"""The proof in one call: a kind of the zoo trained by relay and in core, from the same state on the same micro-batches.

The in-core side is plain torch: `l2l_core.model.reference.train_step`, with the batch split and weighed here once more.
"""

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from zoo import Batch, Kind, loss_of

from l2l_core import Relay, RelayConfig, StepResult
from l2l_core.eps.blocks.used_gradients import UsedGradient
from l2l_core.model.reference import train_step

MakeOptimizer = Callable[[nn.Module], Optimizer]


def decay_groups(model: nn.Module, weight_decay: float = 0.1) -> list[dict[str, Any]]:
    """Weight decay for matrices, none for vectors, as everybody does it."""
    params = list(model.parameters())
    return [
        {"params": [p for p in params if p.dim() > 1], "weight_decay": weight_decay},
        {"params": [p for p in params if p.dim() <= 1], "weight_decay": 0.0},
    ]


def adamw(model: nn.Module, **settings: Any) -> Optimizer:
    return torch.optim.AdamW(decay_groups(model), **({"lr": 1e-3} | settings))


def micro_batches_of(batch: Batch, count: int) -> list[Any]:
    """`batch` along dim 0 in `count` parts, the last one smaller if need be."""
    if count == 1:
        return [batch]
    entries = batch if isinstance(batch, dict) else dict(enumerate(batch))
    size = -(-len(next(iter(entries.values()))) // count)
    parts = [{key: entry.split(size)[k] for key, entry in entries.items()} for k in range(count)]
    return parts if isinstance(batch, dict) else [tuple(part.values()) for part in parts]


def targets_in(model: nn.Module, micro_batch: Any) -> int:
    """What the mean loss of a micro-batch is a mean over."""
    labels = micro_batch.get("labels") if isinstance(micro_batch, dict) else None
    if labels is None:
        return len(next(iter(micro_batch.values() if isinstance(micro_batch, dict) else micro_batch)))
    names = (type(module).__name__ for module in model.modules())  # the model may be inside of another one
    is_causal = any(name.endswith(("ForCausalLM", "LMHeadModel")) for name in names)  # they shift the labels by one
    return int(((labels[:, 1:] if is_causal else labels) != -100).sum())


def seeded(config: RelayConfig) -> RelayConfig:
    """The settings with the seed that a relay made now would take from PyTorch."""
    return config.with_seed(torch.initial_seed())


@dataclass
class InCore:
    """The in-core side of a comparison, one step at a time."""

    kind: Kind
    model: nn.Module
    optimizer: Optimizer
    config: RelayConfig
    steps: int = 0
    weight: Callable[[Any], float] | None = None
    objective: Callable[[nn.Module, Any], Tensor] | None = None

    def __post_init__(self) -> None:
        self.config = seeded(self.config)

    def step(self, batch: Batch) -> float:
        """Train on one batch; return the mean loss."""
        return self.step_on(micro_batches_of(batch, self.config.micro_batches))

    def step_on(self, parts: list[Any]) -> float:
        """Train on the micro-batches of one batch; return the mean loss."""
        counts = [(self.weight or partial(targets_in, self.model))(part) for part in parts]
        losses = train_step(
            self.model,
            self.optimizer,
            parts,
            self.objective or self._loss,
            [sum(counts) / n for n in counts],
            [self.config.micro_batch_seed(self.steps, k) for k in range(len(parts))],
            self.config.max_grad_norm,
        )
        self.steps += 1
        return float(sum(losses))

    def _loss(self, model: nn.Module, part: Any) -> Tensor:
        if "use_cache" in inspect.signature(model.forward).parameters:
            part = part | {"use_cache": False}  # as the relay does: a cache changes strides, and so rounding
        return loss_of(self.kind, model, part)


@dataclass(frozen=True)
class Compared:
    """One step, both ways."""

    result: StepResult
    in_core_loss: float
    differences: dict[str, float]  # parameters and buffers whose bits differ, with their largest difference

    @property
    def equal(self) -> bool:
        """Whether loss, parameters and buffers have the same bits."""
        return self.result.loss == self.in_core_loss and not self.differences


@dataclass
class Both:
    """A relay and its in-core counterpart."""

    relay: Relay
    in_core: InCore

    def step(self, batch: Batch, **given: Any) -> Compared:
        """Train both on one batch; `given` goes to the relay's step."""
        expected = self.in_core.step(batch)
        result = self.relay.step(batch, **given)
        return Compared(result, expected, differences(self.relay.model, self.in_core.model))


@contextmanager
def both(
    kind: Kind, config: RelayConfig, optimizer: MakeOptimizer = adamw, layers: list[str] | None = None, **options: Any
) -> Iterator[Both]:
    """A kind twice, as a relay and in core, with an optimizer each. `options` go to the Relay."""
    model, twin = kind.make_model(), kind.make_model()
    weight, objective = options.get("weight"), options.get("objective")
    in_core = InCore(kind, twin, optimizer(twin), config, weight=weight, objective=objective)
    if objective is None:
        options.setdefault("loss", kind.loss)
    options.setdefault("loss_over", kind.loss_over)
    with Relay(model, optimizer(model), layers=layers or kind.layers, config=config, **options) as relay:
        yield Both(relay, in_core)


def run_both(
    kind: Kind,
    steps: int,
    config: RelayConfig,
    optimizer: MakeOptimizer = adamw,
    rows: int = 7,
    layers: list[str] | None = None,
) -> list[Compared]:
    """Train a kind both ways on `steps` batches."""
    with both(kind, config, optimizer, layers) as pair:
        return [pair.step(kind.make_batch(rows, seed)) for seed in range(steps)]


def assert_equal(steps: list[Compared]) -> None:
    """Insist on equal bits, step by step."""
    for index, step in enumerate(steps):
        assert not step.differences, f"step {index}: {len(step.differences)} tensors differ: {step.differences}"
        assert step.result.loss == step.in_core_loss, (
            f"step {index}: not {step.in_core_loss!r} but {step.result.loss!r}"
        )


def state_of(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and all buffers, those that no state_dict shows among them."""
    buffers = {name: b.to_dense() if b.layout is not torch.strided else b for name, b in model.named_buffers()}
    return dict(model.named_parameters()) | buffers


def differences(model: nn.Module, other: nn.Module) -> dict[str, float]:
    """Largest difference of every parameter and buffer whose bits differ."""
    ours, theirs = state_of(model), state_of(other)
    assert ours.keys() == theirs.keys()
    pairs = {name: (tensor.detach(), theirs[name].detach()) for name, tensor in ours.items()}
    return {
        name: float((a.double() - b.double()).abs().max()) for name, (a, b) in pairs.items() if not torch.equal(a, b)
    }


def copy_state(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers by value."""
    return {name: tensor.detach().clone() for name, tensor in state_of(model).items()}


def assert_state(model: nn.Module, expected: dict[str, Tensor]) -> None:
    """Insist that the model is as it was when `copy_state` looked."""
    changed = [name for name, tensor in state_of(model).items() if not torch.equal(tensor, expected[name])]
    assert not changed, f"changed: {changed}"


def has_gradient(param: Tensor) -> bool:
    """Whether a gradient has values. A step leaves none: reading `grad` raises then (`tests/core/eps/test_used_gradients.py`)."""
    return param.grad is not None and not isinstance(param.grad, UsedGradient)
