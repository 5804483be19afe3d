"""How a batch is cut into micro-batches, and their outputs are put together: ``split=`` and ``join=`` of a relay.

By default rows are along dim 0 (`batch.py`). Other rules are dims (`row_dims.py`), blocks of rows that belong together (`Views`),
packed sequences (`packed_sequences.py`), or a function of the user.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch

from l2l_core.batches.batch import Batch, BatchRows, PartChange, RowChoice, RowsOfBatch, check_record
from l2l_core.batches.containers import is_record
from l2l_core.batches.output_join import GetDivisors, Join, OutputJoin, Placing, first_fitting
from l2l_core.batches.packed_sequences import SequenceRows, Sequences
from l2l_core.batches.row_count import has_rows
from l2l_core.batches.row_dims import DimRows
from l2l_core.batches.target_counts import ROWS, fold_counts


@dataclass(frozen=True, slots=True)
class Views:
    """Blocks of equal rows along dim 0 that belong together: two views of each image, chosen and rejected answers.

    "Row" i of a batch of N rows is the rows i, i + N/n, ... A micro-batch has its rows of every block, block after block.

    Attributes:
        count: the number n of blocks.

    Raises:
        ValueError: `count` is no whole number of at least 2.
    """

    count: int

    def __post_init__(self) -> None:
        if isinstance(self.count, bool) or not isinstance(self.count, int) or self.count < 2:
            raise ValueError(f"Views({self.count!r}): give the number of blocks, a whole number of at least 2")


SplitFunction = Callable[[Any, int], Sequence[Any]]
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


# -- blocks of rows ----------------------------------------------------------------------------------------------------


class ViewRows:
    """The rows of a batch of blocks: each stands for one row of every block.

    Raises:
        TypeError: the batch is not a mapping, sequence or dataclass.
        ValueError: the rows along dim 0 are no multiple of the number of blocks.
    """

    def __init__(self, batch: Batch, views: Views, output_join: OutputJoin) -> None:
        self.batch, self._views, self._output_join = batch, views, output_join
        self._rows = BatchRows(batch)
        if self._rows.count % views.count:
            raise ValueError(
                f"split={views}: the batch has {self._rows.count} row(s), which is no multiple of {views.count}: give blocks of "
                "equal rows, one behind another along dim 0"
            )
        self.count = self._rows.count // views.count
        self._of_view = BatchRows((torch.empty(self.count),))  # cuts the rows of one block

    def split(self, micro_batches: int) -> list[Any]:
        """Cut the batch into `micro_batches` parts."""
        if micro_batches == 1:
            return self._rows.split(1)
        return self.select([part[0].tolist() for part in BatchRows((torch.arange(self.count),)).split(micro_batches)])

    def most_parts(self, micro_batches: int) -> int:
        """Return `micro_batches`, or the number of rows if there are fewer."""
        return self._of_view.most_parts(micro_batches)

    def sizes(self, micro_batches: int) -> list[int]:
        """Return the rows of every micro-batch, in each block."""
        return self._of_view.sizes(micro_batches)

    def first(self, count: int) -> Any:
        """Return the batch with the first `count` rows of every block."""
        try:
            return self.batch if count >= self.count else self.select([slice(0, count)])[0]
        except (ValueError, TypeError):  # of a batch that cannot be cut
            return self.batch

    def select(self, choices: Sequence[RowChoice], change: PartChange | None = None) -> list[Any]:
        """Return one batch for each choice of rows; `change` gets (rows, blocks, ...)."""

        def change_blocks(where: str, part: Any, k: int) -> Any:
            assert change is not None
            return self._stacked(change(where, self._side_by_side(part), k))

        of_view = [list(range(self.count)[each]) if isinstance(each, slice) else each for each in choices]
        starts = [self.count * block for block in range(self._views.count)]
        rows = [[start + row for start in starts for row in each] for each in of_view]
        return self._rows.select(rows, None if change is None else change_blocks)

    def columns(self) -> Iterator[tuple[str, Any]]:
        """Yield the name and value, (rows, blocks, ...), of all tensors and arrays with rows."""
        for name, column in self._rows.columns():
            if has_rows(column):
                yield name, self._side_by_side(column)

    def item_counts(self) -> dict[str, list[int]]:
        """Return the counts of every row, over all blocks."""
        return fold_counts(self._rows.item_counts(), self._views.count) | {ROWS: [1] * self.count}

    def counted_by(self, micro_batches: Sequence[Any]) -> RowsOfBatch:
        """Return these rows."""
        return self

    def compared_by(self, micro_batches: Sequence[Any]) -> RowsOfBatch:
        """Return these rows."""
        return self

    def of(self, batch: Batch) -> RowsOfBatch:
        """Return the rows of another batch of as many blocks."""
        return ViewRows(batch, self._views, self._output_join)

    def leading(self, size: int) -> int | None:
        """Return the rows of all blocks."""
        return size * self._views.count

    def join(self, outputs: Sequence[Any], divisors: GetDivisors | None = None) -> Any:
        """Put the rows of all outputs back into their blocks; outputs with one entry for all blocks are concatenated."""
        sizes, count = self.sizes(len(outputs)), self._views.count

        def place(where: str, parts: Sequence[torch.Tensor], dim: int | None) -> Placing | None:
            blocks = Placing(dim or 0, [size * count for size in sizes], count)
            return first_fitting([blocks, Placing(dim or 0, sizes)], parts)

        return self._output_join(outputs, place, divisors)

    def _side_by_side(self, value: Any) -> Any:
        """Turn (blocks * rows, ...) into (rows, blocks, ...)."""
        return value.reshape(self._views.count, -1, *value.shape[1:]).swapaxes(0, 1)

    def _stacked(self, value: Any) -> Any:
        """Turn (rows, blocks, ...) into (blocks * rows, ...)."""
        return value.swapaxes(0, 1).reshape(-1, *value.shape[2:])


# -- a function of the user --------------------------------------------------------------------------------------------


class FunctionRows:
    """A batch that a function cuts; its rows are those of the micro-batches by the rules of `batch.py`.

    Before it is cut, `count` is that of the whole batch by these rules.

    Raises:
        TypeError: the batch is not a mapping, sequence or dataclass.
    """

    def __init__(self, batch: Batch, function: SplitFunction, output_join: OutputJoin) -> None:
        check_record(batch)
        self.batch, self._function, self._output_join = batch, function, output_join
        self._parts: list[Any] | None = None  # of the last cut

    @property
    def count(self) -> int:
        """Number of rows."""
        return sum(map(_rows_in, [self.batch] if self._parts is None else self._parts))

    def split(self, micro_batches: int) -> list[Any]:
        """Call the function.

        Raises:
            TypeError: it returns no list, or something that is no batch.
            ValueError: it returns another number of parts.
        """
        self._parts = cut_by(self._function, self.batch, micro_batches)
        return list(self._parts)

    def most_parts(self, micro_batches: int) -> int:
        """Return `micro_batches`."""
        return micro_batches

    def sizes(self, micro_batches: int) -> list[int]:
        """Return the rows of every micro-batch, by the rules of `batch.py`."""
        if self._parts is None or len(self._parts) != micro_batches:
            self.split(micro_batches)
        return [_rows_in(part) for part in self._parts or ()]

    def first(self, count: int) -> Any:
        """Return the first micro-batch of the last cut, or the whole batch."""
        return self.batch if self._parts is None else self._parts[0]

    def select(self, choices: Sequence[RowChoice], change: PartChange | None = None) -> list[Any]:
        """Raise ValueError: the rows are the function's matter."""
        raise ValueError(
            f"split={_name_of(self._function)} is a function, so one row cannot be taken out of a batch: leave generate out"
        )

    def columns(self) -> Iterator[tuple[str, Any]]:
        """Yield nothing."""
        return iter(())

    def item_counts(self) -> dict[str, list[int]]:
        """Return nothing but rows; `counted_by` has the counts of micro-batches."""
        return {ROWS: [1] * self.count}

    def counted_by(self, micro_batches: Sequence[Any]) -> RowsOfBatch:
        """Return the micro-batches as rows."""
        return _PartRows(self.batch, lambda: micro_batches, len(micro_batches), self._function)

    def compared_by(self, micro_batches: Sequence[Any]) -> RowsOfBatch:
        """Return the two parts as rows into which the function cuts the first micro-batch."""
        return _halves(micro_batches[0], self._function)

    def of(self, batch: Batch) -> RowsOfBatch:
        """Return the rows of another batch, cut by the same function."""
        return FunctionRows(batch, self._function, self._output_join)

    def leading(self, size: int) -> int | None:
        """Return `size`."""
        return size

    def join(self, outputs: Sequence[Any], divisors: GetDivisors | None = None) -> Any:
        """Join by the user's ``join=``.

        Raises:
            ValueError: there is none.
        """
        if self._output_join.given is None:
            raise ValueError(
                "split= is a function, so the outputs of micro-batches cannot be put together: pass join=lambda outputs: ... to "
                "the relay, or join=0 if their rows are along dim 0, in order"
            )
        sizes = self.sizes(len(outputs))

        def place(where: str, parts: Sequence[torch.Tensor], dim: int | None) -> Placing | None:
            return first_fitting([Placing(dim or 0, sizes)], parts)

        return self._output_join(outputs, place, divisors)


class _PartRows:
    """Parts of a batch that a function has cut, each as one row."""

    def __init__(self, whole: Any, parts: Callable[[], Sequence[Any]], count: int, function: SplitFunction) -> None:
        self.batch, self.count, self._parts, self._function = whole, count, parts, function

    def split(self, micro_batches: int) -> list[Any]:
        assert micro_batches == self.count, (micro_batches, self.count)
        return list(self._parts())

    def most_parts(self, micro_batches: int) -> int:
        return self.count

    def sizes(self, micro_batches: int) -> list[int]:
        return [1] * self.count

    def first(self, count: int) -> Any:
        return self.batch

    def select(self, choices: Sequence[RowChoice], change: PartChange | None = None) -> list[Any]:
        parts, every = list(self._parts()), list(range(self.count))
        assert change is None
        chosen = [list(range(self.count)[each]) if isinstance(each, slice) else sorted(each) for each in choices]
        assert all(each == every or len(each) == 1 for each in chosen), choices
        return [self.batch if each == every else parts[each[0]] for each in chosen]

    def columns(self) -> Iterator[tuple[str, Any]]:
        return iter(())

    def item_counts(self) -> dict[str, list[int]]:
        """Return the counts of every part, of all that each part has."""
        counts = [BatchRows(part).item_counts() for part in self._parts()]
        names = [name for name in counts[0] if all(name in each for each in counts)]
        return {name: [sum(each[name]) for each in counts] for name in names}

    def counted_by(self, micro_batches: Sequence[Any]) -> RowsOfBatch:
        return self

    def compared_by(self, micro_batches: Sequence[Any]) -> RowsOfBatch:
        return self

    def of(self, batch: Batch) -> RowsOfBatch:
        return _halves(batch, self._function)

    def leading(self, size: int) -> int | None:
        return None

    def join(self, outputs: Sequence[Any], divisors: GetDivisors | None = None) -> Any:
        raise NotImplementedError("parts are compared, their outputs are not joined")


def _halves(micro_batch: Any, function: SplitFunction) -> _PartRows:
    return _PartRows(micro_batch, lambda: cut_by(function, micro_batch, 2), 2, function)


def cut_by(function: SplitFunction, batch: Any, count: int) -> list[Any]:
    """Return the `count` parts into which a function cuts a batch, checked."""
    parts = function(batch, count)
    name = _name_of(function)
    if not isinstance(parts, list | tuple):
        raise TypeError(f"split={name} returned a {type(parts).__name__}: return a list of micro-batches")
    if len(parts) != count:
        raise ValueError(
            f"split={name} returned {len(parts)} part(s) for {count} micro-batch(es): return as many as its second argument, or "
            f"use RelayConfig(micro_batches={max(1, len(parts))})"
        )
    if unlike := [part for part in parts if not is_record(part)]:
        raise TypeError(
            f"split={name} returned a {type(unlike[0]).__name__} among its parts: return batches like the one given, a dict of "
            "keyword arguments or a tuple of positional ones"
        )
    return list(parts)


def _name_of(function: SplitFunction) -> str:
    return getattr(function, "__name__", repr(function))


def _rows_in(part: Any) -> int:
    """Count the rows of a micro-batch; 1 if it has no common number."""
    try:
        return BatchRows(part).count
    except ValueError:
        return 1
