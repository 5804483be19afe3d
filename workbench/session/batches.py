"""Where batches come from: an iterable, which begins again when it ends, or a function that makes one."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import is_dataclass
from typing import Any, Literal

import numpy
import torch

from l2l_core.batches import Batch, map_leaves

BatchSource = Iterable[Batch] | Callable[[], Batch]
SourceKind = Literal["iterable", "iterator", "function"]


class Batches:
    """Batches one by one, and the one that was not used yet again.

    A `DataLoader`, a list or any other iterable begins anew when it ends, epoch after epoch. An iterator or generator
    ends for good. A function is called for every batch.

    Raises:
        TypeError: the source is none of these, or is a batch itself.
    """

    def __init__(self, source: BatchSource) -> None:
        # These are iterable too, and their keys or rows would be trained on as batches.
        is_batch = isinstance(source, Mapping | torch.Tensor) or is_dataclass(source) or hasattr(source, "_fields")
        if is_batch or not (callable(source) or isinstance(source, Iterable)):
            raise TypeError(
                f"batches is a {type(source).__name__}: give an iterable of batches (a DataLoader, a list) or a function "
                "that returns one; for the same batch in every step, [batch]"
            )
        self._source = source
        self._iterator: Iterator[Any] = iter(()) if callable(source) else iter(source)
        self._pending: list[Any] = []  # the batch that was taken and not used
        self._tried = False  # whether a step has begun on it

    def next_batch(self) -> Any:
        """Return the next batch, or again the last one if it was not used.

        Raises:
            StopIteration: there are no more.
        """
        if not self._pending:
            self._pending.append(self._draw())
        return self._pending[0]

    @property
    def pending(self) -> Sequence[Any]:
        """The batch that was taken and not used, if there is one."""
        return tuple(self._pending)

    def mark_used(self) -> None:
        """Be done with the batch that was taken: the next `take` gives another."""
        self._pending.clear()
        self._tried = False

    def mark_tried(self) -> None:
        """Note that a step begins on the batch that was taken; unless the batch is used afterwards, the step has failed."""
        self._tried = True

    def skip_failed(self) -> bool:
        """Be done with a batch that a step has failed on, if there is one; one that was only looked at is still to come."""
        if tried := self._tried:
            self.mark_used()
        return tried

    @property
    def kind(self) -> SourceKind:
        """What the source is: it begins again when it ends, or ends, or is called for each batch."""
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
        for batch in self._iterator:  # not `next`: its StopIteration would say that the batches have ended
            return batch
        raise ValueError(
            "batches holds no batch, so there is nothing to train on: give a source that is not empty; a DataLoader with "
            "drop_last=True is, if its dataset is smaller than a batch"
        )


def copy_batch(batch: Batch) -> Batch:
    """Copy a batch, with its tensors and arrays: its source may fill the old ones again."""
    return map_leaves(batch, _copy_leaf)


def _copy_leaf(leaf: Any) -> Any:
    if isinstance(leaf, torch.Tensor):
        return leaf.detach().clone()
    return leaf.copy() if isinstance(leaf, numpy.ndarray) else leaf
