"""Divisors of the micro-batches' losses that make the step's loss that of the whole batch.

The loss of micro-batch k is divided by ``n / n_k`` before backward, where ``n_k`` counts the items over which the model's
loss is a mean; with equal counts that is exactly ``K``. A sum is not divided. Those items cannot be recognised by name, so there
are candidates (`target_counts.py`), and the model's loss decides: its loss of a few rows must be the mean, weighted by the right
candidate, of its losses of the same rows in two parts (`loss_comparison.py`). A loss for which no candidate holds mixes rows and
is refused. Candidates that fail are dropped for all later batches of the same structure. If those left give different divisors
for a batch, trials made for that purpose decide (`loss_trials.py`), or the batch is refused.

Losses are measured on few rows, in evaluation mode without gradients, once per structure of batches.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, Literal, NoReturn, Protocol, get_args

import torch

from l2l_core.batches.batch import RowsOfBatch
from l2l_core.batches.containers import structure_of
from l2l_core.batches.loss_comparison import (
    ROUNDING,
    LossComparison,
    Measure,
    RunFn,
    compare_losses,
    compare_outputs,
    find_shared_tensor,
)
from l2l_core.batches.loss_refusals import (
    LossError,
    UndecidedError,
    counts_table,
    gap_message,
    mixed_outputs_error,
    mixed_rows_error,
    no_target_error,
    not_compared_message,
    outputs_gap_message,
    outputs_not_compared_message,
    shared_tensor_error,
    undecided_error,
    unknown_error,
)
from l2l_core.batches.loss_trials import LossTrial, row_trials, target_trials
from l2l_core.batches.lru_cache import LRUCache
from l2l_core.batches.target_counts import (
    ROWS,
    SUM,
    CandidateCounts,
    is_of_targets,
    normaliser_candidates,
    sum_counts,
)

Weight = Callable[[Any], float]
LossOver = Literal["micro-batch", "batch", "sum"]
Divisors = tuple[float, ...]

MOST_ROUNDING = 1e-3  # relative difference of outputs of products of other shapes
MOST_GAP = 0.01  # relative difference between the loss of a batch and that of its parts; a larger one is refused
MAX_STRUCTURES = 64  # structures of batches whose candidates are remembered


class Peers(Protocol):
    """The workers that share a batch."""

    count: int

    def gather_counts(self, counts: Mapping[str, list[int] | None]) -> dict[str, list[int] | None]:
        """Concatenate the counts of all workers' micro-batches by candidate, in the order of the workers."""
        ...

    def gather_rows(self, rows: RowsOfBatch) -> Iterator[RowsOfBatch]:
        """Yield each worker's rows in turn, the same on all workers, so that all reach the same result."""
        ...

    def select_own(self, every: Sequence[float]) -> list[float]:
        """Return the values of this worker's micro-batches out of those of all workers."""
        ...


class NoPeers:
    """Single-process case: the local batch is the whole batch."""

    count = 1

    def gather_counts(self, counts: Mapping[str, list[int] | None]) -> dict[str, list[int] | None]:
        return dict(counts)

    def gather_rows(self, rows: RowsOfBatch) -> Iterator[RowsOfBatch]:
        yield rows

    def select_own(self, every: Sequence[float]) -> list[float]:
        return list(every)


class LossNormaliser:
    """Divisors of micro-batches' losses, from the caller's weight or from candidates that are tried.

    Invariant: a candidate that failed to reproduce a loss is not tried again for batches of that structure.

    Args:
        weight: returns the weight of a micro-batch; None to try candidates.
        measure: returns the model's losses of small batches, without side effects.
        peers: the other workers that share the batch.
        loss_over: "micro-batch" for a mean over micro-batches that need not be the loss of the batch, as in plain accumulation:
            weighted by the items of the loss where one candidate is right, and by nothing where none is;
            "batch" for one loss over the outputs of all micro-batches; "sum" for losses that add up as they are.
        run: returns the model's outputs of small batches, without side effects; for `loss_over="batch"`.
        loss_settings: returns the settings of the loss; with other settings it is tried anew.

    Attributes:
        summary: how the losses of the last batch were put together, in words.
    """

    def __init__(
        self,
        weight: Weight | None,
        measure: Measure,
        peers: Peers = NoPeers(),  # noqa: B008 - no state
        loss_over: LossOver | None = None,
        run: RunFn | None = None,
        loss_settings: Callable[[], Hashable] = tuple,
    ) -> None:
        if loss_over is not None and loss_over not in get_args(LossOver):
            raise ValueError(f'loss_over={loss_over!r}: pass "batch", "micro-batch" or "sum", or leave it out')
        if loss_over == "batch" and weight is not None:
            raise ValueError('weight= with loss_over="batch": micro-batches have no losses to weigh; leave one out')
        if loss_over == "sum" and weight is not None:
            raise ValueError('weight= with loss_over="sum": losses are added as they are; leave one out')
        self._weight, self._measure, self._peers, self._loss_over = weight, measure, peers, loss_over
        self._remaining: LRUCache[frozenset[str]] = LRUCache(MAX_STRUCTURES)
        self._notes: LRUCache[str] = LRUCache(MAX_STRUCTURES)  # of structures: how far parts are from the whole
        self._run, self._loss_settings = run, loss_settings
        self._warning = ""
        self.summary = ""

    def close(self) -> None:
        """Drop the functions that run the model, since they may refer to the owner of this object; `summary` stays."""
        self._measure, self._run, self._loss_settings = _measure_closed, None, tuple

    def divisors(self, rows: RowsOfBatch, micro_batches: Sequence[Any]) -> list[float]:
        """Return the divisor of every micro-batch's loss.

        Raises:
            ValueError: the batch has nothing to count, or no single denominator of the loss was found. A micro-batch without
            targets has an infinite divisor: it adds nothing.
        """
        peers = self._peers
        if self._weight is not None or self._loss_over in ("sum", "micro-batch"):  # others compare losses or outputs
            self._check_shared(rows, len(micro_batches))
        if self._weight is not None:
            self.summary = "mean over micro-batches, weighted by weight="
            return peers.select_own(weighted_divisors(micro_batches, self._weight, peers))
        if self._loss_over == "sum":
            self.summary = 'sum over micro-batches (loss_over="sum")'
            return [1.0] * len(micro_batches)
        number = len(micro_batches) * peers.count
        if self._loss_over == "batch":
            self.summary = 'one loss of the whole batch (loss_over="batch")'
            if number > 1:
                self._check_outputs(rows, micro_batches)
            return [float(number)] * len(micro_batches)
        if number == 1:
            self.summary = "loss of the batch, in one micro-batch"
            return [1.0]
        remaining, sums, note = self._candidates(rows, micro_batches)
        if not remaining:
            self.summary = 'mean over micro-batches (loss_over="micro-batch")'
            return [float(number)] * len(micro_batches)
        found = _divisors_by_candidate({name: sums[name] for name in sums if name in remaining}, number)
        if not found:  # every remaining candidate counts nothing in the whole batch
            raise no_target_error(next(iter(remaining)))
        self.summary = _describe([name for name in sums if name in remaining]) + note
        if self._warning:  # once, and not if the batch is refused
            warnings.warn(self._warning, stacklevel=2)
            self._warning = ""
        return peers.select_own(next(iter(found.values())))

    def item_count(self, rows: RowsOfBatch, micro_batches: Sequence[Any]) -> float:
        """Return the number of items over which the batch's loss is a mean; 1 for a sum.

        Of a batch in one micro-batch, which need not be cut, these are its rows if its loss is a mean of no other items.

        Raises:
            ValueError: as for `divisors`.
        """
        peers = self._peers
        if self._weight is not None:
            own: Any = [float(self._weight(each)) for each in micro_batches]
            counts = peers.gather_counts({"weight": own})["weight"]
            return float(sum(counts or []))
        if self._loss_over == "sum":
            return 1.0
        own_rows = peers.gather_counts({ROWS: rows.sizes(len(micro_batches))})[ROWS]
        count_rows = float(sum(own_rows or []))
        if self._loss_over == "batch":
            return count_rows
        try:
            remaining, sums, _ = self._candidates(rows, micro_batches)
        except ValueError:
            if len(micro_batches) * peers.count > 1:
                raise
            return count_rows
        names = [name for name in sums if name in remaining]
        if SUM in names:
            return 1.0
        counted = sums[next((name for name in names if name != ROWS and is_of_targets(name, rows.batch)), ROWS)]
        return count_rows if counted is None else float(sum(counted))

    def _candidates(
        self, rows: RowsOfBatch, micro_batches: Sequence[Any]
    ) -> tuple[frozenset[str], dict[str, list[int] | None], str]:
        """Return the candidates that hold for the batch, the counts of all micro-batches by candidate, and a note on both.

        With ``loss_over="micro-batch"`` there may be none.
        """
        peers, number = self._peers, len(micro_batches) * self._peers.count
        counted, compared = rows.counted_by(micro_batches), rows.compared_by(micro_batches)
        counts, sizes = normaliser_candidates(counted), counted.sizes(len(micro_batches))
        key = self._key(rows, counts)
        if self._remaining.get(key) is None:
            self._remaining.put(key, self._compare(key, tuple(counts), peers.gather_rows(compared), max(sizes)))
        known = self._remaining.get(key)
        remaining = frozenset(counts) if known is None else known
        sums = peers.gather_counts({name: sum_counts(each, sizes) for name, each in counts.items()})
        sums = {name: sums[name] for name in counts}
        found = _divisors_by_candidate({name: sums[name] for name in counts if name in remaining}, number)
        if _disagree(found, found):
            try:
                remaining = self._identify(found, peers.gather_rows(compared), len(micro_batches))
            except LossError:
                if self._loss_over != "micro-batch":
                    raise
                remaining = frozenset()
            self._remaining.put(key, remaining)
        return remaining, sums, self._notes.get(key) or ""

    def _check_outputs(self, rows: RowsOfBatch, micro_batches: Sequence[Any]) -> None:
        """Compare the outputs of a few rows with those of their parts, once per structure.

        Raises:
            ValueError: they differ by more than `MOST_GAP`.
        """
        key = self._key(rows, normaliser_candidates(rows.counted_by(micro_batches)))
        own_run = self._run
        if own_run is None or self._remaining.get(key) is not None:
            return

        def run(small: RowsOfBatch, perturbed: bool) -> Sequence[Any]:
            try:
                (together,), parts = small.split(1), small.split(2)  # a function of the user may not cut so few rows
                return own_run([together, together, *parts], perturbed)
            except Exception as error:
                if self._peers.count > 1 or isinstance(error, MemoryError):
                    raise
                raise _CannotRunError(f"{type(error).__name__}: {error}") from error

        gap: float | None = None
        why_not = "the model draws random numbers in evaluation mode"
        for each in self._peers.gather_rows(rows):
            if each.count > 1 and gap is None:
                try:
                    gap = compare_outputs(each, max(rows.sizes(len(micro_batches))), run)
                except _CannotRunError as error:
                    why_not = str(error)
                    _refuse_shared_tensor(each, lambda batches: own_run(batches, False), why_not)
        if gap is None:
            warnings.warn(outputs_not_compared_message(why_not), stacklevel=2)
        elif gap > MOST_GAP:
            raise mixed_outputs_error(gap)
        elif gap > MOST_ROUNDING:
            warnings.warn(outputs_gap_message(gap), stacklevel=2)
        self._remaining.put(key, frozenset({SUM}))

    def _check_shared(self, rows: RowsOfBatch, micro_batches: int) -> None:
        """Refuse a tensor that all rows share, once per structure, where no losses are compared.

        Nothing is run unless it may be cut by mistake: where there are as many rows as entries of another dimension.

        Raises:
            ValueError: the model cannot run two rows, and can if a tensor is given whole.
        """
        tensors = [column for _, column in rows.columns() if isinstance(column, torch.Tensor)]
        is_ambiguous = rows.count > 2 and len(tensors) > 1 and any(rows.count in tensor.shape[1:] for tensor in tensors)
        if micro_batches == 1 or not is_ambiguous or self._peers.count > 1:
            return
        key = self._key(rows, {})
        if self._remaining.get(key) is not None:
            return
        try:
            self._measure(rows.select([slice(0, 2)]), False)
        except Exception as error:  # any of the user's own code
            _refuse_shared_tensor(rows, self._losses_of, f"{type(error).__name__}: {error}")
        self._remaining.put(key, frozenset({SUM}))

    def _losses_of(self, batches: Sequence[Any]) -> list[torch.Tensor]:
        return list(torch.tensor(self._measure(batches, False)))

    def _key(self, rows: RowsOfBatch, counts: CandidateCounts) -> Hashable:
        """Return what a verdict holds for: candidates, structure of the batch, and settings of batch and loss."""
        kind, names, tensors = structure_of(rows.batch)
        own = self._peers.count == 1  # others' settings are unknown, and all workers must compare together
        settings = (_settings_in(rows.batch), self._loss_settings()) if own else ()
        # A list may have an item per row.
        return tuple(counts), kind, names, tuple(dict.fromkeys(tensors)), settings

    def _compare(
        self, key: Hashable, names: tuple[str, ...], rows_of_workers: Iterable[RowsOfBatch], size: int
    ) -> frozenset[str]:
        """Return the candidates that reproduce the loss of a few rows of the first worker that has several.

        Raises:
            ValueError: none does, by more than `MOST_GAP`.
            MemoryError: the device is too small for a few rows.
        """
        if self._loss_over == "micro-batch":
            self._notes.put(key, ' of each micro-batch (loss_over="micro-batch")')
            return frozenset(names) - {SUM}
        comparison, why_not = LossComparison({}), "a few rows have no finite loss"
        for rows in rows_of_workers:  # all of them, as workers exchange them together
            if rows.count > 1 and not comparison.gaps:
                try:
                    comparison = compare_losses(rows, size, normaliser_candidates(rows), self._measure)
                except Exception as error:
                    if self._peers.count > 1 or isinstance(error, MemoryError):  # a step would not fit either
                        raise
                    why_not = f"{type(error).__name__}: {error}"
                    _refuse_shared_tensor(rows, self._losses_of, why_not)
        if comparison.gap > MOST_GAP:  # beyond noise, too
            raise mixed_rows_error(comparison)
        if not comparison.gaps:
            self._notes.put(key, ", not compared with the loss of a few rows")
            self._warning = not_compared_message(why_not)
            return frozenset(names) - {SUM}
        if comparison.gap > 0:
            note = f", {comparison.gap:.2g} of it away from the loss of the whole batch"
            self._notes.put(key, note)
            self._warning = gap_message(comparison)
            # Too far from all candidates to tell means apart: where they differ for a batch, other trials decide.
            return frozenset(names) - {SUM} if SUM not in comparison.fitting() else frozenset({SUM})
        return comparison.fitting()

    def _identify(
        self, found: Mapping[str, Divisors], rows_of_workers: Iterable[RowsOfBatch], parts: int
    ) -> frozenset[str]:
        """Narrow the candidates down on one worker's rows, and on the next one's if they do not decide.

        Raises:
            ValueError: the rows of no worker decide, or no candidate is right.
        """
        undecided: ValueError | None = None
        for rows in rows_of_workers:
            counts = normaliser_candidates(rows)
            try:
                return self._narrow({n: counts[n] for n in found}, found, rows, rows.sizes(min(parts, rows.count)))
            except UndecidedError as error:
                undecided = undecided or error
        assert undecided is not None
        raise undecided

    def _narrow(
        self, counts: CandidateCounts, found: Mapping[str, Divisors], rows: RowsOfBatch, sizes: Sequence[int]
    ) -> frozenset[str]:
        """Return the candidates that reproduce the model's loss; they all give the same divisors.

        Raises:
            ValueError: no candidate does, or those that do disagree.
        """
        all_trials: list[LossTrial] = []
        for make_trials in (target_trials, row_trials):
            # One candidate of each kind, the first: later entries of the dictionary replace earlier ones.
            kinds = list({found[name]: name for name in reversed(list(counts))}.values())
            trials = list(make_trials(rows, counts, kinds))
            counts = self._matching(trials, False, counts, sizes)
            all_trials += trials
            if not _disagree(counts, found):
                return frozenset(counts)
        counts = self._matching(all_trials, True, counts, sizes)  # a head that is all zero gives all rows one loss
        if _disagree(counts, found):
            raise undecided_error(counts_table(counts, sizes))
        return frozenset(counts)

    def _matching(
        self, trials: Sequence[LossTrial], perturbed: bool, counts: CandidateCounts, sizes: Sequence[int]
    ) -> CandidateCounts:
        """Return the candidates that are right in all trials with finite losses."""
        losses = iter(
            self._measure([batch for trial in trials for batch in trial.batches], perturbed) if trials else []
        )
        results = [(trial, list(islice(losses, len(trial.batches)))) for trial in trials]
        finite = [(trial, own) for trial, own in results if all(map(math.isfinite, own))]
        errors = {
            name: max((trial.error(name, own, ROUNDING) for trial, own in finite), default=0.0) for name in counts
        }
        if min(errors.values()) > ROUNDING:
            raise unknown_error(counts_table(counts, sizes), min(errors.values()))
        return {name: counts[name] for name, error in errors.items() if error <= ROUNDING}


def _settings_in(batch: Any) -> Hashable:
    """Return the flags and short names among a batch's values, such as the task of a batch."""
    items = batch.items() if isinstance(batch, Mapping) else enumerate(batch) if isinstance(batch, tuple) else ()
    return tuple((name, value) for name, value in items if _is_setting(value))


def _is_setting(value: object) -> bool:
    return value is None or isinstance(value, bool) or (isinstance(value, str) and value.isidentifier())


def _disagree(names: Iterable[str], found: Mapping[str, Divisors]) -> bool:
    return len({found[name] for name in names}) > 1


def _measure_closed(batches: Sequence[Any], perturbed: bool) -> NoReturn:
    raise RuntimeError("this LossNormaliser is closed: make a new one")


def weighted_divisors(micro_batches: Sequence[Any], weight: Weight, peers: Peers = NoPeers()) -> list[float]:  # noqa: B008 - no state
    """Return the divisor ``n / n_k`` of the losses of all workers' micro-batches; the reciprocals add up to one.

    Raises:
        ValueError: a weight is negative or not finite, or all are 0.
    """
    own: Any = [float(weight(micro_batch)) for micro_batch in micro_batches]
    counts = peers.gather_counts({"weight": own})["weight"]
    assert counts is not None
    for k, count in enumerate(counts):
        if not 0 <= count < math.inf:
            raise ValueError(f"weight= returned {count:g} for micro-batch {k}: return 0, or a positive number")
    if not any(counts):
        raise no_target_error("weight=")
    return list(_divisors(counts))


def _divisors(counts: Sequence[float]) -> Divisors:
    """Return every ``n / n_k``: exactly K if all counts are equal, infinite for a count of 0."""
    if len({*counts}) == 1:
        return (float(len(counts)),) * len(counts)  # the sum of fractions may round, and K must be K
    total = sum(counts)
    return tuple(total / count if count else math.inf for count in counts)


def _divisors_by_candidate(sums: Mapping[str, list[int] | None], number: int) -> dict[str, Divisors]:
    """Return the divisors of `number` micro-batches by candidate, without candidates whose counts are all 0."""
    return {
        name: (1.0,) * number if each is None else _divisors(each)
        for name, each in sums.items()
        if each is None or any(each)
    }


def _describe(names: Sequence[str]) -> str:
    """Return what a loss is, of which these candidates are right."""
    if SUM in names:
        return "sum"
    return "mean over rows or targets" if len(names) > 1 and ROWS in names else f"mean over {' or '.join(names)}"


def _refuse_shared_tensor(rows: RowsOfBatch, run: Callable[[Sequence[Any]], Sequence[Any]], why_not: str) -> None:
    """Raise ValueError if a few rows cannot be computed because a tensor that all rows share was cut."""
    if (found := find_shared_tensor(rows, run)) is not None:
        raise shared_tensor_error(*found, why_not)


class _CannotRunError(RuntimeError):
    """The model cannot run a few rows."""
