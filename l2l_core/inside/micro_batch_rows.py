"""The rows of a micro-batch, and whether the first dimension of a tensor can be taken for them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from l2l_core.inside.tokens import find_tokens


@dataclass(frozen=True, slots=True)
class MicroBatchRows:
    """The rows of a micro-batch that is looked at.

    Attributes:
        count: how many there are.
        length: how many tokens each has; None where the batch holds none.
    """

    count: int
    length: int | None

    @classmethod
    def of(cls, micro_batch: Any, count: int) -> MicroBatchRows:
        """Take note of a micro-batch of so many rows."""
        tokens = find_tokens(micro_batch)  # a table with another number of rows than the batch is something else
        return cls(count, tokens.shape[1] if tokens is not None and len(tokens) == count else None)

    def first_dim_problem(self, shape: Sequence[int], name: str) -> str:
        """Say why the first dimension of `what` is not known to be the rows; empty where it is.

        A shape (n, n, ...) for n rows may hide positions that come first. It is taken as it reads, unless the rows have another
        number of tokens than n.
        """
        found = f"{name} has the shape {tuple(shape)}, and the micro-batch has {self.count} row(s)"
        if not shape or shape[0] != self.count:
            return f"{found}: its first dimension is not the rows, so what belongs to one row cannot be told"
        is_square = len(shape) == 3 and shape[1] == self.count > 1
        if is_square and self.length not in (None, self.count):
            return f"{found} of {self.length} tokens each: whether rows or positions come first cannot be told"
        return ""
