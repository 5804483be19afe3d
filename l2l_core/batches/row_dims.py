"""Rows in other dimensions than the first: ``split=1``, ``split={"x": 1, "lengths": 0, "mask": None}``.

The batch is cut with its rows moved to dim 0, by the rules of `batch.py`, and moved back.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from l2l_core.batches.batch import Batch, BatchRows, PartChange, RowChoice, RowsOfBatch, check_record, copied
from l2l_core.batches.containers import is_sequence, open_container, same_leaves
from l2l_core.batches.output_join import GetDivisors, OutputJoin, Placing, UnknownKeyError, dims_in
from l2l_core.batches.row_count import has_rows


class DimRows(RowsOfBatch):
    """The rows of a batch along given dims of its tensors.

    Args:
        batch: to be cut.
        dims: the dim of all tensors; or dims by key or position, nested as the batch, where a tensor or container with None
            is given to every micro-batch whole, and those left out have their rows along dim 0.
        output_join: how outputs of micro-batches are put together.

    Raises:
        TypeError: the batch is not a mapping, sequence or dataclass, or a dim is no whole number.
        ValueError: a tensor lacks the dim, tensors disagree on the number of rows, or a key is unknown.
    """

    def __init__(self, batch: Batch, dims: Any, output_join: OutputJoin) -> None:
        check_record(batch)
        self.batch, self._given, self._output_join = batch, dims, output_join
        try:
            leaves = list(dims_in(batch, dims, "batch"))
        except UnknownKeyError as error:
            raise UnknownKeyError(
                f"split={dims!r}: {error}. Give keys of the batch, or leave out those along dim 0"
            ) from None
        self._whole = {where for where, _, dim in leaves if dim is None}
        self._dims = {where: dim for where, value, dim in leaves if dim is not None and has_rows(value)}
        lists = tuple(f"{name}[" for name in _lists_in(batch, "batch"))
        self._check_sizes({where: value for where, value, _ in leaves if not where.startswith(lists)})
        count = BatchRows(self._moved(batch, "batch", None, is_root=True)).count
        self._rows = BatchRows(self._moved(batch, "batch", count, is_root=True))
        self.count = self._rows.count

    def split(self, micro_batches: int) -> list[Any]:
        """Cut the batch into `micro_batches` parts."""
        if micro_batches == 1:
            return [copied(self.batch)]
        return [self._restored(part, self.batch, "batch", is_root=True) for part in self._rows.split(micro_batches)]

    def most_parts(self, micro_batches: int) -> int:
        """Return `micro_batches`, or the number of rows if there are fewer."""
        return self._rows.most_parts(micro_batches)

    def sizes(self, micro_batches: int) -> list[int]:
        """Return the rows of every micro-batch."""
        return self._rows.sizes(micro_batches)

    def first(self, count: int) -> Any:
        """Return the batch with its first `count` rows."""
        return self._restored(self._rows.first(count), self.batch, "batch", is_root=True)

    def select(self, choices: Sequence[RowChoice], change: PartChange | None = None) -> list[Any]:
        """Return one batch for each choice of rows."""
        parts = self._rows.select(choices, change)
        return [self._restored(part, self.batch, "batch", is_root=True) for part in parts]

    def columns(self) -> Iterator[tuple[str, Any]]:
        """Yield the name and value, rows first, of all tensors, arrays and lists with one entry per row."""
        return self._rows.columns()

    def item_counts(self) -> dict[str, list[int]]:
        """Return the count of every row by candidate."""
        return self._rows.item_counts()

    def of(self, batch: Batch) -> RowsOfBatch:
        """Return the rows of another batch along the same dims."""
        return DimRows(batch, self._given, self._output_join)

    def leading(self, size: int) -> int | None:
        """Return `size` if all tensors have their rows along dim 0."""
        return size if {*self._dims.values()} <= {0} else None

    def join(self, outputs: Sequence[Any], divisors: GetDivisors | None = None) -> Any:
        """Concatenate outputs along the only dim of the batch's dims that has the sizes of the micro-batches.

        Raises:
            ValueError: several dims have these sizes.
        """
        sizes = self.sizes(len(outputs))

        def place(where: str, parts: Sequence[torch.Tensor], dim: int | None) -> Placing | None:
            dims = {*self._dims.values(), 0} if dim is None else {dim}
            fitting = {each.dim % parts[0].ndim: each for each in (Placing(d, sizes) for d in dims) if each.fits(parts)}
            if len(fitting) > 1:
                raise ValueError(
                    f"{where} of micro-batches has the shapes {[tuple(part.shape) for part in parts]}, whose dims "
                    f"{' and '.join(map(str, sorted(fitting)))} may both hold the rows: pass join= to the relay, the dim of the "
                    f"outputs' rows or dims by key, as join={max(fitting)}"
                )
            return next(iter(fitting.values()), None)

        return self._output_join(outputs, place, divisors)

    def _check_dim(self, where: str, value: Any) -> None:
        dim = self._dims[where]
        if not -value.ndim <= dim < value.ndim:
            raise ValueError(
                f"split={self._given!r}: {where} of shape {tuple(value.shape)} has no dim {dim}. Give dims by key, as "
                "split={'x': 1, 'lengths': 0}, with None for a tensor that all micro-batches share"
            )

    def _check_sizes(self, values: dict[str, Any]) -> None:
        """Raise ValueError if tensors outside of lists lack the dim or disagree on the number of rows."""
        for where in self._dims.keys() & values.keys():
            self._check_dim(where, values[where])
        sizes = {where: values[where].shape[dim] for where, dim in self._dims.items() if where in values}
        if len({*sizes.values()} - {1}) > 1:
            listed = ", ".join(f"{where} {size} in dim {self._dims[where]}" for where, size in sizes.items())
            raise ValueError(
                f"split={self._given!r}: tensors of the batch disagree on the number of rows: {listed}. Give each its dim by "
                "key, or None for a tensor that all micro-batches share"
            )

    def _moved(self, value: Any, where: str, rows: int | None, is_root: bool = False) -> Any:
        """Return a part of the batch with its rows along dim 0, without what is given to all micro-batches whole.

        A list with as many items as `rows` has one item per row; None: any list.
        """
        if where in self._whole:
            return None
        if where in self._dims:
            self._check_dim(where, value)
            return _move(value, self._dims[where], 0)
        if is_sequence(value) and not is_root and (rows is None or len(value) == rows > 1):
            return value
        if (opened := open_container(value)) is None:
            return value
        parts = [self._moved(part, where + name, rows) for part, name in zip(opened.parts, opened.names, strict=True)]
        return opened.rebuild(parts)

    def _restored(self, part: Any, value: Any, where: str, is_root: bool = False) -> Any:
        """Return a part of the moved batch with the dims of `value`, the same part of the whole batch."""
        if where in self._whole:
            return value
        if where in self._dims:
            return _move(part, 0, self._dims[where])
        if is_sequence(value) and not is_root and len(value) == self.count > 1:
            return part
        if (opened := open_container(part)) is None:
            return part
        whole = open_container(value)
        assert whole is not None, where
        pairs = zip(opened.parts, whole.parts, whole.names, strict=True)
        parts = [self._restored(each, old, where + name) for each, old, name in pairs]
        # An object in which nothing was cut is shared: programs may rely on its identity.
        return value if not opened.is_plain and same_leaves(parts, whole.parts) else opened.rebuild(parts)


def _move(value: Any, source: int, target: int) -> Any:
    if source == target:
        return value
    if isinstance(value, torch.Tensor):
        return value.movedim(source, target)
    import numpy as np

    return np.moveaxis(value, source, target)


def _lists_in(value: Any, where: str, is_root: bool = True) -> Iterator[str]:
    """Yield the names of the outermost lists in a batch, whose items may be rows."""
    if is_sequence(value) and not is_root:
        yield where
    elif (opened := open_container(value)) is not None:
        for part, name in zip(opened.parts, opened.names, strict=True):
            yield from _lists_in(part, where + name, is_root=False)
