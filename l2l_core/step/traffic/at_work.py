"""Who is at work: micro-batches take turns on one thread, and what is made or read belongs to the one whose turn it is."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch

from l2l_core.step.graph import unasked

NOBODY = -1


class AtWork:
    """The micro-batch at work, and in what.

    Attributes:
        k: the micro-batch, or NOBODY.
        owner: the key of the layer, or "shell".
        layer_inputs: storages that the layer at work was given; None while shell code runs.
        in_forward: whether the model's own code reads, and not backward.
        in_compiled_part: whether a compiled part runs, to which everything was brought.
    """

    def __init__(self) -> None:
        self.k = NOBODY
        self.owner = ""
        self.layer_inputs: set[int] | None = None
        self.in_forward = True
        self.in_compiled_part = False

    @property
    def in_shell(self) -> bool:
        """Whether shell code runs, or nobody does."""
        return self.layer_inputs is None

    @property
    def reader(self) -> str:
        """Who it is, in words for a message."""
        return "the model's own code" if self.in_shell else f"layer {self.owner}"

    @contextmanager
    def turn(self, k: int, owner: str, inputs: Iterable[torch.Tensor] | None = None) -> Iterator[None]:
        """Micro-batch `k` is at work in the block, in `owner`; `inputs` are given while a layer runs."""
        before = self.k, self.owner, self.layer_inputs
        self.k, self.owner = k, owner
        with unasked():
            self.layer_inputs = None if inputs is None else {t.untyped_storage()._cdata for t in inputs}
        try:
            yield
        finally:
            self.k, self.owner, self.layer_inputs = before

    @contextmanager
    def backward(self) -> Iterator[None]:
        """What is read in the block is not read by the model's own code."""
        before, self.in_forward = self.in_forward, False
        try:
            yield
        finally:
            self.in_forward = before

    @contextmanager
    def compiled_part(self) -> Iterator[None]:
        """A compiled part runs in the block; what it reads has been brought."""
        before, self.in_compiled_part = self.in_compiled_part, True
        try:
            yield
        finally:
            self.in_compiled_part = before
