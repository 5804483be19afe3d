"""What the model's own head says: the likeliest tokens, read off its output while it is on the device.

This is the logit lens (nostalgebraist, "interpreting GPT: the logit lens", 2020) for whatever model: the layers above are left
out, so the stream goes to the final norm and the head by the model's own code.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from l2l_core.batches import Objective, leaves_in

# By context: micro-batches are greenlets that take turns on one model, and each greenlet has a context of its own.
_outputs: ContextVar[list[Any]] = ContextVar("outputs of the model that runs in this context")


@dataclass(frozen=True, slots=True)
class LensTask:
    """The task of a pass that reads the head: loss, tokens and chances of one row, and the shape of the logits.

    Gives a scalar, (positions, top), (positions, top) and sizes. The first dimension is taken for the rows; who knows how many
    there are judges by the shape whether that is true. Tokens and chances are None where it has no such row, and all but the
    loss where the output has no logits.

    Attributes:
        objective: gives the loss.
        row: whose tokens.
        positions: how many, the first ones.
        top: how many tokens at each.
    """

    objective: Objective
    row: int
    positions: int
    top: int

    def __call__(self, model: nn.Module, micro_batch: Any) -> tuple[torch.Tensor, Any, Any, Any]:
        with _collect_outputs(model) as seen:
            loss = self.objective(model, micro_batch)
        logits = find_logits(seen[-1]) if seen else None  # of the last call, if the objective makes several
        if logits is None:
            return loss.detach(), None, None, None
        if self.row >= len(logits):
            return loss.detach(), None, None, tuple(logits.shape)
        of_row = logits[self.row].float()
        of_row = (of_row if of_row.ndim == 2 else of_row[None])[: self.positions]  # a classifier has one position
        best = of_row.softmax(-1).topk(min(self.top, of_row.shape[-1]), dim=-1)
        return loss.detach(), best.indices, best.values, tuple(logits.shape)


@dataclass(frozen=True, slots=True)
class NextTokenTask:
    """The task of a pass that goes on writing: logits at a position of the only row, (tokens,); None where there are none."""

    objective: Objective
    position: int = field(compare=False)  # passes that differ in it alone need the same

    def __call__(self, model: nn.Module, micro_batch: Any) -> torch.Tensor | None:
        with _collect_outputs(model) as seen:
            self.objective(model, micro_batch)
        logits = find_logits(seen[-1]) if seen else None
        if logits is None or logits.ndim != 3 or len(logits) != 1 or self.position >= logits.shape[1]:
            return None
        return logits[0, self.position].float()


def find_logits(output: Any) -> torch.Tensor | None:
    """Find the logits in what a model gives out: what it calls so, or else its first tensor of numbers.

    Returns:
        (rows, positions, tokens), or (rows, classes), of two or more; None if there are none of such a shape.
    """
    named = output.get("logits") if isinstance(output, Mapping) else getattr(output, "logits", None)
    tensors = [leaf for leaf in leaves_in(output) if isinstance(leaf, torch.Tensor) and leaf.is_floating_point()]
    found = named if isinstance(named, torch.Tensor) else next((one for one in tensors if one.ndim), None)
    return found if found is not None and found.ndim in (2, 3) and found.shape[-1] > 1 else None


@contextmanager
def _collect_outputs(model: nn.Module) -> Iterator[list[Any]]:
    """Collect what the model gives out when it is called in the block, by this micro-batch: others take turns with it."""
    token = _outputs.set([])
    mine = _outputs.get()

    def note(module: nn.Module, args: Any, output: Any) -> None:
        if _outputs.get(None) is mine:
            mine.append(output)

    handle = model.register_forward_hook(note)
    try:
        yield mine
    finally:
        handle.remove()
        _outputs.reset(token)
