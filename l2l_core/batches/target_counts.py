"""Candidates for the denominator of a batch's mean loss, with the count of each row.

The loss may be a mean over rows, or over targets: the entries of an integer tensor except -100 (``ignore_index`` of PyTorch's
losses), all of them or shifted by one as in causal language models; a list with one item per row may hold such tensors. If the
batch has the count of its targets, as in transformers' Trainer, losses are divided by it and add up.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch

from l2l_core.batches.containers import is_sequence, leaves_in
from l2l_core.batches.row_count import has_rows

IGNORE_INDEX = -100
_MOST_LABELS = 4  # of a row; more are a sequence
_WHOLE, _SHIFTED = "targets in {}", "targets in {} after a shift by one"
ROWS, SUM = "rows", "nothing: a sum"

CandidateCounts = dict[str, list[int] | None]  # candidate -> count of every row; None: the losses of parts add up


class CountedRows(Protocol):
    """Rows of a batch that count what a loss may be a mean over."""

    def item_counts(self) -> dict[str, list[int]]:
        """Return the counts of every row by candidate."""
        ...


def normaliser_candidates(rows: CountedRows) -> CandidateCounts:
    """Return the count of every row by candidate; the candidates depend on the batch's structure alone."""
    return {**rows.item_counts(), SUM: None}


def count_targets(name: str, column: Any) -> Iterator[tuple[str, list[int]]]:
    """Yield candidate and targets per row of a column, with and without the first target of a row."""
    column = _as_tensor(column)
    if has_rows(column):
        if is_integer(column):
            is_target = column != IGNORE_INDEX
            yield _WHOLE.format(name), _sums(is_target)
            if column.ndim > 1:
                yield _SHIFTED.format(name), _sums(is_target[..., 1:])
        return
    rows = [leaves_in(_as_tensor(item)) for item in column]
    places = zip(*rows, strict=True) if len({len(row) for row in rows}) == 1 else ()
    for position, items in enumerate(places):
        if all(has_rows(item) and is_integer(item) for item in items):
            masks = [item != IGNORE_INDEX for item in items]
            yield _WHOLE.format(f"{name}[:][{position}]"), [int(mask.sum()) for mask in masks]
            yield _SHIFTED.format(f"{name}[:][{position}]"), [int(mask[..., 1:].sum()) for mask in masks]


def labels_in(column: Any) -> list[tuple[int, ...] | None]:
    """Return the label of every row, None for one to ignore; empty if there are no labels."""
    column = _as_tensor(column)
    if not has_rows(column) or not is_integer(column):
        return []
    by_row = column.reshape(len(column), -1)
    if by_row.shape[1] > _MOST_LABELS:
        return []
    return [None if IGNORE_INDEX in row else tuple(row) for row in by_row.tolist()]


def count_tokens(name: str, column: Any, starts: Sequence[int]) -> dict[str, list[int]]:
    """Return candidates and targets of packed sequences, with and without the first target of a sequence.

    A causal loss over packed tokens also shifts across the borders of sequences; as the first target of a sequence has no
    token before it, collators set it to -100, and then the two counts are equal.

    Args:
        name: of the column.
        column: (tokens, ...).
        starts: (sequences + 1,), the first token of every sequence, and the number of tokens.
    """
    if not is_integer(column):
        return {}
    of_token = torch.tensor(_sums(column != IGNORE_INDEX))
    added = torch.cat([of_token.new_zeros(1), of_token.cumsum(0)])[torch.tensor(starts)]
    whole = added.diff()
    return {
        _WHOLE.format(name): whole.tolist(),
        _SHIFTED.format(name): (whole - of_token[torch.tensor(starts[:-1])]).tolist(),
    }


def fold_counts(counts: Mapping[str, Sequence[int]], blocks: int) -> dict[str, list[int]]:
    """Add up the counts of the rows i, i + N/blocks, ... that belong together."""
    return {name: torch.tensor(each).reshape(blocks, -1).sum(0).tolist() for name, each in counts.items()}


def is_of_targets(candidate: str, batch: Any) -> bool:
    """Return whether a candidate counts the targets of a batch, judged by names and places.

    That is the last one of a sequence; a key of a mapping with "label" or "target", or any key if no key has such a name.
    """
    if isinstance(batch, Mapping):
        named = [str(key) for key in batch if "label" in str(key).lower() or "target" in str(key).lower()]
        return not named or any(f"[{key!r}]" in candidate for key in named)
    return not is_sequence(batch) or f"[{len(batch) - 1}]" in candidate


def sum_counts(counts: Sequence[int] | None, sizes: Sequence[int]) -> list[int] | None:
    """Sum the counts of rows over micro-batches of these sizes; None if losses add up."""
    if counts is None:
        return None
    starts = [sum(sizes[:k]) for k in range(len(sizes))]
    return [sum(counts[start : start + size]) for start, size in zip(starts, sizes, strict=True)]


def _sums(mask: Any) -> list[int]:
    return mask.reshape(len(mask), -1).sum(1).tolist()


def _as_tensor(value: Any) -> Any:
    """Convert a list of integers to a tensor; return other values unchanged."""
    # Larger integers than int64 cannot be targets, nor become a tensor.
    is_numbers = is_sequence(value) and len(value) > 0 and all(isinstance(n, int) and abs(n) < 2**63 for n in value)
    return torch.tensor(list(value)) if is_numbers else value


def is_integer(value: Any) -> bool:
    """Return whether a tensor or an array has an integer type of targets; images and sound have smaller ones."""
    if isinstance(value, torch.Tensor):
        return value.dtype in (torch.int32, torch.int64)
    return value.dtype.kind == "i" and value.dtype.itemsize >= 4
