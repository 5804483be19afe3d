"""Rows of a batch: counting them and cutting the batch along them.

These have rows:

- tensors and NumPy arrays, along dim 0. If the batch has more rows, one with a single row (such as shared ``position_ids``) is
  given to every micro-batch whole, as are scalars and other values;
- lists and tuples with as many items as the batch has rows: one item per row, for items of any type. That holds even if the
  numbers are equal by chance: put a list that has no rows (an image's height and width) into a tensor with one row, a
  namedtuple, a dict or a ``torch.Size``. If each item consists of tensors with as many rows again, both readings fit, and the
  batch is refused;
- batches of graphs and TensorDicts (`library_batches.py`).

A batch that is itself a list of dicts with the same entries may be samples or arguments, and is refused: samples go in a tuple,
`(samples,)`. Other lists and tuples, mappings, namedtuples and dataclasses are containers; they keep their types.

Tensors and arrays outside of lists define the number of rows; without them, the lists do. If they disagree (the nodes and the
edges of one graph), the batch is one sample and cannot be cut.

`BatchRows` cuts by these rules. `batch_split.py` has the other ones, which a user chooses with ``split=``; all of them are
`RowsOfBatch`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.utils.rnn import PackedSequence

from l2l_core.batches.containers import is_record, map_leaves, open_container, same_leaves, with_items
from l2l_core.batches.library_batches import count_library_rows, graph_columns, select_library_rows
from l2l_core.batches.output_join import GetDivisors, OutputJoin, Placing, first_fitting, place_flattened
from l2l_core.batches.row_count import NoRowsError, count_rows, has_rows, is_one_per_row
from l2l_core.batches.target_counts import ROWS, count_targets
from l2l_core.model import refuse_hidden_tensors

Batch = Mapping[str, Any] | Sequence[Any] | Any  # a dataclass too
RowChoice = slice | list[int]
PartChange = Callable[[str, Any, int], Any]
TensorCut = Callable[
    [str, Any], "list[Any] | None"
]  # (name, value) -> its part for every choice; None: by the rules above


class RowsOfBatch(ABC):
    """Rows of a batch, by some rule: what a batch is cut into, counted by, and joined along."""

    batch: Any
    count: int  # number of rows

    @abstractmethod
    def split(self, micro_batches: int) -> list[Any]:
        """Cut the batch into `micro_batches` parts with `sizes` rows."""

    @abstractmethod
    def most_parts(self, micro_batches: int) -> int:
        """Return `micro_batches`, or the number of rows if there are fewer."""

    @abstractmethod
    def sizes(self, micro_batches: int) -> list[int]:
        """Return the rows of every micro-batch."""

    def first(self, count: int) -> Any:
        """Return the batch with its first `count` rows, or the whole batch if it has fewer or cannot be cut."""
        try:
            return self.batch if count >= self.count else self.select([slice(0, count)])[0]
        except (ValueError, TypeError):
            return self.batch

    @abstractmethod
    def select(self, choices: Sequence[RowChoice], change: PartChange | None = None) -> list[Any]:
        """Return one batch for each choice of rows; `change` replaces parts cut from tensors, rows first."""

    @abstractmethod
    def columns(self) -> Iterator[tuple[str, Any]]:
        """Yield the name and value, rows first, of tensors, arrays and lists with one entry per row."""

    @abstractmethod
    def item_counts(self) -> dict[str, list[int]]:
        """Return the counts of every row of all that a loss may be a mean over: rows, and targets."""

    def counted_by(self, micro_batches: Sequence[Any]) -> RowsOfBatch:
        """Return the rows whose counts weigh these micro-batches: by default these."""
        return self

    def compared_by(self, micro_batches: Sequence[Any]) -> RowsOfBatch:
        """Return rows; a few of them are compared with their parts. By default these."""
        return self

    @abstractmethod
    def of(self, batch: Batch) -> RowsOfBatch:
        """Return the rows of another batch by the same rule."""

    @abstractmethod
    def leading(self, size: int) -> int | None:
        """Return the length of dim 0 of a micro-batch of `size` rows; None if dim 0 does not hold them."""

    @abstractmethod
    def join(self, outputs: Sequence[Any], divisors: GetDivisors | None = None) -> Any:
        """Put the outputs of all micro-batches together, in the order of the batch, with differentiable operations.

        Scalars become their mean, divided by `divisors`, which is called for these alone; without it they are refused.
        """


class BatchRows(RowsOfBatch):
    """The rows of a batch along dim 0.

    Args:
        batch: to be cut.
        output_join: how outputs of micro-batches are put together.

    Raises:
        TypeError: the batch is not a mapping, sequence or dataclass.
        ValueError: the batch is empty.
    """

    def __init__(self, batch: Batch, output_join: OutputJoin = OutputJoin()) -> None:  # noqa: B008 - frozen
        check_record(batch)
        self.batch, self._output_join = batch, output_join
        self._no_rows_error: NoRowsError | None = None  # why it cannot be cut
        try:
            self.count = count_rows(batch)
        except NoRowsError as error:
            self.count, self._no_rows_error = 1, error

    @property
    def has_rows(self) -> bool:
        """Whether the batch can be cut along dim 0."""
        return self._no_rows_error is None

    def split(self, micro_batches: int) -> list[Any]:
        """Cut the batch into `micro_batches` parts with `sizes` rows.

        Raises:
            ValueError: fewer rows than micro-batches, tensors that disagree on the rows, or an ambiguous list.
            TypeError: a value with rows that cannot be cut, or an iterator that the first micro-batch would use up.
        """
        bounds = self._bounds(micro_batches)
        if micro_batches == 1:
            return [copied(self.batch)]  # without the checks for cutting
        return self.select([slice(*each) for each in bounds])

    def most_parts(self, micro_batches: int) -> int:
        """Return `micro_batches`, or the number of rows if there are fewer."""
        return micro_batches if self._no_rows_error is not None else min(micro_batches, self.count)

    def sizes(self, micro_batches: int) -> list[int]:
        """Return the rows of every micro-batch: equal except a smaller last one, or else as equal as possible."""
        return [stop - start for start, stop in self._bounds(micro_batches)]

    def select(self, choices: Sequence[RowChoice], change: PartChange | None = None) -> list[Any]:
        """Return one batch for each choice of rows; raise as `split` does.

        Args:
            choices: the rows of each new batch.
            change: ``(name, part, index of the choice) -> part``: replaces the part cut from a tensor.
        """
        return RowSelection(self.count, choices, change).select(self.batch, "batch", is_root=True)

    def columns(self) -> Iterator[tuple[str, Any]]:
        """Yield the name and value of all tensors, arrays and lists with one entry per row."""
        return _columns(self.batch, self.count, "batch", is_root=True)

    def item_counts(self) -> dict[str, list[int]]:
        """Return the count of every row by candidate: rows, and targets of every column of integers."""
        found = {ROWS: [1] * self.count}
        for name, column in self.columns():
            found |= count_targets(name, column)
        return found

    def of(self, batch: Batch) -> RowsOfBatch:
        """Return the rows of another batch."""
        return BatchRows(batch, self._output_join)

    def leading(self, size: int) -> int | None:
        """Return `size`."""
        return size

    def join(
        self, outputs: Sequence[Any], divisors: GetDivisors | None = None, sizes: Sequence[int] | None = None
    ) -> Any:
        """Concatenate the outputs of micro-batches along dim 0, of `sizes` rows; scalars become their weighted mean."""
        sizes = self.sizes(len(outputs)) if sizes is None else sizes

        def place(where: str, parts: Sequence[torch.Tensor], dim: int | None) -> Placing | None:
            found = first_fitting([Placing(dim or 0, sizes)], parts)
            return place_flattened(parts, sizes) if found is None and dim is None else found

        return self._output_join(outputs, place, divisors)

    def _bounds(self, parts: int) -> list[tuple[int, int]]:
        if self._no_rows_error is not None and parts > 1:
            raise self._no_rows_error
        check_enough_rows(self.count, parts)
        size, more = -(-self.count // parts), self.count % parts
        if size * (parts - 1) < self.count:
            starts = [size * k for k in range(parts)]
        else:  # 5 rows in 4 parts: 2, 1, 1, 1
            starts = [(size - 1) * k + min(k, more) for k in range(parts)]
        return list(zip(starts, [*starts[1:], self.count], strict=True))


def split(batch: Batch, micro_batches: int) -> list[Any]:
    """Cut a batch into micro-batches, at most one per row; see `BatchRows`."""
    rows = BatchRows(batch)
    return rows.split(rows.most_parts(micro_batches))


def num_rows(batch: Batch) -> int:
    """Count the rows (samples) of a batch."""
    return BatchRows(batch).count


def join_batches(batches: Sequence[Any], counts: Sequence[int]) -> Any:
    """Concatenate batches of one structure along their rows, whose numbers are in `counts`."""
    return batches[0] if len(batches) == 1 else _join(batches, counts, "batch", is_root=True)


def _join(values: Sequence[Any], counts: Sequence[int], where: str, is_root: bool = False) -> Any:
    first = values[0]
    if has_rows(first):
        if len(first) != counts[0]:
            return first
        return torch.cat(list(values)) if isinstance(first, torch.Tensor) else np.concatenate(values)
    if is_one_per_row(first, counts[0], where, is_root):
        return with_items(first, [item for value in values for item in value])
    opened = [open_container(value) for value in values]
    if opened[0] is None:
        return first
    columns = zip(*(each.parts for each in opened if each is not None), strict=True)
    names = opened[0].names
    return opened[0].rebuild(
        [_join(list(parts), counts, where + name) for parts, name in zip(columns, names, strict=True)]
    )


def check_record(batch: Any) -> None:
    """Raise TypeError if `batch` is not a mapping, sequence or dataclass."""
    if not is_record(batch):
        raise TypeError(
            f"batch is a {type(batch).__name__}: the relay takes a dict of keyword arguments or a tuple of positional "
            "ones, and with objective= a dataclass; wrap a single tensor as (tensor,)"
        )


def check_enough_rows(rows: int, parts: int, what: str = "row(s)") -> None:
    """Raise ValueError if there are fewer rows than parts."""
    if rows < parts:
        raise ValueError(
            f"the batch has {rows} {what} but micro_batches={parts}: give a larger batch, or use "
            f"RelayConfig(micro_batches={rows})"
        )


def copied(batch: Batch) -> Any:
    """Return the same leaves in new containers."""
    return map_leaves(batch, lambda leaf: leaf)


# -- cutting -----------------------------------------------------------------------------------------------------------


class RowSelection:
    """Implementation of `RowsOfBatch.select`; `cut` precedes the rules above."""

    def __init__(
        self,
        rows: int,
        choices: Sequence[RowChoice],
        change: PartChange | None,
        cut: TensorCut = lambda where, value: None,
    ) -> None:
        self._rows, self._choices, self._change, self._cut = rows, choices, change, cut

    def select(self, value: Any, where: str, is_root: bool = False) -> list[Any]:
        """Return the part of `value` for every choice."""
        if (parts := self._cut(where, value)) is not None:
            return parts
        if has_rows(value):
            return self._select_tensor(value, where)
        if is_one_per_row(value, self._rows, where, is_root):
            return [with_items(value, _items(value, choice)) for choice in self._choices]
        if (count := count_library_rows(value)) is not None:
            return self._select_library_batch(value, count, where)
        opened = open_container(value)
        if opened is None:
            return self._select_leaf(value, where)
        parts = [self.select(part, where + name) for part, name in zip(opened.parts, opened.names, strict=True)]
        # An object in which nothing was cut is shared: programs may rely on its identity.
        if not opened.is_plain and same_leaves([cut[0] for cut in parts], opened.parts):
            return self._replicate(value)
        return [opened.rebuild([part[k] for part in parts]) for k in range(len(self._choices))]

    def _replicate(self, value: Any) -> list[Any]:
        return [value] * len(self._choices)

    def _select_tensor(self, value: Any, where: str) -> list[Any]:
        if len(value) == 1 != self._rows:
            return self._replicate(value)
        if len(value) != self._rows:
            raise ValueError(
                f"tensors of the batch disagree on dim 0, the number of rows: {where} has {tuple(value.shape)}, others "
                f"{self._rows} rows"
            )
        if getattr(value, "is_nested", False):
            raise TypeError(
                f"{where} is a nested tensor, which cannot be cut along rows: use RelayConfig(micro_batches=1), with which "
                "nothing is cut, or pass split=lambda batch, k: ..., a function that returns k micro-batches"
            )
        return [self._changed(_take_rows(value, choice), where, k) for k, choice in enumerate(self._choices)]

    def _select_library_batch(self, value: Any, count: int, where: str) -> list[Any]:
        if count != self._rows:
            if count == 1:
                return self._replicate(value)
            raise ValueError(
                f"parts of the batch disagree on the number of rows: {where} is a {type(value).__name__} of {count}, others have "
                f"{self._rows} rows"
            )
        cut = (select_library_rows(value, where, choice) for choice in self._choices)
        return [self._changed(part, where, k) for k, part in enumerate(cut)]

    def _changed(self, part: Any, where: str, k: int) -> Any:
        """Return the part for choice `k`, with `change` applied to its tensors."""
        if self._change is None:
            return part
        if has_rows(part):
            return self._change(where, part, k)
        opened = open_container(part)
        if opened is None:
            return part
        named = zip(opened.parts, opened.names, strict=True)
        return opened.rebuild([self._changed(each, where + name, k) for each, name in named])

    def _select_leaf(self, value: Any, where: str) -> list[Any]:
        """Repeat a leaf for every choice, or cut it if it is a sequence of rows.

        Raises:
            TypeError: the value has rows or tensors that cannot be cut, or is an iterator.
        """
        if isinstance(value, PackedSequence):
            raise TypeError(
                f"{where} is a PackedSequence, which cannot be cut along rows: pass the padded tensor and the lengths, and pack "
                "them in the model"
            )
        if isinstance(value, Iterator):
            raise TypeError(
                f"{where} is a {type(value).__name__}, which the first micro-batch would use up: pass list(...) of it"
            )
        if _length(value) == self._rows > 1:
            if not isinstance(value, Sequence):
                raise TypeError(
                    f"{where} is a {type(value).__name__} of {self._rows} entries, as many as the batch has rows, but it cannot "
                    "be cut: pass a tensor, an array or a list with one item per row"
                )
            return [value[c] if isinstance(c, slice) else _items(value, c) for c in self._choices]
        if not isinstance(value, torch.Tensor):  # a tensor here has no dimensions
            refuse_hidden_tensors(value, where)
        return self._replicate(value)


def _take_rows(value: Any, choice: RowChoice) -> Any:
    """Return some rows of a tensor or an array; a sparse tensor, which has no slices, keeps its layout."""
    if not isinstance(value, torch.Tensor) or value.layout not in (
        torch.sparse_coo,
        torch.sparse_csr,
        torch.sparse_csc,
    ):
        return value[choice]
    index = torch.arange(len(value), device=value.device)[choice]
    if torch.equal(index, torch.arange(len(value), device=value.device)):
        return value
    taken = value.to_sparse_coo().index_select(0, index)
    return taken if value.layout is torch.sparse_coo else taken.to_sparse(layout=value.layout)


def _items(value: Any, choice: RowChoice) -> list[Any]:
    return list(value)[choice] if isinstance(choice, slice) else [value[i] for i in choice]


def _length(value: Any) -> int | None:
    """Return the number of entries that may be rows; None for text, sets, modules and values without a length."""
    if isinstance(value, torch.Tensor | nn.Module | type | str | bytes | torch.Size | Set) or not hasattr(
        value, "__len__"
    ):
        return None
    try:
        return len(value)
    except TypeError:  # an array without dimensions
        return None


def _columns(value: Any, rows: int, where: str, is_root: bool = False) -> Iterator[tuple[str, Any]]:
    if has_rows(value):
        if len(value) == rows:
            yield where, value
    elif is_one_per_row(value, rows, where, is_root):
        yield where, value
    elif graphs := list(graph_columns(value)):
        yield from ((where + name, column) for name, column in graphs)
    elif (opened := open_container(value)) is not None:
        for part, name in zip(opened.parts, opened.names, strict=True):
            yield from _columns(part, rows, where + name)
