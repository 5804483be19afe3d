"""The step's loss is the mean over the whole batch: by what each micro-batch's loss is divided so that it is.

A micro-batch counts by what the model's loss is a mean over, not by 1/K: its loss is divided by ``n / n_k`` before backward,
which is exactly ``K`` where all count alike. What a loss is a mean over is not told by names. There are candidates
(`target_counts.py`), and as long as they ask for the same divisors nothing has to be known. Where they do not, the model's own loss
decides: of a few rows together it must be the mean, weighed by the right candidate, of its losses of these in two parts
(`loss_trials.py`). Only candidates that do reproduce it are left, for all later batches of the same structure. Where there is none,
or several are left that still disagree, the batch is refused.

The rows are few, so what is measured needs no more memory than a step. It is measured in evaluation mode without gradients,
once per structure of batches.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, Protocol

from l2l_core.batches.batch import BatchRows
from l2l_core.batches.loss_trials import LossTrial, row_trials, target_trials
from l2l_core.batches.lru_cache import LRUCache
from l2l_core.batches.target_counts import ROWS, CandidateCounts, normaliser_candidates

Weight = Callable[[Any], float]
Measure = Callable[
    [Sequence[Any], bool], Sequence[float]
]  # losses of small batches, with weights as they are or shaken
Divisors = tuple[float, ...]

TOLERANCE = 1e-5  # of a loss in float32 that was added up in another order
MAX_STRUCTURES = 64  # structures of batches of which is remembered what their loss is a mean over
_REMEDY = (
    "Pass weight=lambda micro_batch: ... to the relay, what the loss of a micro-batch counts for (by number of what it is a "
    "mean over), or give batches that split evenly"
)


class Peers(Protocol):
    """Knows of the other workers that train on the rest of the batch."""

    count: int

    def gather_counts(self, counts: Mapping[str, list[int] | None]) -> dict[str, list[int] | None]:
        """Put together what micro-batches count for, by candidate: the first worker's first."""

    def gather_rows(self, rows: BatchRows) -> Iterator[BatchRows]:
        """Give rows that all workers look at, so that they find out the same: those of one worker after the other."""

    def select_own(self, every: Sequence[float]) -> list[float]:
        """Choose what is of this worker's own micro-batches."""


class NoPeers:
    """Is nobody: the batch is all there is."""

    count = 1

    def gather_counts(self, counts: Mapping[str, list[int] | None]) -> dict[str, list[int] | None]:
        return dict(counts)

    def gather_rows(self, rows: BatchRows) -> Iterator[BatchRows]:
        yield rows

    def select_own(self, every: Sequence[float]) -> list[float]:
        return list(every)


class LossNormaliser:
    """Divisors of micro-batches' losses, by the caller's weight or by what was found out.

    Invariant: a candidate that failed to reproduce a loss is never asked again for batches of that structure.

    Args:
        weight: what a micro-batch counts for, if the caller says so.
        measure: gives the model's losses of small batches, and leaves no trace.
        others: who trains on the rest of the batch.
    """

    def __init__(self, weight: Weight | None, measure: Measure, peers: Peers = NoPeers()) -> None:  # noqa: B008 - no state
        self._weight, self._measure, self._peers = weight, measure, peers
        self._remaining: LRUCache[frozenset[str]] = LRUCache(MAX_STRUCTURES)

    def divisors(self, rows: BatchRows, micro_batches: Sequence[Any]) -> list[float]:
        """Return the divisor of every micro-batch's loss.

        Raises:
            ValueError: a micro-batch counts for nothing, or it cannot be found out what it counts for.
        """
        others = self._peers
        if self._weight is not None:
            return others.select_own(weighted_divisors(micro_batches, self._weight, others))
        if len(micro_batches) * others.count == 1:
            return [1.0]
        counts, sizes = normaliser_candidates(rows), rows.sizes(len(micro_batches))
        added = others.gather_counts({name: _sum_counts(each, sizes) for name, each in counts.items()})
        number = len(micro_batches) * others.count
        alive = self._remaining.get(tuple(counts)) or frozenset(counts)
        found = _divisors_by_candidate({name: added[name] for name in counts if name in alive}, number)
        if _disagree(found, found):
            alive = self._identify(found, others.gather_rows(rows), len(micro_batches))
            self._remaining.put(tuple(counts), alive)
            found = {name: found[name] for name in found if name in alive}
        # None is found where every candidate that is left counts nothing in the whole batch.
        _check_no_zero_count(found or dict.fromkeys(alive, (math.inf,)))
        return others.select_own(next(iter(found.values())))

    def _identify(self, found: Mapping[str, Divisors], of_each: Iterable[BatchRows], parts: int) -> frozenset[str]:
        """Narrow candidates down on one worker's rows, or on the next one's where these do not tell.

        Raises:
            ValueError: nobody's do, or no candidate is right.
        """
        undecided: ValueError | None = None
        for rows in of_each:
            counts = normaliser_candidates(rows)
            try:
                return self._narrow({n: counts[n] for n in found}, found, rows, rows.sizes(min(parts, rows.count)))
            except _UndecidedError as error:
                undecided = undecided or error
        assert undecided is not None
        raise undecided

    def _narrow(
        self, counts: CandidateCounts, found: Mapping[str, Divisors], rows: BatchRows, sizes: Sequence[int]
    ) -> frozenset[str]:
        """Find the candidates that reproduce the model's own loss; they all ask for the same divisors.

        Raises:
            ValueError: there is none, or there are some that disagree.
        """
        made: list[LossTrial] = []
        for looks_at in (target_trials, row_trials):
            looks = list(looks_at(rows, counts, _one_of_each(counts, found)))
            counts = self._matching(looks, False, counts, sizes)
            made += looks
            if not _disagree(counts, found):
                return frozenset(counts)
        if not made:
            _check_no_zero_count({name: found[name] for name in counts})
        counts = self._matching(made, True, counts, sizes)  # a head that is all zero gives all rows one loss
        if _disagree(counts, found):
            raise _undecided_error(_table(counts, sizes))
        return frozenset(counts)

    def _matching(
        self, trials: Sequence[LossTrial], perturbed: bool, counts: CandidateCounts, sizes: Sequence[int]
    ) -> CandidateCounts:
        """Find the candidates that are right about all of these looks whose losses are finite."""
        losses = self._measure([batch for look in trials for batch in look.batches], perturbed) if trials else []
        rest = iter(losses)
        seen = [(look, list(islice(rest, len(look.batches)))) for look in trials]
        seen = [(look, own) for look, own in seen if all(map(math.isfinite, own))]
        errors = {name: max((look.error(name, own, TOLERANCE) for look, own in seen), default=0.0) for name in counts}
        if min(errors.values()) > TOLERANCE:
            raise _unknown_error(_table(counts, sizes), min(errors.values()))
        return {name: counts[name] for name, error in errors.items() if error <= TOLERANCE}


def _one_of_each(names: Iterable[str], found: Mapping[str, Divisors]) -> list[str]:
    """Choose one of every kind of candidates, which ask for the same divisors."""
    # Reversed, since the last one in a dictionary stays: the first of its kind is to.
    return list({found[name]: name for name in reversed(list(names))}.values())


def _disagree(names: Iterable[str], found: Mapping[str, Divisors]) -> bool:
    return len({found[name] for name in names}) > 1


def weighted_divisors(micro_batches: Sequence[Any], weight: Weight, peers: Peers = NoPeers()) -> list[float]:  # noqa: B008 - no state
    """Return the divisor of each micro-batch's loss, ``n / n_k``, of all workers; their reciprocals add up to one.

    Raises:
        ValueError: a micro-batch counts for nothing, so its mean loss does not exist.
    """
    mine = [float(weight(micro_batch)) for micro_batch in micro_batches]
    counts = peers.gather_counts({"weight": mine})["weight"]  # type: ignore[dict-item]
    assert counts is not None
    for k, count in enumerate(counts):
        if not count > 0:
            raise _zero_count_error(k, count, "")
    return list(_divisors(counts))


def _divisors(counts: Sequence[float]) -> Divisors:
    """Return every ``n / n_k``: exactly K where all counts are the same, infinite for a count of nothing."""
    if len({*counts}) == 1:
        return (float(len(counts)),) * len(counts)  # the sum of fractions may round, and K must be K
    total = sum(counts)
    return tuple(total / count if count else math.inf for count in counts)


def _divisors_by_candidate(sums: Mapping[str, list[int] | None], number: int) -> dict[str, Divisors]:
    """Return the divisors of so many micro-batches by candidate, without those that count nothing in the whole batch."""
    return {
        name: (1.0,) * number if each is None else _divisors(each)
        for name, each in sums.items()
        if each is None or any(each)
    }


def _sum_counts(counts: Sequence[int] | None, sizes: Sequence[int]) -> list[int] | None:
    """Add up what micro-batches of these sizes count for; None where their losses add up."""
    if counts is None:
        return None
    starts = [sum(sizes[:k]) for k in range(len(sizes))]
    return [sum(counts[start : start + size]) for start, size in zip(starts, sizes, strict=True)]


class _UndecidedError(ValueError):
    """Says that rows do not tell candidates apart; others may."""


# -- refusals ----------------------------------------------------------------------------------------------------------


def _check_no_zero_count(found: Mapping[str, Divisors]) -> None:
    for name, divisors in found.items():
        if math.inf in divisors:
            raise _zero_count_error(divisors.index(math.inf), 0.0, f" ({name})")


def _table(counts: CandidateCounts, sizes: Sequence[int]) -> str:
    """List the candidates that differ from rows, with what micro-batches count for."""
    added = {name: _sum_counts(each, sizes) for name, each in counts.items()}
    shown = {name: each for name, each in added.items() if name == ROWS or each is None or len({*each}) > 1}
    return "; ".join(f"{name}: {'-' if each is None else _listed(each)}" for name, each in shown.items())


def _listed(counts: Sequence[int], most: int = 8) -> str:
    return f"[{', '.join(map(str, counts[:most]))}{', ...' if len(counts) > most else ''}]"


def _zero_count_error(k: int, count: float, of: str) -> ValueError:
    return ValueError(
        f"micro-batch {k} counts for {count:g}{of}: it has no target (all labels -100?), so its mean loss is not defined. Use "
        "fewer micro_batches, drop such rows, or pass weight="
    )


def _unknown_error(table: str, error: float) -> ValueError:
    return ValueError(
        f"what the loss is a mean over cannot be found out, and micro-batches hold unequal shares of what it may be ({table}): "
        f"the loss of a few rows together is not the mean of their losses under any of these (off by {error:.2g} or "
        f"more). A sum, or a sum of several means, has no such mean. {_REMEDY}"
    )


def _undecided_error(table: str) -> _UndecidedError:
    return _UndecidedError(
        f"what the loss is a mean over cannot be found out, and micro-batches hold unequal shares of what it may be ({table}): "
        f"rows that tell them apart have the same loss, or there are none. {_REMEDY}"
    )
