"""The likeliest tokens of the model's own head, read from its output on the device.

This is the logit lens (nostalgebraist, "interpreting GPT: the logit lens", 2020) for any model: without the layers after a
depth, the model's own code passes the hidden state to its final norm and head.
"""

from __future__ import annotations

from collections.abc import Mapping
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
    """

    objective: Objective
    row: int
    positions: int
    top: int

    def __call__(self, model: nn.Module, micro_batch: Any) -> tuple[torch.Tensor, Any, Any, Any]:
        loss, logits = _loss_and_logits(self.objective, model, micro_batch)
        if logits is None or self.row >= len(logits):
            return loss, None, None, None if logits is None else tuple(logits.shape)
        of_row = logits[self.row].float()
        of_row = (of_row if of_row.ndim == 2 else of_row[None])[: self.positions]  # a classifier has one position
        best = of_row.softmax(-1).topk(min(self.top, of_row.shape[-1]), dim=-1)
        return loss, best.indices, best.values, tuple(logits.shape)


@dataclass(frozen=True, slots=True)
class NextTokenTask:
    """Task of a generating pass: logits at a position of the first row, (tokens,); None without such logits."""

    objective: Objective
    position: int = field(compare=False)  # passes that differ only in it need equal memory
    rows: int = 1  # of the micro-batch: several if they belong together

    def __call__(self, model: nn.Module, micro_batch: Any) -> torch.Tensor | None:
        _, logits = _loss_and_logits(self.objective, model, micro_batch)
        if logits is None or logits.ndim != 3 or len(logits) != self.rows or self.position >= logits.shape[1]:
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


def _loss_and_logits(
    objective: Objective, model: nn.Module, micro_batch: Any
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Run the objective; return its loss, and the logits of the model's last call for this micro-batch."""
    token = _outputs.set(own := [])

    def collect(module: nn.Module, args: Any, output: Any) -> None:
        if _outputs.get(None) is own:  # other micro-batches run in between
            own.append(output)

    handle = model.register_forward_hook(collect)
    try:
        loss = objective(model, micro_batch)
    finally:
        handle.remove()
        _outputs.reset(token)
    return loss.detach(), find_logits(own[-1]) if own else None
