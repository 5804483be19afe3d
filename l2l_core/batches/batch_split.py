"""How a batch is cut into micro-batches, and their outputs are put together: ``split=`` and ``join=`` of a relay.

By default rows are along dim 0 (`batch.py`). Other rules are dims (`row_dims.py`), blocks of rows that belong together
(`view_rows.py`), packed sequences (`packed_sequences.py`), or a function of the user (`function_rows.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, cast

from l2l_core.batches.batch import Batch, BatchRows, RowsOfBatch
from l2l_core.batches.function_rows import FunctionRows, SplitFunction
from l2l_core.batches.output_join import Join, OutputJoin
from l2l_core.batches.packed_sequences import SequenceRows, Sequences
from l2l_core.batches.row_dims import DimRows
from l2l_core.batches.view_rows import ViewRows, Views

Split = int | Mapping[Any, Any] | Sequence[Any] | Views | Sequences | SplitFunction
RowsRule = Callable[[Batch], RowsOfBatch]


def rows_rule(split: Split | None = None, join: Join | None = None) -> RowsRule:
    """Return the rule by which batches are cut, and outputs of micro-batches joined.

    Args:
        split: a dim, or dims by key or position; `Views`; `Sequences`; or ``split(batch, k)``, which returns k micro-batches,
            the same for the same batch. Default: rows along dim 0.
        join: the dim of the rows in outputs, or dims by key; or ``join(outputs)``, which puts the outputs of all micro-batches
            together by differentiable operations. Default: by the rule of `split`.

    Raises:
        TypeError: `split` or `join` is none of these.
    """
    output_join = OutputJoin(_checked(join, "join"))
    rule: Any = _checked(split, "split")
    if rule is None:
        return partial(BatchRows, output_join=output_join)
    if isinstance(rule, Views):
        return partial(ViewRows, views=rule, output_join=output_join)
    if isinstance(rule, Sequences):
        return partial(SequenceRows, sequences=rule, output_join=output_join)
    if callable(rule):
        return partial(FunctionRows, function=cast("SplitFunction", rule), output_join=output_join)
    return partial(DimRows, dims=rule, output_join=output_join)


def _checked(value: Any, name: str) -> Any:
    """Return a value of `split` or `join` if it has a known type."""
    if isinstance(value, bool | str | type) or not (
        value is None
        or callable(value)
        or hasattr(value, "split_dim")
        or isinstance(value, int | Mapping | list | tuple)
        or (name == "split" and isinstance(value, Views | Sequences))
    ):
        more = ", Views(2), Sequences(...), or a function (batch, k) -> micro-batches"
        raise TypeError(
            f"{name}={value!r}: give a dim, dims by key as {{'x': 1, 'lengths': 0}}"
            f"{more if name == 'split' else ', or a function of the list of outputs'}"
        )
    return value
