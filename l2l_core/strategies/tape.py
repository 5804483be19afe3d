"""A stage's tape, run again on given tensors: what only shell code has read is let go before the layer runs."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

from l2l_core._torch import pytree
from l2l_core.strategies.staged_forward import TapeEntry, Tensor, TensorRef


def return_unchanged(value: Any, number: int | None = None) -> Any:
    """Change nothing."""
    return value


class TapeReplay:
    """Values of one run of a stage, by number.

    Args:
        given: the tensors at the cut before the stage.
        consts: what it reads besides, without gradients.
        lent: by identity of a buffer, what stands for it.
    """

    def __init__(
        self, boundary: Mapping[int, Tensor], constants: Mapping[int, Tensor], buffers: Mapping[int, Tensor]
    ) -> None:
        self.values = dict(boundary)
        self._constants, self._buffers = constants, buffers

    def run(
        self,
        entry: TapeEntry,
        on_input: Callable[[Tensor, int], Tensor] = return_unchanged,
        on_output: Callable[[Any], Any] = return_unchanged,
    ) -> None:
        """Call an operation again; `lead_in` is shown every tensor that flows in, `lead_out` what comes out."""
        leaves = [self._value(leaf, on_input) for leaf in entry.leaves]
        args, kwargs = pytree.tree_unflatten(leaves, entry.tree_spec)
        del leaves
        out = entry.function(*args, **kwargs)
        del args, kwargs
        results = [on_output(leaf) for leaf in pytree.tree_leaves(out)]
        del out
        self.values.update((n, leaf) for n, leaf in zip(entry.result_numbers, results, strict=True) if n is not None)

    def _value(self, leaf: Any, on_input: Callable[[Tensor, int], Tensor]) -> Any:
        if type(leaf) is not TensorRef:
            return self._buffers.get(id(leaf), leaf)
        number = leaf.number
        return on_input(self.values[number], number) if number in self.values else self._constants[number]

    def keep_only(self, wanted: Collection[int], entry: TapeEntry) -> None:
        """Let go of what neither `call` nor a later stage reads."""
        needed = {*wanted, *(leaf.number for leaf in entry.leaves if type(leaf) is TensorRef)}
        for number in self.values.keys() - needed:
            del self.values[number]
