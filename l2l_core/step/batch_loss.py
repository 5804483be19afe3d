"""One loss over the outputs of all micro-batches, and their outputs detached from their graphs for it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from l2l_core.batches import map_tensors
from l2l_core.step.graph import BoundaryGradient
from l2l_core.step.micro_batch import SuspendedForward

# Copies the batch to the device, and returns the loss of the micro-batches' outputs.
LoadBatchLoss = Callable[[], Callable[[Sequence[Any]], torch.Tensor]]


@dataclass(frozen=True, slots=True)
class BatchLoss:
    """One loss over the outputs of all micro-batches.

    Attributes:
        outputs: returns the outputs of a micro-batch.
        batch: the rows of all micro-batches, for the loss.
        compute: ``(outputs of each micro-batch, batch=...) -> scalar``.
        trains_parameters: whether parameters that the loss reads get their gradient here: on one worker alone.
    """

    outputs: Callable[[nn.Module, Any], Any]
    batch: Any
    compute: Callable[..., torch.Tensor]
    trains_parameters: bool = True


@dataclass(slots=True)
class DetachedOutputs:
    """A micro-batch's outputs as leaves of a new graph.

    Attributes:
        tree: the outputs; tensors are copies without history.
        leaves: those that need a gradient, each with the boundary at which it continues.
    """

    tree: Any
    leaves: list[tuple[torch.Tensor, BoundaryGradient]]

    @staticmethod
    def take(forward: SuspendedForward) -> DetachedOutputs:
        """Take the result of a finished forward, whose tensors must be on the device."""
        leaves: list[tuple[torch.Tensor, BoundaryGradient]] = []

        def detach(tensor: torch.Tensor) -> torch.Tensor:
            leaf = tensor.detach().clone()  # a copy: the stash may offload the tensor
            if tensor.requires_grad:
                leaves.append((leaf.requires_grad_(), forward.segmenter.boundary_of(tensor)))
            return leaf

        result, forward.result = forward.result, None
        return DetachedOutputs(map_tensors(result, detach), leaves)

    def pass_gradients(self) -> None:
        """Add the gradients of the leaves to their boundaries."""
        for leaf, boundary in self.leaves:
            if leaf.grad is not None:
                boundary.add(leaf.grad.clone())  # it may be a view of the gradient of all micro-batches
        self.leaves.clear()
