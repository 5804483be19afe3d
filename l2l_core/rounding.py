"""Stochastic rounding of float32 to bfloat16, for optimizer state and packed gradients."""

from __future__ import annotations

import torch

_LOW = 0xFFFF  # bits of a float32 that a bfloat16 lacks


def round_at_random(values: torch.Tensor, seed: int) -> torch.Tensor:
    """Round to a neighbour in bfloat16 so that the expected value is exact; bfloat16 values stay unchanged.

    Args:
        values: float32, finite; overwritten.
        seed: of the random numbers; element i uses the i-th.

    Returns:
        The rounded values, still float32, in the same memory.
    """
    drawn = torch.empty(-(-values.numel() // 4), dtype=torch.int64, device=values.device)
    drawn.random_(-(2**63), None, generator=torch.Generator(values.device).manual_seed(seed))  # four each
    noise = drawn.view(torch.uint16)[: values.numel()].to(torch.int32).view(values.shape)
    # As integers, floats are ordered by magnitude: noise below the last kept bit carries with the right probability
    values.view(torch.int32).add_(noise).bitwise_and_(~_LOW)
    return values
