"""The micro-batch and the code that run at present; tensors that they make or read are theirs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager

import torch

from l2l_core.model import storage_keys
from l2l_core.step.graph import unguarded

NO_MICRO_BATCH = -1


class _ActivatedTurn(AbstractContextManager[None]):
    """Context of `CurrentTurn.activate`. Every turn has several; a generator would take twice as long."""

    def __init__(self, turn: CurrentTurn, values: tuple[int, str, set[int] | None]) -> None:
        self._turn, self._values = turn, values

    def __enter__(self) -> None:
        turn = self._turn
        self._before = turn.k, turn.owner, turn.layer_inputs
        turn.k, turn.owner, turn.layer_inputs = self._values

    def __exit__(self, *exc: object) -> None:
        turn = self._turn
        turn.k, turn.owner, turn.layer_inputs = self._before


class CurrentTurn:
    """The micro-batch and the code that run at present.

    Attributes:
        k: the micro-batch, or NO_MICRO_BATCH.
        owner: key of the layer that runs, or "shell".
        layer_inputs: storages of the arguments of the layer that runs; None while shell code runs.
        in_forward: False while backward runs.
        in_compiled_region: whether a compiled region runs; its inputs were fetched before it.
    """

    def __init__(self) -> None:
        self.k = NO_MICRO_BATCH
        self.owner = ""
        self.layer_inputs: set[int] | None = None
        self.in_forward = True
        self.in_compiled_region = False

    @property
    def in_shell(self) -> bool:
        """Whether no layer runs."""
        return self.layer_inputs is None

    @property
    def reader(self) -> str:
        """Name of the code that runs, for messages."""
        return "the model's own code" if self.in_shell else f"layer {self.owner}"

    def activate(
        self, k: int, owner: str, inputs: Iterable[torch.Tensor] | None = None
    ) -> AbstractContextManager[None]:
        """Return a context in which micro-batch `k` runs `owner`; `inputs` are the arguments of a layer."""
        with unguarded():
            keys = None if inputs is None else set(storage_keys(inputs))
        return _ActivatedTurn(self, (k, owner, keys))

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
