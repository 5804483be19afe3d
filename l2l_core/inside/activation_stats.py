"""Statistics of activations, computed on their device in chunks, without a second copy."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch

from l2l_core.inside.inspection_result import BINS, ActivationStats

CHUNK_NUMEL = 1 << 18  # numbers converted to float64 at once
_HISTOGRAM_DEVIATIONS = 4  # half width of a histogram, in standard deviations


def activation_stats(tensor: torch.Tensor) -> ActivationStats:
    """Return statistics of a floating-point tensor of any shape; synchronizes with the device twice."""
    low, high, total, squares, count, zeros = math.inf, -math.inf, 0.0, 0.0, 0, 0
    for piece in _finite_chunks(tensor):
        # As one tensor: every read by Python synchronizes with a GPU.
        figures = torch.stack(
            [piece.min(), piece.max(), piece.sum(), piece.square().sum(), (piece == 0).sum().double()]
        )
        smallest, largest, sum_, sum_squares, zero_count = figures.tolist()
        low, high = min(low, smallest), max(high, largest)
        total, squares, count, zeros = total + sum_, squares + sum_squares, count + len(piece), zeros + int(zero_count)
    broken = tensor.numel() - count
    if not count:
        return ActivationStats(tensor.numel(), math.nan, math.nan, math.nan, 0.0, broken, (), 0.0, 0.0, 0)
    mean = total / count
    deviation = math.sqrt(max(squares / count - mean**2, 0.0))  # rounding may make it negative
    low, high = max(low, mean - _HISTOGRAM_DEVIATIONS * deviation), min(high, mean + _HISTOGRAM_DEVIATIONS * deviation)
    if not low < high:  # equal numbers: all in the middle bin
        low, high = mean - (abs(mean) or 1.0) / 2, mean + (abs(mean) or 1.0) / 2
    counts = [0] * BINS
    for piece in _finite_chunks(tensor):
        inside = piece[(piece >= low) & (piece <= high)]
        # Clamped: the highest number would be in a bin after the last.
        bins = ((inside - low) * (BINS / (high - low))).long().clamp(0, BINS - 1)
        counts = [a + b for a, b in zip(counts, torch.bincount(bins, minlength=BINS).tolist(), strict=True)]
    rms, zero_share = math.sqrt(squares / count), zeros / tensor.numel()
    return ActivationStats(
        tensor.numel(), mean, deviation, rms, zero_share, broken, tuple(counts), low, high, count - sum(counts)
    )


def relative_change(before: torch.Tensor, after: torch.Tensor) -> tuple[float, float]:
    """Compare hidden states of one shape, whose last dimension is the features.

    Returns:
        The norm of their difference over the norm of the first, NaN if that norm is 0; and the mean over tokens of their
            cosine,
        which is 0 for a token with a norm of 0. A number that is not finite makes the cosine NaN, and the first figure NaN or
        infinite.
    """
    features = before.shape[-1]
    pairs = zip(*(t.reshape(-1, features).split(max(1, CHUNK_NUMEL // features)) for t in (before, after)), strict=True)
    sums, tokens = [0.0, 0.0, 0.0], before.numel() // features
    for a, b in ((a.double(), b.double()) for a, b in pairs):
        cosines = torch.nn.functional.cosine_similarity(a, b, dim=-1)
        figures = torch.stack([(b - a).square().sum(), a.square().sum(), cosines.sum()]).tolist()
        sums = [x + y for x, y in zip(sums, figures, strict=True)]
    added = math.sqrt(sums[0] / sums[1]) if sums[1] > 0 else math.nan
    return added, sums[2] / tokens


def relative_change_by_position(before: torch.Tensor, after: torch.Tensor) -> torch.Tensor:
    """Return |first - second| / |first| by position, (positions,), on the host; NaN where |first| is 0."""
    a, b = before.double(), after.double()
    norms = a.norm(dim=-1)
    return ((b - a).norm(dim=-1) / norms.where(norms > 0, math.nan)).float().cpu()


def _finite_chunks(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    for piece in tensor.detach().reshape(-1).split(CHUNK_NUMEL):
        exact = piece.double()
        finite = exact[exact.isfinite()]
        if len(finite):
            yield finite
