"""A stage's tape, run again on given tensors: what only shell code has read is let go before the layer runs."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

from l2l_core._torch import pytree
from l2l_core.strategies.forward import Call, Ref, Tensor


def as_it_is(value: Any, number: int | None = None) -> Any:
    """Change nothing."""
    return value


class Replay:
    """Values of one run of a stage, by number.

    Args:
        given: the tensors at the cut before the stage.
        consts: what it reads besides, without gradients.
        lent: by identity of a buffer, what stands for it.
    """

    def __init__(self, given: Mapping[int, Tensor], consts: Mapping[int, Tensor], lent: Mapping[int, Tensor]) -> None:
        self.values = dict(given)
        self._consts, self._lent = consts, lent

    def run(
        self,
        call: Call,
        lead_in: Callable[[Tensor, int], Tensor] = as_it_is,
        lead_out: Callable[[Any], Any] = as_it_is,
    ) -> None:
        """Call an operation again; `lead_in` is shown every tensor that flows in, `lead_out` what comes out."""
        leaves = [self._value(leaf, lead_in) for leaf in call.leaves]
        args, kwargs = pytree.tree_unflatten(leaves, call.form)
        del leaves
        out = call.function(*args, **kwargs)
        del args, kwargs
        results = [lead_out(leaf) for leaf in pytree.tree_leaves(out)]
        del out
        self.values.update((n, leaf) for n, leaf in zip(call.made, results, strict=True) if n is not None)

    def _value(self, leaf: Any, lead_in: Callable[[Tensor, int], Tensor]) -> Any:
        if type(leaf) is not Ref:
            return self._lent.get(id(leaf), leaf)
        number = leaf.number
        return lead_in(self.values[number], number) if number in self.values else self._consts[number]

    def forget_all_but(self, wanted: Collection[int], call: Call) -> None:
        """Let go of what neither `call` nor a later stage reads."""
        needed = {*wanted, *(leaf.number for leaf in call.leaves if type(leaf) is Ref)}
        for number in self.values.keys() - needed:
            del self.values[number]
