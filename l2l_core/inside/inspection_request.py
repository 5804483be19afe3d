"""Arguments of an inspection, checked, and the rows and tokens of the micro-batches."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from l2l_core.batches import RowsRule, leaves_in, map_tensors

MAX_LAYERS = 12  # layers inspected by default


_INTEGER_TYPES = (torch.uint8, torch.int16, torch.int32, torch.int64)


@dataclass(frozen=True, slots=True)
class MicroBatchRows:
    """The rows of an inspected micro-batch."""

    count: int
    length: int | None  # tokens per row; None without tokens
    leading: int | None  # length of the first dimension, if it holds the rows: several times `count` for blocks of rows

    @classmethod
    def of(cls, micro_batch: Any, count: int, leading: int | None) -> MicroBatchRows:
        """Describe a micro-batch of `count` rows."""
        tokens = find_tokens(micro_batch)  # a tensor with another number of rows has no tokens
        has_tokens = tokens is not None and len(tokens) == leading
        return cls(count, tokens.shape[1] if tokens is not None and has_tokens else None, leading)

    def first_dim_problem(self, shape: Sequence[int], name: str) -> str:
        """Return why the first dimension of the tensor `name` may not be the rows; empty if it is.

        A shape (n, n, ...) for n rows is ambiguous. It counts as rows first, unless the rows have another number of tokens
        than n.
        """
        found = f"{name} has the shape {tuple(shape)}, and the micro-batch has {self.count} row(s)"
        if not shape or shape[0] != self.leading:
            return f"{found}: its first dimension is not the rows, so the part of one row is unknown"
        is_square = len(shape) == 3 and shape[1] == shape[0] > 1
        if is_square and self.length not in (None, self.leading):
            return f"{found} of {self.length} tokens each: its first dimension may be rows or positions"
        return ""


def find_tokens(micro_batch: Any) -> torch.Tensor | None:
    """Return the tokens, (rows, positions): ``input_ids`` of a mapping, or else the first tensor of integers of that kind."""
    named = micro_batch.get("input_ids") if isinstance(micro_batch, Mapping) else None
    for leaf in [named, *leaves_in(micro_batch)]:
        if isinstance(leaf, torch.Tensor) and leaf.ndim == 2 and leaf.dtype in _INTEGER_TYPES:
            return leaf
    return None


def select_row(micro_batch: Any, row: int, rows_of: RowsRule) -> Any:
    """Return one row of a micro-batch.

    Raises:
        ValueError: rows are not along the first dimension, so that a row cannot be continued.
    """
    rows = rows_of(micro_batch)
    if rows.leading(1) is None:
        raise ValueError(
            "generate: rows are not along the first dimension of all tensors (split=...): leave generate out"
        )
    return rows.select([slice(row, row + 1)])[0]


def with_tokens(micro_batch: Any, tokens: torch.Tensor) -> Any:
    """Return the micro-batch with other tokens; all else is shared with it."""
    old = find_tokens(micro_batch)
    return map_tensors(micro_batch, lambda tensor: tokens if tensor is old else tensor)


@dataclass(frozen=True, slots=True)
class InspectionRequest:
    """Figures to record in a pass. Passes with equal requests do the same work."""

    keys: frozenset[str]
    micro_batches: tuple[int, ...]  # their numbers among those of a step
    rows: tuple[MicroBatchRows, ...]  # of each of these
    row: int
    positions: int
    attention: bool


def evenly_spaced(count: int) -> list[int]:
    """Choose at most `MAX_LAYERS` of `count` layers, evenly, with the first and the last."""
    if count <= MAX_LAYERS:
        return list(range(count))
    return [round(i * (count - 1) / (MAX_LAYERS - 1)) for i in range(MAX_LAYERS)]


def check_arguments(
    sizes: Sequence[int], micro_batches: Iterable[Any], row: Any, positions: Any, generate: Any, top: Any
) -> tuple[tuple[int, ...], int, int, int, int]:
    """Check the arguments of `Relay.look`; `sizes` are the rows of all micro-batches.

    Returns:
        The chosen micro-batches in order, `row`, `positions`, `generate` and `top`, as plain `int`.

    Raises:
        ValueError: a number out of range; names the range.
        TypeError: `micro_batches` is not a collection.
    """
    positions, generate, top = (
        _check_at_least(least, name, value)
        for name, value, least in (("positions", positions, 1), ("generate", generate, 0), ("top", top, 1))
    )
    if isinstance(micro_batches, str) or not isinstance(micro_batches, Iterable):
        raise TypeError(
            f"micro_batches={micro_batches!r} is not a collection: give the numbers of one or more, as [{micro_batches!r}]"
        )
    given = list(micro_batches)
    numbers = {_to_int(one) for one in given}
    chosen = tuple(sorted(one for one in numbers if one is not None and 0 <= one < len(sizes)))
    if not chosen or len(chosen) < len(numbers):
        raise ValueError(
            f"micro_batches={given!r}: a step has {len(sizes)} micro-batches here, give one or more of the whole numbers 0 to "
            f"{len(sizes) - 1}"
        )
    fewest, number = min(sizes[k] for k in chosen), _to_int(row)
    if number is None or not 0 <= number < fewest:
        raise ValueError(
            f"row={row!r}: a chosen micro-batch has {fewest} row(s), give a whole number from 0 to {fewest - 1}"
        )
    return chosen, number, positions, generate, top


def _check_at_least(minimum: int, name: str, value: Any) -> int:
    number = _to_int(value)
    if number is None or number < minimum:
        raise ValueError(f"{name}={value!r}: must be a whole number of at least {minimum}")
    return number


def _to_int(value: Any) -> int | None:
    """Convert an integer of any library to `int`; return None for other values and for bool."""
    if isinstance(value, bool):  # `index` converts it to 0 or 1
        return None
    try:
        return operator.index(value)
    except TypeError:
        return None
