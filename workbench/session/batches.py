"""Sources of training batches: an iterable, which restarts when it ends, an iterator, or a function."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from copy import copy
from dataclasses import is_dataclass
from typing import Any

import numpy
import torch

from l2l_core.batches import Batch, map_leaves, map_tensors
from l2l_core.inside import find_tokens
from workbench.session.batch_position import BatchPosition, fingerprint, has_state
from workbench.session.batch_position import SourceKind as SourceKind
from workbench.session.random_states import RandomStates, generators_of

BatchSource = Iterable[Batch] | Callable[[], Batch]


class Batches:
    """Iterator over a source of batches that returns a batch again until it is marked as used.

    A `DataLoader`, a list or any other iterable restarts when it ends, epoch after epoch. An iterator or generator ends
    for good. A function is called for every batch.

    Args:
        source: any of these.
        tracks: record the position in the source, for `position`.

    Attributes:
        why_blocked: why no batch may be taken; "" if one may.
        epoch: epoch of the batch returned last; None if the source has none: an iterator, a function, or a single batch.

    Raises:
        TypeError: the source is none of these, or is a single batch.
    """

    def __init__(self, source: BatchSource, tracks: bool = False) -> None:
        # Single batches are iterable too, and their keys or rows would be trained on as batches.
        is_batch = isinstance(source, Mapping | torch.Tensor) or is_dataclass(source) or hasattr(source, "_fields")
        if is_batch or not (callable(source) or isinstance(source, Iterable)):
            raise TypeError(
                f"batches is a {type(source).__name__}: give an iterable of batches (a DataLoader, a list) or a function "
                "that returns one; for the same batch in every step, [batch]"
            )
        self._source = source
        self.why_blocked = ""
        self._generators = generators_of(source) if tracks else []
        self._position = BatchPosition(self.kind) if tracks else None
        self._iterator = self._iterate()
        self._pending: list[tuple[Any, int]] = []  # batches that were taken and not used, with their epochs
        self._pass = 1  # number of the iterator, from 1
        self._has_epochs = self.kind == "iterable" and _length(source) != 1
        self.epoch: int | None = None
        self._tried = False  # whether a step has begun on it

    def next_batch(self) -> Any:
        """Return the pending batch, or else the next one of the source.

        Raises:
            StopIteration: the source has ended.
            ValueError: no batch may be taken.
        """
        if self.why_blocked:
            raise ValueError(self.why_blocked)
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
            return self._take(self._source)
        try:
            return self._take(lambda: next(self._iterator))
        except StopIteration:
            if self._source is self._iterator:
                raise  # an iterator has ended for good
            self._iterator, self._pass = self._iterate(), self._pass + 1
        try:
            return self._take(lambda: next(self._iterator))
        except StopIteration:  # would end the run without an error
            raise ValueError(
                "batches holds no batch, so there is nothing to train on: give a source with at least one batch; a DataLoader "
                "with drop_last=True is empty if its dataset is smaller than a batch"
            ) from None

    def _iterate(self) -> Iterator[Any]:
        """Iterate the source from its beginning; an iterator continues."""
        if callable(self._source):
            return iter(())
        if self._position is not None:
            self._position.begin(RandomStates.capture(self._generators))
        return iter(self._source)

    def _take(self, draw: Callable[[], Any]) -> Any:
        """Take a batch by `draw`, and record it."""
        if self._position is None:
            return draw()
        states = RandomStates.capture(self._generators)
        batch = draw()
        self._position.add(states, batch)
        return batch

    # -- the position --------------------------------------------------------------------------------------------------

    @property
    def can_save(self) -> bool:
        """False while a batch is not used that the `state_dict` of its source counts as taken, or several are not."""
        return len(self._pending) < 2 and not (self._pending and has_state(self._source))

    def position(self) -> BatchPosition:
        """Return a copy of the position, from which `resume` continues in a new process."""
        assert self._position is not None, "made without `tracks`"
        position = copy(self._position)
        position.is_pending = bool(self._pending)
        if has_state(self._source):
            source: Any = self._source
            position = BatchPosition(self.kind, state=source.state_dict())
        position.epoch = self._pass
        return position

    def resume(self, position: BatchPosition) -> None:
        """Continue from the position in an equal source: from its state, or by taking as many batches again.

        The random states are afterwards those before the last batch, and are to be restored.

        Raises:
            ValueError: the source has another kind, has ended, or its batches have another order.
        """
        source: Any = self._source
        if position.kind != self.kind or (position.state is not None) != has_state(source):
            raise ValueError(
                f"batches were an {position.kind}{' with a state_dict' * (position.state is not None)} when the session was "
                f"saved, and are a {type(source).__name__} here: give batches as they were then"
            )
        if position.state is not None:
            source.load_state_dict(position.state)
            self._iterator, self._pass = self._iterate(), position.epoch
            return
        if self.kind != "iterable" and self._position is not None and self._position.count:
            raise ValueError(
                f"{self._position.count} batches were taken from the {self.kind} already: make it again, and the workbench"
            )
        try:
            self._fast_forward(position)
        except BaseException:
            self._iterator = self._iterate()
            raise
        self._position, self._pass = copy(position), position.epoch

    def _fast_forward(self, position: BatchPosition) -> None:
        """Take as many batches as were taken, and compare the last one."""
        source: Any = self._source
        if self.kind == "iterable":
            self.restore_random(position.begun)
            self._iterator = iter(source)
        draw = source if callable(source) else lambda: next(self._iterator)
        batch: Any = None
        for number in range(1, position.count + 1):
            if number in (1, position.count):
                self.restore_random(position.first if number < position.count else position.last)
            try:
                batch = draw()
            except StopIteration:
                raise ValueError(_ORDER_MESSAGE.format(what=f"end after {number - 1} of {position.count}")) from None
        if position.count and fingerprint(batch) != position.fingerprint:
            raise ValueError(_ORDER_MESSAGE.format(what=f"differ: number {position.count} is another one"))
        self._pending = [(batch, position.epoch)] if position.is_pending else []

    def restore_random(self, states: RandomStates | None) -> None:
        """Restore states from `random_states`."""
        assert states is not None
        if len(states.others) != len(self._generators):
            raise ValueError(
                f"batches have {len(self._generators)} random generators and had {len(states.others)} when the session was "
                "saved: make them as they were then"
            )
        states.restore(self._generators)

    def random_states(self) -> RandomStates:
        """Return the present states of all generators that the batches may draw from."""
        return RandomStates.capture(self._generators)


_ORDER_MESSAGE = (
    "the batches cannot be fast-forwarded to where the session was saved, since they {what}. Give the same data in an order "
    "that a new process repeats: a DataLoader with generator=torch.Generator().manual_seed(0), or one with state_dict and "
    "load_state_dict, such as torchdata's StatefulDataLoader"
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
