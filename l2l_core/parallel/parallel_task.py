"""A model, a batch and some steps of training; and the form of a way to train them over ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import mse_loss

from l2l_core.model import resolve_layers
from l2l_core.parallel.parallel_traffic import WireBytes

Tensor = torch.Tensor


class WideMlp(nn.Module):
    """Layer of the example: widen, narrow, add."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, hidden), nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(x)))


def make_mlp_stack() -> nn.Sequential:
    """Return four layers 64 to 256 wide, in float64 so that differences are those of the way, not of rounding."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Sequential(*(WideMlp(64, 256) for _ in range(4))).double()


def make_mlp_batch() -> tuple[Tensor, Tensor]:
    """Return 16 rows of inputs and targets for `make_mlp_stack`."""
    generator = torch.Generator().manual_seed(1)
    inputs, targets = torch.randn(2, 16, 64, generator=generator, dtype=torch.float64)
    return inputs, targets


@dataclass(frozen=True)
class ParallelTask:
    """A model, a batch and some steps of AdamW, which every way trains alike.

    It is pickled, so functions are those of a module. Buffers, which DDP sends too, are not counted in formulas.

    Attributes:
        make_model: returns the model, with the same weights on every rank; it is called with the inputs alone.
        make_batch: returns inputs and targets of all ranks, rows first.
        loss: of outputs and targets, a mean over rows.
        steps: on the same batch, at least 4.
        learning_rate: of AdamW.
        layers: names of the layers that are sharded or split one by one; default those that a relay finds.

    Example:
        See `run_parallel`.
    """

    make_model: Callable[[], nn.Module] = make_mlp_stack
    make_batch: Callable[[], tuple[Tensor, Tensor]] = make_mlp_batch
    loss: Callable[[Tensor, Tensor], Tensor] = mse_loss
    steps: int = 4
    learning_rate: float = 1e-3
    layers: tuple[str, ...] | None = None

    def layers_of(self, model: nn.Module) -> list[nn.Module]:
        """Return the layers of a model in their order."""
        return list(resolve_layers(model, self.layers).values())

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        """Return AdamW over a model's parameters."""
        return torch.optim.AdamW(model.parameters(), lr=self.learning_rate)


@dataclass
class PreparedRank:
    """A rank that is ready to train by some way.

    Attributes:
        parameters: its own by the model's names; a `DTensor` where it holds a part.
        optimizer: of these.
        backward: runs forward and backward on inputs and targets.
        share: its part of the rows, and the number of parts.
    """

    parameters: Mapping[str, nn.Parameter]
    optimizer: Any
    backward: Callable[[Tensor, Tensor], object]
    share: tuple[int, int] = field(default_factory=lambda: (dist.get_rank(), dist.get_world_size()))


class ParallelWay(NamedTuple):
    """A way to train over ranks.

    Attributes:
        prepare: makes a rank of a task, its model, and the number of ranks.
        traffic: bytes that a rank sends in a step, of the same and the inputs of all rows.
        title: library that runs it.
        ranks: the only number of ranks, or None if any will do.
    """

    prepare: Callable[[ParallelTask, nn.Module, int], PreparedRank]
    traffic: Callable[[ParallelTask, nn.Module, int, Tensor], WireBytes]
    title: str
    ranks: int | None = None


def bytes_of(model: nn.Module) -> int:
    """Return the bytes of a model's parameters."""
    return sum(param.nbytes for param in model.parameters())
