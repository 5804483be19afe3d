"""A few rows together and in two parts: on the losses of these, candidates for what a loss is a mean over part company.

Three kinds. One row twice, with other targets taken away in either copy: what is no mean over targets is the same in both parts
and together. Two rows with other targets, where a second mean over something else shows; unless the loss does not even add up
where both count alike under every candidate, for then it has a part that cannot be weighed at all, as what a router adds for the
balance of its experts. And real rows, in groups, for candidates that do not differ by what is -100.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import torch

from l2l_core.batches.batch import BatchRows
from l2l_core.batches.row_count import has_rows
from l2l_core.batches.target_counts import IGNORE_INDEX, CandidateCounts, count_targets, is_integer

RowGroup = tuple[int, ...]  # rows
CountPair = tuple[float, float]  # what the first and the second part count for

KEPT_TARGETS = (2, 3)  # targets that are left of a row: few, so that the first position weighs
MAX_ROWS = 16  # of those that count differently, to choose from
TRIALS_PER_PAIR = 2  # looks at real rows for every two candidates that disagree


@dataclass(frozen=True, slots=True)
class SplitBatch:
    """Two small batches and both of them as one.

    Attributes:
        together, first, second: the batches.
        counts: what the two count for, by candidate; None: their losses add up.
    """

    together: Any
    first: Any
    second: Any
    counts: Mapping[str, CountPair | None]

    def excess(self, name: str, losses: Sequence[float]) -> float:
        """Say by how much the loss together is more than what a candidate makes of the others."""
        together, first, second = losses
        if (pair := self.counts[name]) is None:
            return together - (first + second)
        if not any(pair):
            return math.inf  # there would be no mean, and there is
        return together - (pair[0] * first + pair[1] * second) / sum(pair)


class LossTrial:
    """What is looked at, and what must hold before it counts.

    Args:
        parts: which tell candidates apart.
        alike: which count alike under every candidate; where a loss is no mean even of these, `parts` tell nothing.
    """

    def __init__(self, parts: SplitBatch, alike: SplitBatch | None = None) -> None:
        self._parts = (parts,) if alike is None else (parts, alike)
        self.batches = [batch for each in self._parts for batch in (each.together, each.first, each.second)]

    def error(self, name: str, losses: Sequence[float], tolerance: float) -> float:
        """Say how far a candidate is off, given the losses of `batches`; relative where these are above 1.

        Below, as of a model that is nearly done, rounding stays what it is: a loss is a difference of logits.
        """
        scale = max(1.0, *map(abs, losses))
        error, *alike = (
            abs(each.excess(name, losses[3 * i : 3 * i + 3])) / scale for i, each in enumerate(self._parts)
        )
        return 0.0 if alike and alike[0] > tolerance else error


# -- rows with other targets -------------------------------------------------------------------------------------------


def target_trials(rows: BatchRows, counts: CandidateCounts, kinds: Sequence[str]) -> Iterator[LossTrial]:
    """Make looks at rows with many targets, for every tensor that holds some."""
    for name, column in rows.columns():
        if not has_rows(column) or column.ndim < 2 or not is_integer(column) or bool((column != IGNORE_INDEX).all()):
            continue
        kept = {row: masks for row in _best_rows(column) if (masks := _target_masks(column[row])) is not None}
        for row, (few, more) in kept.items():
            yield LossTrial(_mask_targets(rows, counts, name, (row, row), (few, more)))
        if len(kept) == 2:
            (one, (few, more)), (other, (_, other_more)) = kept.items()
            unlike, alike = (
                _mask_targets(rows, counts, name, (one, other), (mask, other_more)) for mask in (few, more)
            )
            yield LossTrial(unlike, alike)


def _best_rows(column: Any, limit: int = 2) -> list[int]:
    """Choose rows with a target at the first position, by which a shift differs; then those with most targets."""
    is_target = column != IGNORE_INDEX
    first = is_target[..., :1].reshape(len(column), -1).any(1).tolist()
    number = is_target.reshape(len(column), -1).sum(1).tolist()
    return sorted(
        range(len(column)), key=lambda row: (first[row] and number[row] >= sum(KEPT_TARGETS), number[row]), reverse=True
    )[:limit]


def _target_masks(row: Any) -> tuple[Any, Any] | None:
    """Choose the targets that two copies of a row keep: a few first, a few last ones; None if there are too few."""
    flat = (row != IGNORE_INDEX).reshape(-1)
    places = torch.as_tensor(flat).nonzero().flatten().tolist()
    if len(places) < sum(KEPT_TARGETS):
        return None
    chosen = []
    for kept in (places[: KEPT_TARGETS[0]], places[-KEPT_TARGETS[1] :]):
        mask = flat & False
        mask[kept] = True
        chosen.append(mask.reshape(row.shape))
    return chosen[0], chosen[1]


def _mask_targets(
    rows: BatchRows, counts: CandidateCounts, name: str, pair: tuple[int, int], kept: tuple[Any, Any]
) -> SplitBatch:
    """Take two rows, of which some targets are kept, together and apart."""

    def keep(where: str, part: Any, choice: int) -> Any:
        if where != name:
            return part
        other = part.clone() if isinstance(part, torch.Tensor) else part.copy()
        for i, mask in enumerate(kept if choice == 0 else kept[choice - 1 : choice]):
            other[i][~mask] = IGNORE_INDEX
        return other

    a, b = pair
    batches = rows.select([[a, b], [a], [b]], keep)
    now = {each: None if of is None else (float(of[a]), float(of[b])) for each, of in counts.items()}
    left = torch.stack([torch.as_tensor(mask) for mask in kept])
    for each, (first, second) in count_targets(name, torch.where(left, 0, IGNORE_INDEX)):
        now[each] = (float(first), float(second))
    return SplitBatch(*batches, {each: now[each] for each in counts})


# -- real rows ---------------------------------------------------------------------------------------------------------


def row_trials(rows: BatchRows, counts: CandidateCounts, kinds: Sequence[str]) -> Iterator[LossTrial]:
    """Make looks at pairs of groups of rows on which candidates that disagree on the batch disagree most.

    Args:
        rows: the batch.
        counts: of every row, by candidate.
        kinds: one candidate of each kind that disagrees with the others.
    """
    groups = _groups([each for name in kinds if (each := counts[name])])
    pairs = [(a, b) for a, b in combinations(groups, 2) if not {*a} & {*b}]
    chosen: dict[tuple[RowGroup, RowGroup], None] = {}
    for one, other in combinations((counts[name] for name in kinds), 2):
        apart = {pair: abs(_first_weight(one, *pair) - _first_weight(other, *pair)) for pair in pairs}
        chosen |= dict.fromkeys(sorted(pairs, key=apart.__getitem__, reverse=True)[:TRIALS_PER_PAIR])
    for a, b in chosen:
        pairs_of = {name: None if each is None else (_total(each, a), _total(each, b)) for name, each in counts.items()}
        yield LossTrial(SplitBatch(*rows.select([[*a, *b], [*a], [*b]]), pairs_of))


def _total(counts: Sequence[int], group: RowGroup) -> float:
    return float(sum(counts[row] for row in group))


def _first_weight(counts: Sequence[int] | None, a: RowGroup, b: RowGroup) -> float:
    """Weigh the first of two groups; sums, which weigh nothing, differ from all."""
    return math.inf if counts is None else _total(counts, a) / _total(counts, a + b)


def _groups(counts: Sequence[Sequence[int]]) -> list[RowGroup]:
    """Choose rows, two of every kind, each with others if it counts for nothing under some candidate alone."""
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
