"""Comparison of the loss of a few rows with the losses of the same rows in two parts.

A relay adds up the losses of micro-batches. That is the loss of the batch if it is a mean over rows or targets, or a sum. It is
not if the loss mixes rows (in-batch negatives, pairs of views, a Dice score), if rows were cut along the wrong dimension, or if
the mean has weights. The losses are measured with the model's weights and with perturbed ones: a young model often gives all
rows one loss.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations, product
from statistics import fmean, stdev
from typing import Any

import torch

from l2l_core.batches.batch import PartChange, RowsOfBatch
from l2l_core.batches.containers import leaves_in
from l2l_core.batches.loss_trials import SplitBatch
from l2l_core.batches.target_counts import SUM, CandidateCounts, labels_in

RunFn = Callable[[Sequence[Any], bool], Sequence[Any]]  # (small batches, perturb the weights?) -> outputs
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
        of_parts: every candidate's loss of the same rows.
        shows_sum: False if a part's loss is 0: losses then add up too if the mean gives that part's rows no weight.
    """

    gaps: dict[str, float]
    noise: float = 0.0
    together: float = math.nan
    of_parts: dict[str, float] = field(default_factory=dict)
    shows_sum: bool = True

    @property
    def gap(self) -> float:
        """Relative error of the best candidate."""
        return min(self.gaps.values(), default=0.0)

    @property
    def in_parts(self) -> float:
        """The best candidate's loss of the rows in two parts."""
        return self.of_parts[min(self.gaps, key=self.gaps.__getitem__)]

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
    first = _split(rows, counts, *_parts(rows.count, size))
    others = [_split(rows, counts, *parts) for parts in _parts_by_label(rows, size)]
    is_random, measured = False, list[tuple[bool, list[SplitBatch], list[float]]]()
    for perturbed, trials in ((False, [first]), (True, [first, *others])):
        batches = [batch for trial in trials for batch in _batches_of(trial)]
        # Twice again: of a layer that counts its calls, one of the two has another number modulo any period.
        again = [first.together] * (1 if perturbed else 2)
        losses = [*measure([*batches, *again], perturbed)]
        is_random |= any(_is_random(losses[0], other) for other in losses[len(batches) :])
        measured.append((perturbed, trials, losses))
    found: list[LossComparison] = []
    for perturbed, trials, losses in measured:
        if is_random:
            found.append(_compare_random(first, measure, perturbed))
        else:
            found += [_compare(trial, losses[3 * i : 3 * i + 3]) for i, trial in enumerate(trials)]
    return _merge([each for each in found if each.gaps])


def compare_outputs(rows: RowsOfBatch, size: int, run: Callable[[RowsOfBatch, bool], Sequence[Any]]) -> float | None:
    """Return how far the outputs of a few rows together are from those of their parts, relative to the outputs.

    Rows that depend on one another in the model, or that were cut in a wrong place, have other outputs in parts. None if the
    model draws random numbers in evaluation mode, or has no output to compare.

    Args:
        rows: two rows or more.
        size: rows of a micro-batch; a comparison takes at most twice as many.
        run: ``(a few rows, perturb the weights?) -> outputs`` of all of them, twice, and of their two parts.
    """
    few = rows.of(rows.first(2 * min(_MOST_ROWS, size)))
    if few.most_parts(2) < 2:
        return None
    gaps: list[float] = []
    for perturbed in (False, True):
        whole, again, *of_parts = run(few, perturbed)
        if _distance(whole, again) != 0:
            return None
        gaps.append(_distance(few.join([whole]), few.join(of_parts)))
    return max(gaps)


def find_shared_tensor(
    rows: RowsOfBatch, run: Callable[[Sequence[Any]], Sequence[Any]]
) -> tuple[str, tuple[int, ...]] | None:
    """Return name and shape of a tensor with as many entries as there are rows, which all rows share.

    Position indices of eight rows of eight tokens are an example. The model fails on one row less if the tensor is cut, and runs
    if the tensor is given as one row, with which the results of all rows stay the same. None if there is no such tensor.

    Args:
        rows: two rows or more.
        run: small batches -> losses or outputs, as tensors.
    """
    every, fewer = slice(0, rows.count), slice(0, rows.count - 1)
    if _results(rows, run, [fewer]) or not (as_it_is := _results(rows, run, [every])):
        return None
    for name, column in rows.columns():
        if not isinstance(column, torch.Tensor):
            continue

        def as_one_row(where: str, part: Any, _: int, name: str = name, column: torch.Tensor = column) -> Any:
            return column[None] if where == name else part

        as_one = _results(rows, run, [every, fewer], as_one_row)
        if as_one and _are_alike(as_it_is[0], as_one[0]):
            return name, tuple(column.shape)
    return None


def _results(
    rows: RowsOfBatch,
    run: Callable[[Sequence[Any]], Sequence[Any]],
    choices: Sequence[slice],
    change: PartChange | None = None,
) -> Sequence[Any]:
    """Return the results of chosen rows; none if they cannot be cut, or the model fails."""
    try:
        return run(rows.select(choices, change))
    except Exception:  # any of the user's own code
        return []


def _are_alike(one: Any, other: Any) -> bool:
    shapes = [[leaf.shape for leaf in leaves_in(each) if isinstance(leaf, torch.Tensor)] for each in (one, other)]
    return shapes[0] == shapes[1] and _distance(one, other) <= ROUNDING


def _distance(outputs: Any, others: Any) -> float:
    """Return the largest relative distance of two outputs' tensors; matrices between rows, as CLIP's, have other shapes."""
    pairs = zip(leaves_in(outputs), leaves_in(others), strict=True)
    tensors = [(a, b) for a, b in pairs if isinstance(a, torch.Tensor) and a.is_floating_point() and a.numel()]
    return max((_relative(a, b) for a, b in tensors if a.shape == b.shape), default=0.0)


def _relative(one: torch.Tensor, other: torch.Tensor) -> float:
    largest = float(one.abs().max())
    return float((one - other).abs().max()) / largest if largest else float(other.abs().max() > 0)


def _parts(count: int, size: int) -> tuple[list[int], list[int]]:
    """Return the rows of two parts: first rows, and rows from the middle, which may belong to them."""
    size = min(max(min(2, size), min(_MOST_ROWS, size // 2)), count // 2)
    firsts = (size + 1) // 2
    middle = max(2 * firsts, count // 2)
    rows = [*range(firsts), *range(middle, middle + size - firsts), *range(firsts, 2 * firsts)]
    rows += range(middle + size - firsts, middle + 2 * (size - firsts))
    return rows[:size], rows[size:]


def _parts_by_label(rows: RowsOfBatch, size: int) -> list[tuple[list[int], list[int]]]:
    """Return several parts of a few rows, of different labels if there are any.

    Weights of classes, or a count of some targets, are unlike in one pair of them.
    """
    choices: list[list[int]] = []
    for _, column in rows.columns():
        first: dict[Any, int] = {}  # row of each label
        for row, label in enumerate(labels_in(column)):
            if label is not None:
                first.setdefault(label, row)
        choices.append(list(first.values()))
    chosen = min((each for each in choices if len(each) > 1), key=len, default=[])
    filled = [*chosen, *(row for row in range(rows.count) if row not in chosen)][:4]
    if size == 1:
        pairs = combinations(filled, 2) if chosen else product(filled[:1], filled[1:])
        return [([one], [other]) for one, other in pairs]
    if len(filled) < 4:
        return []
    a, b, c, d = filled
    return [([a, b], [c, d]), ([a, c], [b, d]), ([a, d], [b, c])]


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
    if not math.isfinite(losses[0]) or not any(map(math.isfinite, losses[1:])):
        return LossComparison({})
    # A part without a loss, of a batch that has one: a candidate that counts something in it is wrong. The gaps are infinite.
    largest = max(abs(loss) for loss in losses if math.isfinite(loss))
    exact = max(ROUNDING * max(1.0, largest), noise)
    gaps = {name: 0.0 if abs(each) <= exact else abs(each) / largest for name, each in excess.items()}
    gaps = {name: math.inf if math.isnan(gap) else gap for name, gap in gaps.items()}
    of_parts = {name: losses[0] - each for name, each in excess.items()}
    shows_sum = min(map(abs, losses[1:])) > exact
    return LossComparison(gaps, noise / largest if largest else 0.0, losses[0], of_parts, shows_sum)


def _compare_random(trial: SplitBatch, measure: Measure, perturbed: bool) -> LossComparison:
    """Compare means of repeated losses that differ, whose uncertainty is a few standard errors."""
    # Each in all three positions: with a fixed order, a layer that counts its calls would have other numbers for each.
    order = [(start + i) % 3 for start in range(_REPEATS) for i in range(3)]
    measured = measure([_batches_of(trial)[i] for i in order], perturbed)
    losses = [[loss for i, loss in zip(order, measured, strict=True) if i == which] for which in range(3)]
    noise = _STANDARD_ERRORS * math.sqrt(sum(stdev(each) ** 2 for each in losses) / _REPEATS)
    return _compare(trial, [fmean(each) for each in losses], noise)


def _merge(found: Sequence[LossComparison]) -> LossComparison:
    """Return the largest error of every candidate, with the losses where the best candidate has its largest."""
    if not found:
        return LossComparison({})
    gaps = {name: max(each.gaps[name] for each in found) for name in found[0].gaps}
    if SUM in gaps and not any(each.shows_sum for each in found):
        gaps[SUM] = math.inf
    best = min(gaps, key=gaps.__getitem__)
    shown = max(found, key=lambda each: each.gaps[best])
    return replace(shown, gaps=gaps, noise=max(each.noise for each in found))
