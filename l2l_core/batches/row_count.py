"""Count the rows of a batch, by the rules in `batch.py`."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from l2l_core.batches.containers import is_sequence, leaves_in, open_container
from l2l_core.batches.library_batches import count_library_rows, is_uncut_graph


class AmbiguousRowsError(ValueError):
    """A list may hold one item per row, or be a container of tensors with rows."""


class NoRowsError(ValueError):
    """The tensors of a batch have no common number of rows, such as the nodes and edges of one graph."""


def count_rows(batch: Any) -> int:
    """Count the rows of a batch.

    Raises:
        NoRowsError: its tensors disagree, or it has a graph, which is one sample.
        ValueError: it is empty, or its lists have two readings with different numbers of rows.
    """
    _refuse_list_of_samples(batch)
    outside: list[int] = []
    lists: list[Any] = []
    _collect_rows(batch, outside, lists, is_root=True)
    rows = _common_size(outside)
    if 0 in outside or (rows is None and outside):
        raise _disagreement(batch, outside)
    # Tensors outside of lists decide; a single row may be shared by all rows, and then the lists decide.
    if rows is not None and (rows > 1 or not lists):
        return rows
    inside = _sizes_in(lists)
    if rows == 1 and not inside:
        return 1
    lengths = {len(each) for each in lists}
    by_list = lengths.pop() if len(lengths) == 1 else None
    if rows == 1 and by_list == 1:
        return 1
    # A list of records has one record per row, for any sizes of their tensors.
    by_tensor = None if any(_holds_records(each) for each in lists) else _common_size([*outside, *inside])
    if by_list and by_tensor and by_list != by_tensor:
        raise AmbiguousRowsError(
            f"the batch has {by_list} row(s) if its lists have one item per row, and {by_tensor} if they are containers: "
            f"{_describe(batch)}. Stack lists with one item per row into tensors, or put containers into a dict or namedtuple"
        )
    if not (found := by_tensor or by_list):
        raise _disagreement(batch, inside)
    return found


def _refuse_list_of_samples(batch: Any) -> None:
    """Raise AmbiguousRowsError for a list of several dicts, or other records, with the same entries.

    They may be samples, as a DataLoader with `collate_fn=list` gives them, or arguments of the model with rows each.
    """
    if not isinstance(batch, list) or len(batch) < 2:
        return
    opened = [None if is_sequence(item) else open_container(item) for item in batch]
    forms = [None if each is None else (type(item), each.names) for item, each in zip(batch, opened, strict=True)]
    if forms[0] is not None and all(form == forms[0] for form in forms) and _sizes_in(batch[0]):
        count, kind = len(batch), type(batch[0]).__name__
        raise AmbiguousRowsError(
            f"the batch is a list of {count} {kind}s with the same entries: {count} samples, or {count} arguments of the model, "
            "which have rows? Pass samples in a tuple, (samples,), or in a dict, {'samples': samples}: then each is a "
            "row, and the model or the objective gets a list of some of them; pass arguments as a tuple, tuple(batch)"
        )


def _collect_rows(value: Any, outside: list[int], lists: list[Any], is_root: bool = False) -> None:
    """Collect the rows of tensors and library batches outside of lists in `outside`, and the outermost lists in `lists`."""
    if is_sequence(value) and not is_root:
        lists.append(value)
    elif (count := count_library_rows(value)) is not None:
        outside.append(count)
    elif is_uncut_graph(value):
        raise NoRowsError(
            f"the batch has a {type(value).__name__}, which is one sample and cannot be cut: use RelayConfig(micro_batches=1), "
            "or make a batch of several graphs with Batch.from_data_list, which is cut between graphs"
        )
    elif (opened := open_container(value)) is not None:
        for part in opened.parts:
            _collect_rows(part, outside, lists)
    elif has_rows(value):
        if isinstance(value, torch.Tensor) and value.is_nested and value.layout is torch.strided:
            raise TypeError(
                "the batch has a nested tensor with layout=torch.strided, whose shape and parts PyTorch does not give: make it "
                "with layout=torch.jagged"
            )
        outside.append(len(value))


def _sizes_in(value: Any) -> list[int]:
    return [len(leaf) for leaf in leaves_in(value) if has_rows(leaf)]


def _holds_records(value: Sequence[Any]) -> bool:
    """Return whether a list has records as items: then it has one per row, because columns are not records."""
    return any(open_container(item) is not None and not is_sequence(item) for item in value)


def _common_size(sizes: Sequence[int]) -> int | None:
    """Return the common size, where some sizes may be 1; None if there is none."""
    several = {*sizes} - {1}
    return (several.pop() if several else 1) if sizes and len(several) < 2 else None


def has_rows(value: Any) -> bool:
    """Return whether `value` is a tensor or an array with at least one dimension."""
    numpy = sys.modules.get("numpy")
    return isinstance(value, torch.Tensor if numpy is None else (torch.Tensor, numpy.ndarray)) and value.ndim > 0


def _disagreement(batch: Any, sizes: Sequence[int]) -> ValueError:
    if not sizes or {*sizes} == {0}:
        return ValueError(f"the batch is empty: no tensor with at least one row in {_describe(batch)}")
    return NoRowsError(
        f"tensors of the batch disagree on dim 0, the number of rows: {_describe(batch)}. Give tensors without rows a first "
        "dimension of 1, or None by key in split= of the relay (with loss_over='batch' the loss gets them whole); or use "
        "RelayConfig(micro_batches=1), with which nothing is cut"
    )


def _describe(batch: Any) -> str:
    opened = open_container(batch)
    assert opened is not None
    if not isinstance(batch, Mapping) or len(batch) != len(opened.parts):
        items = [(name.strip(".[]"), part) for name, part in zip(opened.names, opened.parts, strict=True)]
    else:
        items = list(batch.items())
    return "{" + ", ".join(f"{name}: {_shown(value)}" for name, value in items) + "}"


def _shown(value: Any) -> str:
    if has_rows(value):
        return str(tuple(value.shape))
    count = len(value) if is_sequence(value) else count_library_rows(value)
    return type(value).__name__ if count is None else f"{type(value).__name__} of {count}"


def is_one_per_row(value: Any, rows: int, where: str, is_root: bool) -> bool:
    """Return whether `value` is a list with one item per row.

    Raises:
        AmbiguousRowsError: its items may as well be columns.
    """
    if is_root or rows == 1 or not is_sequence(value) or len(value) != rows:
        return False
    found = [_sizes_in(item) for item in value]
    if not _holds_records(value) and all(sizes and {*sizes} == {rows} for sizes in found):
        raise AmbiguousRowsError(
            f"{where} is a {type(value).__name__} of {rows} items, as many as the batch has rows, and each holds tensors with "
            f"{rows} rows, so that the items may be rows or columns. Stack rows into one tensor, or put columns into a dict, a "
            "namedtuple or a dataclass"
        )
    return True
