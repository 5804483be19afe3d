"""Batches that a function of the user cuts into micro-batches: ``split=function`` of a relay."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from l2l_core.batches.batch import Batch, BatchRows, PartChange, RowChoice, RowsOfBatch, check_record
from l2l_core.batches.containers import is_record, named_leaves
from l2l_core.batches.output_join import GetDivisors, OutputJoin, Placing, first_fitting
from l2l_core.batches.target_counts import ROWS

SplitFunction = Callable[[Any, int], Sequence[Any]]


class FunctionRows(RowsOfBatch):
    """A batch that a function cuts; its rows are those of the micro-batches by the rules of `batch.py`.

    Before it is cut, `count` is that of the whole batch by these rules.

    Raises:
        TypeError: the batch is not a mapping, sequence or dataclass.
    """

    def __init__(self, batch: Batch, function: SplitFunction, output_join: OutputJoin) -> None:
        check_record(batch)
        self.batch, self._function, self._output_join = batch, function, output_join
        self.count = _rows_in(batch)
        self._parts: list[Any] | None = None  # of the last cut

    def split(self, micro_batches: int) -> list[Any]:
        """Call the function.

        Raises:
            TypeError: it returns no list, or something that is no batch.
            ValueError: it returns another number of parts.
        """
        self._parts = cut_by(self._function, self.batch, micro_batches)
        self.count = sum(map(_rows_in, self._parts))
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


class _PartRows(RowsOfBatch):
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
        """Return the counts of every part, of all that each part has; without common rows, those of each tensor, too."""
        counts = [BatchRows(part).item_counts() | _lengths_without_rows(part) for part in self._parts()]
        names = [name for name in counts[0] if all(name in each for each in counts)]
        return {name: [sum(each[name]) for each in counts] for name in names}

    def of(self, batch: Batch) -> RowsOfBatch:
        return _halves(batch, self._function)

    def leading(self, size: int) -> int | None:
        return None

    def join(self, outputs: Sequence[Any], divisors: GetDivisors | None = None) -> Any:
        raise AssertionError("parts are compared, their outputs are not joined")


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


def _lengths_without_rows(part: Any) -> dict[str, list[int]]:
    """Return the length of each tensor of a part whose tensors have no common rows, such as tokens and offsets."""
    if BatchRows(part).has_rows:
        return {}
    tensors = ((name, leaf) for name, leaf in named_leaves(part) if isinstance(leaf, torch.Tensor))
    return {f"{ROWS} of {name}": [len(tensor)] for name, tensor in tensors if tensor.ndim}


def _rows_in(part: Any) -> int:
    """Count the rows of a micro-batch; 1 if it has no common number."""
    try:
        return BatchRows(part).count
    except ValueError:
        return 1
