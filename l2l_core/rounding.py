"""Stochastic rounding of float32 to bfloat16, for optimizer state and for gradients in fewer bits."""

from __future__ import annotations

import torch

_LOW = 0xFFFF  # the bits of a float32 that a bfloat16 does not have


def round_at_random(values: torch.Tensor, seed: int) -> torch.Tensor:
    """Round to a neighbour in bfloat16 with the probability that makes the mean right; what fits stays as it is.

    Args:
        values: float32, finite; they are written into.
        seed: of the random numbers; element i gets the i-th of them.

    Returns:
        The rounded values, still in float32: the same memory.
    """
    drawn = torch.empty(-(-values.numel() // 4), dtype=torch.int64, device=values.device)
    drawn.random_(-(2**63), None, generator=torch.Generator(values.device).manual_seed(seed))  # four at a time
    noise = drawn.view(torch.uint16)[: values.numel()].to(torch.int32).view(values.shape)
    # As an integer, a float grows with its magnitude: adding noise below the last kept bit carries as often as it should
    values.view(torch.int32).add_(noise).bitwise_and_(~_LOW)
    return values
