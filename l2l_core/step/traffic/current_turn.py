"""Who is at work: micro-batches take turns on one thread, and what is made or read belongs to the one whose turn it is."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager

import torch

from l2l_core.model import storage_keys
from l2l_core.step.graph import unguarded

NO_MICRO_BATCH = -1


class _ActivatedTurn(AbstractContextManager[None]):
    """A block of `AtWork.turn`; several at every turn, and a generator would take twice as long."""

    def __init__(self, current_turn: CurrentTurn, now: tuple[int, str, set[int] | None]) -> None:
        self._current_turn, self._values = current_turn, now

    def __enter__(self) -> None:
        work = self._current_turn
        self._before = work.k, work.owner, work.layer_inputs
        work.k, work.owner, work.layer_inputs = self._values

    def __exit__(self, *exc: object) -> None:
        work = self._current_turn
        work.k, work.owner, work.layer_inputs = self._before


class CurrentTurn:
    """The micro-batch at work, and in what.

    Attributes:
        k: the micro-batch, or NOBODY.
        owner: the key of the layer, or "shell".
        layer_inputs: storages that the layer at work was given; None while shell code runs.
        in_forward: whether the model's own code reads, and not backward.
        in_compiled_part: whether a compiled part runs, to which everything was brought.
    """

    def __init__(self) -> None:
        self.k = NO_MICRO_BATCH
        self.owner = ""
        self.layer_inputs: set[int] | None = None
        self.in_forward = True
        self.in_compiled_region = False

    @property
    def in_shell(self) -> bool:
        """Whether shell code runs, or nobody does."""
        return self.layer_inputs is None

    @property
    def reader(self) -> str:
        """Who it is, in words for a message."""
        return "the model's own code" if self.in_shell else f"layer {self.owner}"

    def activate(
        self, k: int, owner: str, inputs: Iterable[torch.Tensor] | None = None
    ) -> AbstractContextManager[None]:
        """Micro-batch `k` is at work in the block, in `owner`; `inputs` are given while a layer runs."""
        with unguarded():
            given = None if inputs is None else set(storage_keys(inputs))
        return _ActivatedTurn(self, (k, owner, given))

    @contextmanager
    def enter_backward(self) -> Iterator[None]:
        """What is read in the block is not read by the model's own code."""
        before, self.in_forward = self.in_forward, False
        try:
            yield
        finally:
            self.in_forward = before

    @contextmanager
    def enter_compiled_region(self) -> Iterator[None]:
        """A compiled part runs in the block; what it reads has been brought."""
        before, self.in_compiled_region = self.in_compiled_region, True
        try:
            yield
        finally:
            self.in_compiled_region = before
