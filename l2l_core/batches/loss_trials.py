"""Trials: a few rows together and in two parts, whose losses distinguish the candidates for a loss's denominator.

There are three kinds:

- one row twice, each copy with different targets removed, which shows a mean over targets;
- two rows with different targets, which shows a second mean over something else. Such a trial is void if the loss of two parts
  that count alike under every candidate does not add up either: then it has a term that is no mean, such as the balancing loss
  of a router;
- groups of unchanged rows, for candidates that do not differ in their -100.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import torch

from l2l_core.batches.batch import RowsOfBatch
from l2l_core.batches.row_count import has_rows
from l2l_core.batches.target_counts import IGNORE_INDEX, CandidateCounts, count_targets, is_integer

RowGroup = tuple[int, ...]  # indices of rows
CountPair = tuple[float, float]  # counts of the first and the second part

KEPT_TARGETS = (2, 3)  # targets kept in the two copies of a row: few, so that the first position matters
MAX_ROWS = 16  # considered, of those with different counts
TRIALS_PER_PAIR = 2  # trials with unchanged rows for every two candidates that disagree


@dataclass(frozen=True, slots=True)
class SplitBatch:
    """Two small batches and their union."""

    together: Any
    first: Any
    second: Any
    counts: Mapping[str, CountPair | None]  # of the two parts, by candidate; None: their losses add up

    def excess(self, name: str, losses: Sequence[float]) -> float:
        """Return the loss of the union minus the candidate's mean of the losses of the parts."""
        together, first, second = losses
        if (pair := self.counts[name]) is None:
            return together - (first + second)
        if not any(pair):
            return math.inf  # the candidate's mean is undefined, but the loss is finite
        # A part that counts nothing adds nothing, though its mean loss is NaN.
        return together - sum(count * loss for count, loss in zip(pair, (first, second), strict=True) if count) / sum(
            pair
        )


class LossTrial:
    """A split batch that distinguishes candidates, and optionally one that must hold for any candidate.

    Args:
        parts: counts differ between candidates.
        alike: parts that count alike under every candidate; if the loss is not the mean even of these, the trial is void.
    """

    def __init__(self, parts: SplitBatch, alike: SplitBatch | None = None) -> None:
        self._parts = (parts,) if alike is None else (parts, alike)
        self.batches = [batch for each in self._parts for batch in (each.together, each.first, each.second)]

    def error(self, name: str, losses: Sequence[float], tolerance: float) -> float:
        """Return a candidate's error, given the losses of `batches`; relative if these are above 1, else absolute.

        A loss is a difference of logits, so that its rounding error does not shrink with it.
        """
        scale = max(1.0, *map(abs, losses))
        error, *alike = (
            abs(each.excess(name, losses[3 * i : 3 * i + 3])) / scale for i, each in enumerate(self._parts)
        )
        return 0.0 if alike and alike[0] > tolerance else error


# -- rows with changed targets -----------------------------------------------------------------------------------------


def target_trials(rows: RowsOfBatch, counts: CandidateCounts, kinds: Sequence[str]) -> Iterator[LossTrial]:
    """Yield trials of rows with many targets, for every tensor that has -100 in it."""
    for name, column in rows.columns():
        if not has_rows(column) or column.ndim < 2 or not is_integer(column) or bool((column != IGNORE_INDEX).all()):
            continue
        best = _best_rows(column)
        kept = {row: masks for row in best if (masks := _target_masks(column[row])) is not None}
        for row, (few, more) in kept.items():
            yield LossTrial(_mask_targets(rows, counts, name, (row, row), (few, more)))
        for one, other in [(row, other) for row in kept for other in best if other != row][:1]:
            few, more = kept[one]
            last = kept[other][1] if other in kept else _last_targets(column[other], KEPT_TARGETS[1])
            number = 0 if last is None else int(last.sum())
            others, as_many = (few, more) if number == KEPT_TARGETS[1] else (more, _last_targets(column[one], number))
            if last is None or as_many is None or int(as_many.sum()) != number:
                continue
            unlike, alike = (
                _mask_targets(rows, counts, name, (one, other), (mask, last)) for mask in (others, as_many)
            )
            yield LossTrial(unlike, alike)


def _best_rows(column: Any) -> list[int]:
    """Choose two rows: first those whose first position is a target, then those with most targets."""
    is_target = column != IGNORE_INDEX
    first = is_target[..., :1].reshape(len(column), -1).any(1).tolist()
    number = is_target.reshape(len(column), -1).sum(1).tolist()
    quality = [(starts and count >= sum(KEPT_TARGETS), count) for starts, count in zip(first, number, strict=True)]
    return sorted(range(len(column)), key=quality.__getitem__, reverse=True)[:2]


def _target_masks(row: Any) -> tuple[Any, Any] | None:
    """Return masks of a row's first and last targets; None if it has too few."""
    flat = (row != IGNORE_INDEX).reshape(-1)
    places = torch.as_tensor(flat).nonzero().flatten().tolist()
    if len(places) < sum(KEPT_TARGETS):
        return None
    few, more = places[: KEPT_TARGETS[0]], places[-KEPT_TARGETS[1] :]
    return _mask_at(row, few), _mask_at(row, more)


def _last_targets(row: Any, most: int) -> Any:
    """Return a mask of a row's last targets, without first positions, which a shift omits; None if there are none."""
    flat = torch.as_tensor(row != IGNORE_INDEX).reshape(-1)
    length = row.shape[-1]
    places = [place for place in flat.nonzero().flatten().tolist() if length == 1 or place % length]
    return _mask_at(row, places[-most:]) if places else None


def _mask_at(row: Any, places: Sequence[int]) -> Any:
    mask = (row != IGNORE_INDEX).reshape(-1) & False
    mask[list(places)] = True
    return mask.reshape(row.shape)


def _mask_targets(
    rows: RowsOfBatch, counts: CandidateCounts, name: str, pair: tuple[int, int], kept: tuple[Any, Any]
) -> SplitBatch:
    """Split a batch of two rows in which only the targets in the masks `kept` are left."""

    def keep(where: str, part: Any, choice: int) -> Any:
        if where != name:
            return part
        other = part.clone() if isinstance(part, torch.Tensor) else part.copy()
        for i, mask in enumerate(kept if choice == 0 else kept[choice - 1 : choice]):
            other[i][~mask] = IGNORE_INDEX
        return other

    a, b = pair
    together, first_part, second_part = rows.select([[a, b], [a], [b]], keep)
    now = {each: None if of is None else (float(of[a]), float(of[b])) for each, of in counts.items()}
    left = torch.stack([torch.as_tensor(mask) for mask in kept])
    for each, (first, second) in count_targets(name, torch.where(left, 0, IGNORE_INDEX)):
        now[each] = (float(first), float(second))
    return SplitBatch(together, first_part, second_part, {each: now[each] for each in counts})


# -- unchanged rows ----------------------------------------------------------------------------------------------------


def row_trials(rows: RowsOfBatch, counts: CandidateCounts, kinds: Sequence[str]) -> Iterator[LossTrial]:
    """Yield trials of the pairs of groups of rows on which the candidates disagree most.

    Args:
        rows: the batch.
        counts: counts of every row by candidate.
        kinds: one candidate of each kind that gives other divisors.
    """
    groups = _groups([each for name in kinds if (each := counts[name])])
    pairs = [(a, b) for a, b in combinations(groups, 2) if not {*a} & {*b}]
    chosen: dict[tuple[RowGroup, RowGroup], None] = {}
    for one, other in combinations((counts[name] for name in kinds), 2):
        apart = {pair: abs(_first_weight(one, *pair) - _first_weight(other, *pair)) for pair in pairs}
        chosen |= dict.fromkeys(sorted(pairs, key=apart.__getitem__, reverse=True)[:TRIALS_PER_PAIR])
    for a, b in chosen:
        pairs_of = {name: None if each is None else (_total(each, a), _total(each, b)) for name, each in counts.items()}
        together, first, second = rows.select([[*a, *b], [*a], [*b]])
        yield LossTrial(SplitBatch(together, first, second, pairs_of))


def _total(counts: Sequence[int], group: RowGroup) -> float:
    return float(sum(counts[row] for row in group))


def _first_weight(counts: Sequence[int] | None, a: RowGroup, b: RowGroup) -> float:
    """Return the share of the first of two groups; infinite for a sum, so that it differs from every mean."""
    return math.inf if counts is None else _total(counts, a) / _total(counts, a + b)


def _groups(counts: Sequence[Sequence[int]]) -> list[RowGroup]:
    """Choose two rows of every kind; add others to a row that some candidate counts as 0."""
    kinds: dict[RowGroup, list[int]] = {}
    for row, kind in enumerate(zip(*counts, strict=True)):
        kinds.setdefault(kind, []).append(row)
    spread = sorted(kinds)[:: -(-len(kinds) // MAX_ROWS)]
    return [_complete_group(row, counts) for kind in spread for row in kinds[kind][:2]]


def _complete_group(row: int, counts: Sequence[Sequence[int]]) -> RowGroup:
    group = [row]
    for each in counts:
        if not any(each[i] for i in group):
            group.append(max(range(len(each)), key=each.__getitem__))
    return tuple(group)
