"""The oracle: a training step in core with plain gradient accumulation, written with torch alone."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree


def copy_tensors(micro_batch: Any) -> Any:
    """Copy all tensors in a pytree."""
    return pytree.tree_map_only(torch.Tensor, lambda tensor: tensor.detach().clone(), micro_batch)


def accumulate(
    model: nn.Module,
    micro_batches: Sequence[Any],
    objective: Callable[[nn.Module, Any], torch.Tensor],
    divisors: Sequence[float],
    seeds: Sequence[int],
    copy_batch: Callable[[Any], Any] = copy_tensors,
) -> list[torch.Tensor]:
    """Sum the gradients of all micro-batches in ``param.grad``; return the scaled losses.

    Args:
        model: the model, in training or evaluation mode.
        micro_batches: K parts of the batch. The model gets copies, because it may write into its inputs, and because
            the rounding of some kernels depends on the alignment of a slice.
        objective: returns the scalar loss of one micro-batch.
        divisors: divisor of each loss before backward; K for even micro-batches, infinite for one without targets.
        seeds: seed of the random stream of each micro-batch.
        copy_batch: copies the tensors of a micro-batch, to the model's device if need be.
    """
    losses = []
    for micro_batch, divisor, seed in zip(micro_batches, divisors, seeds, strict=True):
        torch.manual_seed(seed)
        random.seed(seed)
        loss = objective(model, copy_batch(micro_batch))
        # A micro-batch without targets adds nothing, though a mean over no targets is NaN.
        loss = torch.zeros_like(loss, requires_grad=False) if divisor == math.inf else loss / divisor
        if loss.requires_grad:
            loss.backward()
        losses.append(loss.detach().clone())
    return losses


def accumulate_together(
    model: nn.Module,
    micro_batches: Sequence[Any],
    outputs: Callable[[nn.Module, Any], Any],
    loss: Callable[[Sequence[Any]], torch.Tensor],
    seeds: Sequence[int],
    copy_batch: Callable[[Any], Any] = copy_tensors,
    after_loss: Callable[[], None] = lambda: None,
) -> list[torch.Tensor]:
    """Sum the gradients of one loss over all micro-batches in ``param.grad``, and return it.

    Every micro-batch's graph is kept until the loss of their detached outputs has run backward; then each of them runs backward
    from its part of the gradient, in ascending order.

    Args:
        outputs: returns the outputs of one micro-batch, a pytree.
        loss: returns the scalar loss of a batch from the outputs of each micro-batch.
        after_loss: called when the loss has run backward.
        model, micro_batches, seeds, copy_batch: as for `accumulate`.
    """
    results = []
    for micro_batch, seed in zip(micro_batches, seeds, strict=True):
        torch.manual_seed(seed)
        random.seed(seed)
        results.append(outputs(model, copy_batch(micro_batch)))
    detached = [
        pytree.tree_map_only(torch.Tensor, lambda t: t.detach().clone().requires_grad_(t.requires_grad), result)
        for result in results
    ]
    total = loss(detached)
    if total.requires_grad:
        total.backward()
    after_loss()
    for result, own in zip(results, detached, strict=True):
        pairs = zip(pytree.tree_leaves(result), pytree.tree_leaves(own), strict=True)
        parts = [(t, leaf.grad) for t, leaf in pairs if isinstance(t, torch.Tensor) and leaf.grad is not None]
        if parts:
            torch.autograd.backward([t for t, _ in parts], [grad for _, grad in parts])
    return [total.detach().clone()]


def train_step(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    micro_batches: Sequence[Any],
    objective: Callable[[nn.Module, Any], torch.Tensor],
    divisors: Sequence[float],
    seeds: Sequence[int],
    max_grad_norm: float | None = None,
) -> list[torch.Tensor]:
    """Take one step of plain training by `accumulate`; return the scaled losses."""
    return update_after(
        partial(accumulate, model, micro_batches, objective, divisors, seeds), model, optimizer, max_grad_norm
    )


def update_after(
    add_gradients: Callable[[], list[torch.Tensor]],
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    max_grad_norm: float | None = None,
) -> list[torch.Tensor]:
    """Add gradients, clip, update, clear; return the losses of `add_gradients`. Keeps the random state."""
    python_state = random.getstate()
    with torch.random.fork_rng(range(torch.cuda.device_count())):  # all devices: `manual_seed` seeds all
        losses = add_gradients()
    random.setstate(python_state)
    if max_grad_norm is not None:
        torch.nn.utils.clip_grad_norm_(model.parameters(), max_grad_norm)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    for param in model.parameters():
        param.grad = None  # also of parameters that are not in the optimizer
    return losses
