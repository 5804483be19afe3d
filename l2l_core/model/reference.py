"""The oracle: the same step in core, written with torch alone.

Plain gradient accumulation over micro-batches with the whole model on one device. It shares no code with the relay.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree


def copy_tensors(micro_batch: Any) -> Any:
    """Copy all tensors in containers that PyTorch knows."""
    return pytree.tree_map_only(torch.Tensor, lambda tensor: tensor.detach().clone(), micro_batch)


def accumulate(
    model: nn.Module,
    micro_batches: Sequence[Any],
    objective: Callable[[nn.Module, Any], torch.Tensor],
    divisors: Sequence[float],
    seeds: Sequence[int],
    copy_batch: Callable[[Any], Any] = copy_tensors,
) -> list[torch.Tensor]:
    """Add the gradients of all micro-batches up in ``param.grad``; return the scaled losses.

    Args:
        model: the model, in the mode in which it shall run.
        micro_batches: K parts of the batch. The model gets copies: what it writes into its inputs stays in them, and a
            slice does not begin where an allocation would, by which some kernels choose how they round.
        objective: gives the scalar loss of one micro-batch.
        divisors: each loss is divided by its own before backward; K for even micro-batches.
        seeds: seed of the random stream of each micro-batch.
        copied: copies the tensors of a micro-batch, on the way to the model's device.
    """
    losses = []
    for micro_batch, divisor, seed in zip(micro_batches, divisors, seeds, strict=True):
        torch.manual_seed(seed)
        random.seed(seed)
        loss = objective(model, copy_batch(micro_batch)) / divisor
        if loss.requires_grad:
            loss.backward()
        losses.append(loss.detach().clone())
    return losses


def train_step(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    micro_batches: Sequence[Any],
    objective: Callable[[nn.Module, Any], torch.Tensor],
    divisors: Sequence[float],
    seeds: Sequence[int],
    max_grad_norm: float | None = None,
    copy_batch: Callable[[Any], Any] = copy_tensors,
) -> list[torch.Tensor]:
    """Take one step of plain training: accumulate, clip, update, clear. Returns scaled losses; keeps random state."""
    python_state = random.getstate()
    with torch.random.fork_rng(range(torch.cuda.device_count())):  # all, as `manual_seed` seeds all
        losses = accumulate(model, micro_batches, objective, divisors, seeds, copy_batch)
    random.setstate(python_state)
    if max_grad_norm is not None:
        torch.nn.utils.clip_grad_norm_(model.parameters(), max_grad_norm)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    for param in model.parameters():
        param.grad = None  # of parameters that the optimizer does not have, too
    return losses
