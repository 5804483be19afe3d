"""Comparison of the loss of a few rows with the losses of the same rows in two parts.

A relay adds up the losses of micro-batches. That is the loss of the batch if it is a mean over rows or targets, or a sum. It is
not if the loss mixes rows (in-batch negatives, pairs of views, a Dice score), if rows were cut along the wrong dimension, or if
the mean has weights. The losses are measured with the model's weights and with perturbed ones: a young model often gives all
rows one loss.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import fmean, stdev
from typing import Any

from l2l_core.batches.batch import RowsOfBatch
from l2l_core.batches.loss_trials import SplitBatch
from l2l_core.batches.target_counts import CandidateCounts

Measure = Callable[[Sequence[Any], bool], Sequence[float]]  # (small batches, perturb the weights?) -> losses

ROUNDING = 1e-5  # of a loss in float32 that was added up in another order
_MOST_ROWS = 4  # of a part
_REPEATS = 24  # of a loss that draws random numbers
_STANDARD_ERRORS = 5.0


@dataclass(frozen=True, slots=True)
class LossComparison:
    """The loss of a few rows, and how well each candidate for its denominator reproduces it from two parts.

    Attributes:
        gaps: relative error of every candidate; 0 if it is rounding. Empty if no trial had finite losses.
        noise: relative uncertainty of `gaps`, for a loss that draws random numbers.
        together: the loss of the rows together, where the best candidate's error is largest.
        in_parts: the best candidate's loss of the same rows.
    """

    gaps: dict[str, float]
    noise: float = 0.0
    together: float = math.nan
    in_parts: float = math.nan

    @property
    def gap(self) -> float:
        """Relative error of the best candidate."""
        return min(self.gaps.values(), default=0.0)

    def fitting(self) -> frozenset[str]:
        """Return the candidates that are as good as the best one, within rounding or noise."""
        limit = max(1.5 * self.gap, self.noise)
        return frozenset(name for name, gap in self.gaps.items() if gap <= limit)


def compare_losses(rows: RowsOfBatch, size: int, counts: CandidateCounts, measure: Measure) -> LossComparison:
    """Compare the loss of a few rows with the losses of their parts, for every candidate in `counts`.

    Args:
        rows: two rows or more.
        size: rows of a micro-batch; a comparison takes at most twice as many, so that it fits the device.
        counts: counts of every row by candidate; None: losses of parts add up.
        measure: returns the losses of small batches, each with random numbers of its own.
    """
    trial = _split(rows, counts, *_parts(rows.count, size))
    batches = _batches_of(trial)
    found: list[LossComparison] = []
    for perturbed in (False, True):
        *losses, again = measure([*batches, batches[0]], perturbed)
        random = _is_random(losses[0], again)
        found.append(_compare_random(trial, measure, perturbed) if random else _compare(trial, losses))
    return _merge([each for each in found if each.gaps])


def _parts(count: int, size: int) -> tuple[list[int], list[int]]:
    """Return the rows of two parts: first rows, and rows from the middle, which may belong to them."""
    size = min(max(min(2, size), min(_MOST_ROWS, size // 2)), count // 2)
    firsts = (size + 1) // 2
    middle = max(2 * firsts, count // 2)
    rows = [*range(firsts), *range(middle, middle + size - firsts), *range(firsts, 2 * firsts)]
    rows += range(middle + size - firsts, middle + 2 * (size - firsts))
    return rows[:size], rows[size:]


def _split(rows: RowsOfBatch, counts: CandidateCounts, first: list[int], second: list[int]) -> SplitBatch:
    def total(column: Sequence[int], chosen: Sequence[int]) -> float:
        return float(sum(column[row] for row in chosen))

    pairs = {n: None if c is None else (total(c, first), total(c, second)) for n, c in counts.items()}
    together, one, other = rows.select([[*first, *second], first, second])
    return SplitBatch(together, one, other, pairs)


def _batches_of(trial: SplitBatch) -> tuple[Any, Any, Any]:
    return trial.together, trial.first, trial.second


def _is_random(one: float, other: float) -> bool:
    return math.isfinite(one) and math.isfinite(other) and abs(one - other) > ROUNDING * max(1.0, abs(one), abs(other))


def _compare(trial: SplitBatch, losses: Sequence[float], noise: float = 0.0) -> LossComparison:
    """Compare three losses: together, first part, second part. `noise` is the absolute uncertainty of a candidate's error."""
    excess = {name: trial.excess(name, losses) for name in trial.counts}
    if not any(map(math.isfinite, excess.values())):
        return LossComparison({})
    largest = max(abs(loss) for loss in losses if math.isfinite(loss))
    exact = max(ROUNDING * max(1.0, largest), noise)
    gaps = {name: 0.0 if abs(each) <= exact else abs(each) / largest for name, each in excess.items()}
    gaps = {name: math.inf if math.isnan(gap) else gap for name, gap in gaps.items()}
    best = min(gaps, key=gaps.__getitem__)
    return LossComparison(gaps, noise / largest if largest else 0.0, losses[0], losses[0] - excess[best])


def _compare_random(trial: SplitBatch, measure: Measure, perturbed: bool) -> LossComparison:
    """Compare means of repeated losses, whose uncertainty is a few standard errors."""
    measured = measure(_batches_of(trial) * _REPEATS, perturbed)
    losses = [measured[i::3] for i in range(3)]
    noise = _STANDARD_ERRORS * math.sqrt(sum(stdev(each) ** 2 for each in losses) / _REPEATS)
    return _compare(trial, [fmean(each) for each in losses], noise)


def _merge(found: Sequence[LossComparison]) -> LossComparison:
    """Return the largest error of every candidate, with the losses where the best candidate has its largest."""
    if not found:
        return LossComparison({})
    gaps = {name: max(each.gaps[name] for each in found) for name in found[0].gaps}
    best = min(gaps, key=gaps.__getitem__)
    shown = max(found, key=lambda each: each.gaps[best])
    return replace(shown, gaps=gaps, noise=max(each.noise for each in found))
