"""Sources of training batches: an iterable, which restarts when it ends, an iterator, or a function."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import is_dataclass
from typing import Any, Literal

import numpy
import torch

from l2l_core.batches import Batch, map_leaves

BatchSource = Iterable[Batch] | Callable[[], Batch]
SourceKind = Literal["iterable", "iterator", "function"]


class Batches:
    """Iterator over a source of batches that returns a batch again until it is marked as used.

    A `DataLoader`, a list or any other iterable restarts when it ends, epoch after epoch. An iterator or generator ends
    for good. A function is called for every batch.

    Attributes:
        epoch: epoch of the batch returned last; None if the source has none: an iterator, a function, or a single batch.

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
        self._pending: list[tuple[Any, int]] = []  # batches that were taken and not used, with their epochs
        self._pass = 1  # number of the iterator, from 1
        self._has_epochs = self.kind == "iterable" and _length(source) != 1
        self.epoch: int | None = None
        self._tried = False  # whether a step has begun on it

    def next_batch(self) -> Any:
        """Return the pending batch, or else the next one of the source.

        Raises:
            StopIteration: the source has ended.
        """
        if not self._pending:
            self._pending.append((self._draw(), self._pass))
        batch, epoch = self._pending[0]
        self.epoch = epoch if self._has_epochs else None
        return batch

    def peek(self, count: int) -> Sequence[Any]:
        """Return the next batches, fewer if the source ends; they remain to be used, so they must not be changed."""
        with suppress(StopIteration):
            while len(self._pending) < count:
                # Copies: the source may fill the same tensors again for the next batch.
                self._pending[-1:] = [(copy_batch(batch), epoch) for batch, epoch in self._pending[-1:]]
                self._pending.append((self._draw(), self._pass))
        return [batch for batch, _ in self._pending[:count]]

    def steps_of(self, epochs: int) -> int:
        """Return the number of steps of passes over the source.

        Raises:
            ValueError: `epochs` is not a positive integer, or the source has no length.
        """
        if not isinstance(epochs, int) or isinstance(epochs, bool) or epochs < 1:
            raise ValueError(f"epochs={epochs!r}: must be a positive integer")
        length = _length(self._source) if self.kind == "iterable" else None
        if not length:
            raise ValueError(
                f"epochs={epochs}: the batches have no length, so the end of a pass is not known; give run(steps=...), or a "
                "DataLoader or a list as batches"
            )
        return epochs * length

    @property
    def pending(self) -> Sequence[Any]:
        """The next batch, if it was taken and not used; else empty."""
        return tuple(batch for batch, _ in self._pending[:1])

    def mark_used(self) -> None:
        """Drop the pending batch: the next call of `next_batch` takes another one."""
        self._pending[:1] = []
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
            self._iterator, self._pass = iter(self._source), self._pass + 1
            if self._iterator is self._source:
                raise  # an iterator has ended for good
        for batch in self._iterator:  # not `next`: its StopIteration would end the run without an error
            return batch
        raise ValueError(
            "batches holds no batch, so there is nothing to train on: give a source that is not empty; a DataLoader with "
            "drop_last=True is empty if its dataset is smaller than a batch"
        )


def _length(source: Any) -> int | None:
    try:
        return len(source)
    except TypeError:  # of an iterable data set, too
        return None


def copy_batch(batch: Batch) -> Batch:
    """Copy a batch with its tensors and arrays, since the source may refill them."""
    return map_leaves(batch, _copy_leaf)


def _copy_leaf(leaf: Any) -> Any:
    if isinstance(leaf, torch.Tensor):
        return leaf.detach().clone()
    return leaf.copy() if isinstance(leaf, numpy.ndarray) else leaf
