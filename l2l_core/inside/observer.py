"""Who is shown the chosen layers as they run: notes figures at once and keeps no activation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from l2l_core._torch import pytree
from l2l_core.batches import Objective
from l2l_core.inside.asked import Asked
from l2l_core.inside.attention import AttentionMaps
from l2l_core.inside.rows import Rows
from l2l_core.inside.spread import change_at, change_of, spread_of
from l2l_core.inside.values import Passing
from l2l_core.model import entry_of
from l2l_core.step.micro_batch import Call, hidden_states

_NONE_SEEN = (
    "this layer calls no attention that PyTorch shows: neither scaled_dot_product_attention nor a softmax over (rows, heads, "
    "queries, keys)"
)
_NO_STATE = "this layer has no hidden state: no tensor that leaves it has the shape of one that enters"
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
            # `call.k` counts the micro-batches of this pass; those of a step have the numbers in `micro_batches`.
            maps = AttentionMaps(self._asked.rows[call.k].count, self._asked.row, self._asked.positions)
            with maps if is_seen else nullcontext():  # not around compiled code: Dynamo would trace the mode
                outputs = run(*args, **kwargs)
            why = "" if not asks or maps.found else (maps.why_not or _NONE_SEEN) if is_seen else _COMPILED
            # At once, and only figures: an activation that is kept would stay in memory while all other layers pass by.
            noted = self._note(call, pytree.tree_leaves((args, kwargs)), pytree.tree_leaves(outputs))
            self.seen.append(replace(noted, attention=tuple(maps.found), why_no_attention=why))
            return outputs

        return looked_at

    @torch.no_grad()
    def _note(self, call: Call, given: Sequence[Any], outputs: Sequence[Any]) -> Passing:
        k, rows = self._asked.micro_batches[call.k], self._asked.rows[call.k]
        nothing = Passing(call.unit.key, call.unit.name, k, call.visit, None, None, None, None, None)
        states = hidden_states(given, outputs)
        if states is None:
            return replace(nothing, why_not_at=_NO_STATE)
        came, went = states
        added, cosine = change_of(came, went)
        noted = replace(nothing, entered=spread_of(came), left=spread_of(went), added=added, cosine=cosine)
        why_not = _why_not_at(came.shape, rows)
        if why_not:
            return replace(noted, why_not_at=why_not)
        return replace(noted, added_at=change_at(*(t[self._asked.row, : self._asked.positions] for t in states)))


def _why_not_at(shape: Sequence[int], rows: Rows) -> str:
    """Say why a hidden state of a shape has no positions of a row; empty for (rows, positions, features)."""
    if len(shape) != 3:
        return f"the hidden state has the shape {tuple(shape)}, which is not (rows, positions, features)"
    return rows.why_not_first(shape, "the hidden state")


def _is_compiled(call: Call, run: Callable[..., Any]) -> bool:
    """Whether a part of the layer is; its own forward is shadowed during a pass, so that is asked of the one that runs."""
    return hasattr(run, "get_compiler_config") or any(entry_of(part) is not None for part in call.unit.module.modules())
