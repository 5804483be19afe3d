"""Whether a gradient is finite: what is asked of each before anything is made of it."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from l2l_core._torch import foreach_norm
from l2l_core.eps.blocks import Block, BlockGradient, Unit
from l2l_core.eps.errors import NonFiniteError


def check_finite(unit: Unit, block: Block, gradient: BlockGradient) -> float:
    """Compute the norm of a gradient, which may be infinite by overflow alone.

    Raises:
        NonFiniteError: an element of it is not finite.
    """
    norm = joint_norm(gradient.tensors())
    if not math.isfinite(norm):
        names = [block.names[i] for i, view in gradient.views().items() if not torch.isfinite(view).all()]
        if not names:
            return norm
        raise NonFiniteError(
            f"the gradient of {unit.name} (layer {unit.key}) is not finite, the first in backward order; its weights were "
            f"not updated. Affected: {', '.join(names[:5])}. Lower the learning rate, clip with max_grad_norm and "
            "update='deferred', or look at this layer's inputs"
        )
    return norm


def joint_norm(parts: Sequence[torch.Tensor]) -> float:
    """Compute the norm of some tensors together; 0 of none."""
    if len(parts) == 1:
        return torch.linalg.vector_norm(parts[0]).item()
    return torch.linalg.vector_norm(torch.stack(foreach_norm(list(parts)))).item() if parts else 0.0
