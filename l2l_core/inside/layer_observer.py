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
from l2l_core.inside.activation_stats import activation_stats, relative_change, relative_change_by_position
from l2l_core.inside.attention_maps import AttentionMaps
from l2l_core.inside.inspection_request import InspectionRequest
from l2l_core.inside.inspection_result import LayerObservation
from l2l_core.inside.micro_batch_rows import MicroBatchRows
from l2l_core.model import compiled_attribute
from l2l_core.step.micro_batch import LayerCall, hidden_states

_NO_ATTENTION = (
    "this layer calls no attention that PyTorch shows: neither scaled_dot_product_attention nor a softmax over (rows, heads, "
    "queries, keys)"
)
_NO_HIDDEN_STATE = "this layer has no hidden state: no tensor that leaves it has the shape of one that enters"
_COMPILED = "this layer is compiled, so what it computes inside cannot be seen: look at the model without torch.compile"


@dataclass(frozen=True, slots=True)
class InspectionTask:
    """The task of a pass that is looked at: its loss. With what is asked it says what such a pass needs on the device."""

    objective: Objective
    request: InspectionRequest

    def __call__(self, model: nn.Module, micro_batch: Any) -> torch.Tensor:
        return self.objective(model, micro_batch)


class LayerObserver:
    """Takes notes of one pass; see `Pass.observers`.

    Invariant: it holds no tensor on the device, and on the host only what was asked for.

    Attributes:
        seen: layers in the order in which they ran, and in each its micro-batches.
    """

    def __init__(self, request: InspectionRequest) -> None:
        self._request = request
        self.observations: list[LayerObservation] = []

    def __call__(self, call: LayerCall, layer_forward: Callable[..., Any]) -> Callable[..., Any]:
        """Return the layer's forward as it is to run in this call."""
        if call.unit.key not in self._request.keys:
            return layer_forward

        def looked_at(*args: Any, **kwargs: Any) -> Any:
            asks = self._request.attention
            is_seen = asks and not _is_compiled(call, layer_forward)
            # `call.k` counts the micro-batches of this pass; those of a step have the numbers in `micro_batches`.
            maps = AttentionMaps(self._request.rows[call.k].count, self._request.row, self._request.positions)
            with maps if is_seen else nullcontext():  # not around compiled code: Dynamo would trace the mode
                outputs = layer_forward(*args, **kwargs)
            why = "" if not asks or maps.maps else (maps.missing_reason or _NO_ATTENTION) if is_seen else _COMPILED
            # At once, and only figures: an activation that is kept would stay in memory while all other layers pass by.
            noted = self._observe(call, pytree.tree_leaves((args, kwargs)), pytree.tree_leaves(outputs))
            self.observations.append(replace(noted, attention=tuple(maps.maps), why_no_attention=why))
            return outputs

        return looked_at

    @torch.no_grad()
    def _observe(self, call: LayerCall, inputs: Sequence[Any], outputs: Sequence[Any]) -> LayerObservation:
        k, rows = self._request.micro_batches[call.k], self._request.rows[call.k]
        nothing = LayerObservation(call.unit.key, call.unit.name, k, call.visit, None, None, None, None, None)
        states = hidden_states(inputs, outputs)
        if states is None:
            return replace(nothing, why_not_at=_NO_HIDDEN_STATE)
        came, went = states
        added, cosine = relative_change(came, went)
        noted = replace(
            nothing, entered=activation_stats(came), left=activation_stats(went), added=added, cosine=cosine
        )
        why_not = _no_positions_reason(came.shape, rows)
        if why_not:
            return replace(noted, why_not_at=why_not)
        return replace(
            noted,
            added_at=relative_change_by_position(*(t[self._request.row, : self._request.positions] for t in states)),
        )


def _no_positions_reason(shape: Sequence[int], rows: MicroBatchRows) -> str:
    """Say why a hidden state of a shape has no positions of a row; empty for (rows, positions, features)."""
    if len(shape) != 3:
        return f"the hidden state has the shape {tuple(shape)}, which is not (rows, positions, features)"
    return rows.first_dim_problem(shape, "the hidden state")


def _is_compiled(call: LayerCall, layer_forward: Callable[..., Any]) -> bool:
    """Whether a part of the layer is; its own forward is shadowed during a pass, so that is asked of the one that runs."""
    return hasattr(layer_forward, "get_compiler_config") or any(
        compiled_attribute(part) is not None for part in call.unit.module.modules()
    )
