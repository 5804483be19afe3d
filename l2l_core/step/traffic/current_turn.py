"""The micro-batch and the code that run at present; tensors that they make or read are theirs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch

from l2l_core.model import storage_keys
from l2l_core.step.graph import unguarded

NO_MICRO_BATCH = -1


class CurrentTurn:
    """The micro-batch and the code that run at present."""

    def __init__(self) -> None:
        self.k = NO_MICRO_BATCH
        self.owner = ""  # key of the layer that runs, or "shell"
        self.layer_inputs: set[int] | None = None  # storages of the layer's arguments; None while shell code runs
        self.in_forward = True  # False while backward runs
        self.in_compiled_region = False  # such a region's inputs were fetched before it

    @property
    def in_shell(self) -> bool:
        """Whether no layer runs."""
        return self.layer_inputs is None

    @property
    def reader(self) -> str:
        """Name of the code that runs, for messages."""
        return "the model's own code" if self.in_shell else f"layer {self.owner}"

    @contextmanager
    def activate(self, k: int, owner: str, inputs: Iterable[torch.Tensor] | None = None) -> Iterator[None]:
        """Run a block as micro-batch `k` in `owner`; `inputs` are the arguments of a layer."""
        with unguarded():
            keys = None if inputs is None else set(storage_keys(inputs))
        before = self.k, self.owner, self.layer_inputs
        self.k, self.owner, self.layer_inputs = k, owner, keys
        try:
            yield
        finally:
            self.k, self.owner, self.layer_inputs = before

    @contextmanager
    def enter_backward(self) -> Iterator[None]:
        """Run the block as backward."""
        before, self.in_forward = self.in_forward, False
        try:
            yield
        finally:
            self.in_forward = before

    @contextmanager
    def enter_compiled_region(self) -> Iterator[None]:
        """Run the block as a compiled region."""
        before, self.in_compiled_region = self.in_compiled_region, True
        try:
            yield
        finally:
            self.in_compiled_region = before
