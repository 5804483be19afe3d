"""Rows and tokens of a micro-batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from l2l_core.batches import BatchRows, leaves_in, map_tensors

_INTEGER_TYPES = (torch.uint8, torch.int16, torch.int32, torch.int64)


@dataclass(frozen=True, slots=True)
class MicroBatchRows:
    """The rows of an inspected micro-batch.

    Attributes:
        count: number of rows.
        length: tokens per row; None without tokens.
    """

    count: int
    length: int | None

    @classmethod
    def of(cls, micro_batch: Any, count: int) -> MicroBatchRows:
        """Describe a micro-batch of `count` rows."""
        tokens = find_tokens(micro_batch)  # a tensor with another number of rows has no tokens
        return cls(count, tokens.shape[1] if tokens is not None and len(tokens) == count else None)

    def first_dim_problem(self, shape: Sequence[int], name: str) -> str:
        """Return why the first dimension of the tensor `name` may not be the rows; empty if it is.

        A shape (n, n, ...) for n rows is ambiguous. It counts as rows first, unless the rows have another number of tokens
        than n.
        """
        found = f"{name} has the shape {tuple(shape)}, and the micro-batch has {self.count} row(s)"
        if not shape or shape[0] != self.count:
            return f"{found}: its first dimension is not the rows, so the part of one row is unknown"
        is_square = len(shape) == 3 and shape[1] == self.count > 1
        if is_square and self.length not in (None, self.count):
            return f"{found} of {self.length} tokens each: its first dimension may be rows or positions"
        return ""


def find_tokens(micro_batch: Any) -> torch.Tensor | None:
    """Return the tokens, (rows, positions): ``input_ids`` of a mapping, or else the first tensor of integers of that kind."""
    named = micro_batch.get("input_ids") if isinstance(micro_batch, Mapping) else None
    for leaf in [named, *leaves_in(micro_batch)]:
        if isinstance(leaf, torch.Tensor) and leaf.ndim == 2 and leaf.dtype in _INTEGER_TYPES:
            return leaf
    return None


def select_row(micro_batch: Any, row: int) -> Any:
    """Return one row of a micro-batch."""
    return BatchRows(micro_batch).select([slice(row, row + 1)])[0]


def with_tokens(micro_batch: Any, tokens: torch.Tensor) -> Any:
    """Return the micro-batch with other tokens; all else is shared with it."""
    old = find_tokens(micro_batch)
    return map_tensors(micro_batch, lambda tensor: tokens if tensor is old else tensor)
