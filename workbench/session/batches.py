"""Sources of training batches: an iterable, which restarts when it ends, an iterator, or a function."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import is_dataclass
from typing import Any, Literal

import numpy
import torch

from l2l_core.batches import Batch, map_leaves, map_tensors
from l2l_core.inside import find_tokens

BatchSource = Iterable[Batch] | Callable[[], Batch]
SourceKind = Literal["iterable", "iterator", "function"]


class Batches:
    """Iterator over a source of batches that returns a batch again until it is marked as used.

    A `DataLoader`, a list or any other iterable restarts when it ends, epoch after epoch. An iterator or generator ends
    for good. A function is called for every batch.

    Raises:
        TypeError: the source is none of these, or is a single batch.
    """

    def __init__(self, source: BatchSource) -> None:
        # Single batches are iterable too, and their keys or rows would be trained on as batches.
        is_batch = isinstance(source, Mapping | torch.Tensor) or is_dataclass(source) or hasattr(source, "_fields")
        if is_batch or not (callable(source) or isinstance(source, Iterable)):
            raise TypeError(
                f"batches is a {type(source).__name__}: give an iterable of batches (a DataLoader, a list) or a function "
                "that returns one; for the same batch in every step, [batch]"
            )
        self._source = source
        self._iterator: Iterator[Any] = iter(()) if callable(source) else iter(source)
        self._pending: list[Any] = []  # at most one batch: taken and not used
        self._tried = False  # whether a step has begun on it

    def next_batch(self) -> Any:
        """Return the pending batch, or else the next one of the source.

        Raises:
            StopIteration: the source has ended.
        """
        if not self._pending:
            self._pending.append(self._draw())
        return self._pending[0]

    @property
    def pending(self) -> Sequence[Any]:
        """The batch that was taken and not used; empty if there is none."""
        return tuple(self._pending)

    def mark_used(self) -> None:
        """Drop the pending batch: the next call of `next_batch` takes another one."""
        self._pending.clear()
        self._tried = False

    def mark_tried(self) -> None:
        """Record that a step begins on the pending batch; unless the batch is used afterwards, the step has failed."""
        self._tried = True

    def skip_failed(self) -> bool:
        """Drop the pending batch if a step has failed on it, and return whether one had; an untried batch stays."""
        if tried := self._tried:
            self.mark_used()
        return tried

    @property
    def kind(self) -> SourceKind:
        """Kind of the source."""
        if callable(self._source):
            return "function"
        return "iterator" if isinstance(self._source, Iterator) else "iterable"

    def _draw(self) -> Any:
        if callable(self._source):
            return self._source()
        try:
            return next(self._iterator)
        except StopIteration:
            self._iterator = iter(self._source)
            if self._iterator is self._source:
                raise  # an iterator has ended for good
        for batch in self._iterator:  # not `next`: its StopIteration would end the run without an error
            return batch
        raise ValueError(
            "batches holds no batch, so there is nothing to train on: give a source that is not empty; a DataLoader with "
            "drop_last=True is empty if its dataset is smaller than a batch"
        )


def copy_batch(batch: Batch) -> Batch:
    """Copy a batch with its tensors and arrays, since the source may refill them."""
    return map_leaves(batch, _copy_leaf)


def _copy_leaf(leaf: Any) -> Any:
    if isinstance(leaf, torch.Tensor):
        return leaf.detach().clone()
    return leaf.copy() if isinstance(leaf, numpy.ndarray) else leaf


def with_own_tokens(batch: Batch, tokens: Sequence[int]) -> Batch:
    """Return a batch with these tokens in every row; of more tokens than a row has positions, the last ones.

    Other tensors with a value per position, such as labels, are cut to the same length, and a padding mask is all ones.

    Raises:
        ValueError: the batch has no tokens, or there are none to take their place.
    """
    old = find_tokens(batch)
    if old is None:
        raise ValueError(
            "text=...: the batch has no tokens, neither input_ids nor another tensor of integers of shape (rows, positions), "
            "so a text has no place in it: leave text out"
        )
    own = old.new_tensor(list(tokens)[-old.shape[1] :])
    if not len(own):
        raise ValueError("text='' has no tokens: give at least one character")
    mask = batch.get("attention_mask") if isinstance(batch, Mapping) else None

    def change(tensor: torch.Tensor) -> torch.Tensor:
        if tensor is old:
            return own.expand(len(old), -1).clone()
        if tensor.shape[:2] != old.shape:
            return tensor
        return torch.ones_like(tensor[:, : len(own)]) if tensor is mask else tensor[:, : len(own)]

    return map_tensors(batch, change)
