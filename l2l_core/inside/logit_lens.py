"""The likeliest tokens of the model's own head, read from its output on the device.

This is the logit lens (nostalgebraist, "interpreting GPT: the logit lens", 2020) for any model: without the layers after a
depth, the model's own code passes the hidden state to its final norm and head.
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

# By context: micro-batches are greenlets, which share the model but not the context.
_outputs: ContextVar[list[Any]] = ContextVar("outputs of the model that runs in this context")


@dataclass(frozen=True, slots=True)
class LensTask:
    """Task of a pass that reads the head: loss, tokens, probabilities of one row, shape of the logits.

    Returns a scalar, (positions, top), (positions, top) and sizes. The first dimension is taken for the rows; the caller
    checks that with the shape. Tokens and chances are None without such a row, and all but the loss without logits.

    Attributes:
        objective: returns the loss.
        row: row of the tokens.
        positions: number of its first positions.
        top: number of tokens at each.
    """

    objective: Objective
    row: int
    positions: int
    top: int

    def __call__(self, model: nn.Module, micro_batch: Any) -> tuple[torch.Tensor, Any, Any, Any]:
        with _collect_outputs(model) as outputs:
            loss = self.objective(model, micro_batch)
        logits = find_logits(outputs[-1]) if outputs else None  # of the last call, if the objective makes several
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
    """Task of a generating pass: logits at a position of the only row, (tokens,); None without such logits."""

    objective: Objective
    position: int = field(compare=False)  # passes that differ only in it need equal memory

    def __call__(self, model: nn.Module, micro_batch: Any) -> torch.Tensor | None:
        with _collect_outputs(model) as outputs:
            self.objective(model, micro_batch)
        logits = find_logits(outputs[-1]) if outputs else None
        if logits is None or logits.ndim != 3 or len(logits) != 1 or self.position >= logits.shape[1]:
            return None
        return logits[0, self.position].float()


def find_logits(output: Any) -> torch.Tensor | None:
    """Find the logits in a model's output: its entry `logits`, or else its first floating-point tensor.

    Returns:
        (rows, positions, tokens), or (rows, classes), of two or more; None without a tensor of such a shape.
    """
    named = output.get("logits") if isinstance(output, Mapping) else getattr(output, "logits", None)
    tensors = [leaf for leaf in leaves_in(output) if isinstance(leaf, torch.Tensor) and leaf.is_floating_point()]
    found = named if isinstance(named, torch.Tensor) else next((one for one in tensors if one.ndim), None)
    return found if found is not None and found.ndim in (2, 3) and found.shape[-1] > 1 else None


@contextmanager
def _collect_outputs(model: nn.Module) -> Iterator[list[Any]]:
    """Collect the model's outputs for this micro-batch in a block; other micro-batches run in between."""
    token = _outputs.set([])
    own = _outputs.get()

    def collect(module: nn.Module, args: Any, output: Any) -> None:
        if _outputs.get(None) is own:
            own.append(output)

    handle = model.register_forward_hook(collect)
    try:
        yield own
    finally:
        handle.remove()
        _outputs.reset(token)
