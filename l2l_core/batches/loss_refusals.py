"""Errors and warnings of losses that micro-batches do not put together, with their figures and remedies."""

from __future__ import annotations

from collections.abc import Sequence

from l2l_core.batches.loss_comparison import LossComparison
from l2l_core.batches.target_counts import ROWS, CandidateCounts, sum_counts

_MAX_COUNTS_SHOWN = 8  # in a message
_REMEDY = (
    "Pass weight=lambda micro_batch: ... to the relay, the weight of a micro-batch's loss (the number of items in its mean), "
    'or loss_over="micro-batch" for the mean over micro-batches'
)


class LossError(ValueError):
    """The loss of the batch cannot be put together from micro-batches; no setting of a step changes that."""


class UndecidedError(LossError):
    """The rows do not distinguish the candidates; another worker's rows may."""


def counts_table(counts: CandidateCounts, sizes: Sequence[int]) -> str:
    """Format the counts of micro-batches for rows and for candidates with unequal counts."""
    added = {name: sum_counts(each, sizes) for name, each in counts.items()}
    shown = {name: each for name, each in added.items() if name == ROWS or each is None or len({*each}) > 1}
    return "; ".join(f"{name}: {'-' if each is None else _listed(each)}" for name, each in shown.items())


def _listed(counts: Sequence[int]) -> str:
    shown = ", ".join(map(str, counts[:_MAX_COUNTS_SHOWN]))
    return f"[{shown}{', ...' if len(counts) > _MAX_COUNTS_SHOWN else ''}]"


def no_target_error(source: str) -> LossError:
    """Return the error for a batch without targets."""
    return LossError(
        f"the batch counts nothing ({source}): it has no target (all labels -100?), so its mean loss is not defined. Leave such "
        "batches out, or pass weight="
    )


_CUTS = (
    "split= of the relay cuts elsewhere: split=1 or split={'x': 1, 'lengths': 0} along these dims, split=Views(2) for two "
    "blocks of rows that belong together (views, pairs), split=Sequences(...) for packed tokens"
)
_TOGETHER = (
    'loss_over="batch" with loss=lambda outputs, batch: ... takes one loss over the outputs of all micro-batches, as '
    "micro_batches=1 does, which cuts nothing"
)
_REMEDIES = (
    'loss_over="micro-batch" trains on the mean over micro-batches, as plain accumulation does. A weighted mean needs '
    "weight=lambda micro_batch: ..., the sum of its weights"
)


def _figures(comparison: LossComparison) -> str:
    return (
        f"the loss of a few rows is {comparison.together:.4g} together and {comparison.in_parts:.4g} in two parts "
        f"({100 * comparison.gap:.2g} % apart)"
    )


def mixed_rows_error(comparison: LossComparison) -> LossError:
    """Return the error for a loss that is no mean and no sum."""
    return LossError(
        f"{_figures(comparison)}, so it is neither a mean over rows or targets nor a sum. It mixes rows (others as negatives, "
        "pairs of views), or the batch is cut in a wrong place. Micro-batches would train on another loss than the batch. "
        f"Nothing was trained. {_CUTS}. {_TOGETHER}. {_REMEDIES}"
    )


def shared_tensor_error(name: str, shape: Sequence[int], why_not: str) -> LossError:
    """Return the error for a tensor that all rows share, though it has as many entries as there are rows."""
    return LossError(
        f"{name} has as many entries as the batch has rows ({shape[0]}), so micro-batches would get a part of it, with which the "
        f"model does not run ({why_not}). All rows share it: as one row it changes no result. Nothing was trained. Pass "
        f"it as {name}[None], of shape {(1, *shape)}, which is not cut"
    )


def mixed_outputs_error(gap: float) -> LossError:
    """Return the error for outputs that depend on the other rows."""
    return LossError(
        f"the outputs of a few rows in two parts are not those of the same rows together ({100 * gap:.2g} % apart): the model "
        f"mixes rows, or the batch is cut in a wrong place. Nothing was trained. {_CUTS}. micro_batches=1 cuts nothing"
    )


def outputs_gap_message(gap: float) -> str:
    """Return the warning for outputs that depend a little on the other rows."""
    return (
        f"the outputs of a few rows in two parts are not quite those of the same rows together ({100 * gap:.2g} % apart), so the "
        "loss is not quite that of the undivided batch. micro_batches=1 cuts nothing"
    )


def outputs_not_compared_message(why_not: str) -> str:
    """Return the warning for outputs that could not be compared."""
    return (
        f"the outputs of a few rows were not compared with those of their parts ({why_not}), so a batch that is cut in a wrong "
        f"place would not be noticed. {_CUTS}"
    )


def gap_message(comparison: LossComparison) -> str:
    """Return the warning for a loss that is nearly a mean."""
    return (
        f"{_figures(comparison)}: micro-batches train on a slightly different loss than the batch, for example because of a "
        f"router's balance or weights of classes. {_REMEDIES}"
    )


def not_compared_message(why_not: str) -> str:
    """Return the warning for a loss that could not be compared."""
    return (
        f"the loss of a few rows was not compared with that of their parts ({why_not}), so micro-batches may train on another "
        f"loss than the batch. {_REMEDIES}"
    )


def unknown_error(table: str, error: float) -> LossError:
    """Return the error for a mean over unknown items."""
    return LossError(
        f"the items over which the loss is a mean cannot be determined, and micro-batches have unequal counts of them ({table}): "
        f"the loss of a few rows together is not the mean of their losses under any of these (off by {error:.2g} or "
        f"more). A sum of several means has no such mean: {_TOGETHER}. {_REMEDY}"
    )


def undecided_error(table: str) -> UndecidedError:
    """Return the error for rows that do not tell means apart."""
    return UndecidedError(
        f"the items over which the loss is a mean cannot be determined, and micro-batches have unequal counts of them ({table}): "
        f"rows with different counts have the same loss, or do not exist. {_REMEDY}"
    )
