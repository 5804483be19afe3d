"""A few rows together and in two parts: on the losses of these, candidates for what a loss is a mean over part company.

Two kinds. One row twice, with other targets taken away in either copy: all that is no mean over targets, as what a router
adds for the balance of its experts, is the same in both parts and together, so it tells nothing wrong. And real rows, in
groups, for candidates that do not differ by what is -100.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import torch

from l2l_core.batch import RowsOf, has_rows
from l2l_core.targets import IGNORED, Counts, counts_of, is_integer

Group = tuple[int, ...]  # rows
Pair = tuple[float, float]  # what the first and the second part count for

FEW = (2, 3)  # targets that are left in the two copies of a row: few, so that the first position weighs
MOST_ROWS = 16  # of those that count differently, to choose from
PER_PAIR = 2  # looks at real rows for every two candidates that disagree


@dataclass(frozen=True, slots=True)
class Look:
    """Two small batches and both of them as one.

    Attributes:
        together, first, second: the batches.
        counts: what the two count for, by candidate; None: their losses add up.
    """

    together: Any
    first: Any
    second: Any
    counts: Mapping[str, Pair | None]

    @property
    def batches(self) -> tuple[Any, Any, Any]:
        """Those whose losses `error` needs."""
        return self.together, self.first, self.second

    def error(self, name: str, losses: Sequence[float]) -> float:
        """How far the loss together is from what a candidate makes of the others; relative where losses are above 1.

        Below, as of a model that is nearly done, rounding stays what it is: a loss is a difference of logits.
        """
        together, first, second = losses
        expected = first + second
        if (pair := self.counts[name]) is not None:
            if not any(pair):
                return math.inf  # there would be no mean, and there is
            expected = (pair[0] * first + pair[1] * second) / sum(pair)
        return abs(together - expected) / max(abs(together), abs(first), abs(second), 1.0)


# -- one row, with other targets ---------------------------------------------------------------------------------------


def looks_at_targets(rows: RowsOf, counts: Counts, kinds: Sequence[str]) -> Iterator[Look]:
    """For every tensor that holds targets, a row with most of them under every reading, twice."""
    for name, column in rows.columns():
        if not has_rows(column) or column.ndim < 2 or not is_integer(column) or bool((column != IGNORED).all()):
            continue
        for row in _best_rows(column):
            kept = _two_choices(column[row])
            if kept is not None:
                yield _masked(rows, counts, name, row, kept)


def _best_rows(column: Any, most: int = 2) -> list[int]:
    """Rows with a target at the first position, by which a shift differs, if there are any; then those with most targets."""
    is_target = column != IGNORED
    first = is_target[..., :1].reshape(len(column), -1).any(1).tolist()
    number = is_target.reshape(len(column), -1).sum(1).tolist()
    return sorted(
        range(len(column)), key=lambda row: (first[row] and number[row] >= sum(FEW), number[row]), reverse=True
    )[:most]


def _two_choices(row: Any) -> tuple[Any, Any] | None:
    """Which targets of a row the two copies keep: few of the first ones, and few of the last ones; None if there are too few."""
    flat = (row != IGNORED).reshape(-1)
    places = torch.as_tensor(flat).nonzero().flatten().tolist()
    if len(places) < sum(FEW):
        return None
    chosen = []
    for kept in (places[: FEW[0]], places[-FEW[1] :]):
        mask = flat & False
        mask[kept] = True
        chosen.append(mask.reshape(row.shape))
    return chosen[0], chosen[1]


def _masked(rows: RowsOf, counts: Counts, name: str, row: int, kept: tuple[Any, Any]) -> Look:
    def keep(where: str, part: Any, choice: int) -> Any:
        if where != name:
            return part
        other = part.clone() if isinstance(part, torch.Tensor) else part.copy()
        for i, mask in enumerate(kept if choice == 0 else kept[choice - 1 : choice]):
            other[i][~mask] = IGNORED
        return other

    batches = rows.pick([[row, row], [row], [row]], keep)
    now = {each: None if of is None else (float(of[row]), float(of[row])) for each, of in counts.items()}
    left = torch.stack([torch.as_tensor(mask) for mask in kept])
    for each, (first, second) in counts_of(name, torch.where(left, 0, IGNORED)):
        now[each] = (float(first), float(second))
    return Look(*batches, {each: now[each] for each in counts})


# -- real rows ---------------------------------------------------------------------------------------------------------


def looks_at_rows(rows: RowsOf, counts: Counts, kinds: Sequence[str]) -> Iterator[Look]:
    """Pairs of groups of rows on which candidates that disagree on the batch disagree most.

    Args:
        rows: the batch.
        counts: of every row, by candidate.
        kinds: one candidate of each kind that disagrees with the others.
    """
    groups = _groups([each for name in kinds if (each := counts[name])])
    pairs = [(a, b) for a, b in combinations(groups, 2) if not {*a} & {*b}]
    chosen: dict[tuple[Group, Group], None] = {}
    for one, other in combinations((counts[name] for name in kinds), 2):
        apart = {pair: abs(_share(one, *pair) - _share(other, *pair)) for pair in pairs}
        chosen |= dict.fromkeys(sorted(pairs, key=apart.__getitem__, reverse=True)[:PER_PAIR])
    for a, b in chosen:
        pairs_of = {name: None if each is None else (_total(each, a), _total(each, b)) for name, each in counts.items()}
        yield Look(*rows.pick([[*a, *b], [*a], [*b]]), pairs_of)


def _total(counts: Sequence[int], group: Group) -> float:
    return float(sum(counts[row] for row in group))


def _share(counts: Sequence[int] | None, a: Group, b: Group) -> float:
    """The weight of the first of two groups; sums, which weigh nothing, differ from all."""
    return math.inf if counts is None else _total(counts, a) / _total(counts, a + b)


def _groups(counts: Sequence[Sequence[int]]) -> list[Group]:
    """Rows, two of every kind, each with as many others as it takes to count for something under every candidate."""
    kinds: dict[Group, list[int]] = {}
    for row, kind in enumerate(zip(*counts, strict=True)):
        kinds.setdefault(kind, []).append(row)
    spread = sorted(kinds)[:: -(-len(kinds) // MOST_ROWS)]
    return [_completed(row, counts) for kind in spread for row in kinds[kind][:2]]


def _completed(row: int, counts: Sequence[Sequence[int]]) -> Group:
    group = [row]
    for each in counts:
        if not any(each[i] for i in group):
            group.append(max(range(len(each)), key=each.__getitem__))
    return tuple(group)
