"""Who is shown the chosen layers as they run: notes figures at once and keeps no activation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from l2l_core.batches import Objective
from l2l_core.inside.asked import Asked
from l2l_core.inside.attention import AttentionMaps
from l2l_core.inside.spread import change_at, change_of, spread_of
from l2l_core.inside.values import Passing
from l2l_core.model import entry_of
from l2l_core.step.micro_batch import Call, hidden_states

_NONE_SEEN = (
    "this layer calls no attention that PyTorch shows: neither scaled_dot_product_attention nor a softmax over (rows, heads, "
    "queries, keys)"
)
_COMPILED = "this layer is compiled, so what it computes inside cannot be seen: look at the model without torch.compile"


@dataclass(frozen=True, slots=True)
class Watched:
    """The task of a pass that is looked at: its loss. With what is asked it says what such a pass needs on the device."""

    objective: Objective
    asked: Asked

    def __call__(self, model: nn.Module, micro_batch: Any) -> torch.Tensor:
        return self.objective(model, micro_batch)


class Observer:
    """Takes notes of one pass; see `Pass.observers`.

    Invariant: it holds no tensor on the device, and on the host only what was asked for.

    Attributes:
        seen: layers in the order in which they ran, and in each its micro-batches.
    """

    def __init__(self, asked: Asked) -> None:
        self._asked = asked
        self.seen: list[Passing] = []

    def __call__(self, call: Call, run: Callable[..., Any]) -> Callable[..., Any]:
        """Return the layer's forward as it is to run in this call."""
        if call.unit.key not in self._asked.keys:
            return run

        def looked_at(*args: Any, **kwargs: Any) -> Any:
            asks = self._asked.attention
            is_seen = asks and not _is_compiled(call, run)
            maps = AttentionMaps(self._asked.row, self._asked.positions)
            with maps if is_seen else nullcontext():
                outputs = run(*args, **kwargs)
            why = "" if not asks or maps.found else _NONE_SEEN if is_seen else _COMPILED
            noted = self._note(call, pytree.tree_leaves((args, kwargs)), pytree.tree_leaves(outputs))
            self.seen.append(replace(noted, attention=tuple(maps.found), why_no_attention=why))
            return outputs

        return looked_at

    @torch.no_grad()
    def _note(self, call: Call, given: Sequence[Any], outputs: Sequence[Any]) -> Passing:
        entered, left, added, cosine, added_at = None, None, None, None, None
        states = hidden_states(given, outputs)
        if states is not None:
            came, went = states
            entered, left = spread_of(came), spread_of(went)
            added, cosine = change_of(came, went)
            if came.ndim == 3:  # (rows, positions, features)
                added_at = change_at(*(t[self._asked.row, : self._asked.positions] for t in states))
        k = self._asked.micro_batches[call.k]
        return Passing(call.unit.key, call.unit.name, k, call.visit, entered, left, added, cosine, added_at)


def _is_compiled(call: Call, run: Callable[..., Any]) -> bool:
    """Whether a part of the layer is; its own forward is shadowed during a pass, so that is asked of the one that runs."""
    return hasattr(run, "get_compiler_config") or any(entry_of(part) is not None for part in call.unit.module.modules())
