"""Observer of the chosen layers as they run: records figures at once and keeps no activation."""

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
from l2l_core.inside.inspection_request import InspectionRequest, MicroBatchRows
from l2l_core.inside.inspection_result import LayerObservation
from l2l_core.model import compiled_attribute
from l2l_core.step.micro_batch import LayerCall, hidden_states

_NO_ATTENTION = (
    "this layer calls no attention that PyTorch shows: neither scaled_dot_product_attention nor a softmax over (rows, heads, "
    "queries, keys)"
)
_NO_HIDDEN_STATE = "this layer has no hidden state: none of its output tensors has the shape of an input tensor"
_COMPILED = "this layer is compiled, so its attention cannot be recorded: inspect the model without torch.compile"


@dataclass(frozen=True, slots=True)
class InspectionTask:
    """The task of an observed pass: its loss. Equal tasks need equal device memory."""

    objective: Objective
    request: InspectionRequest

    def __call__(self, model: nn.Module, micro_batch: Any) -> torch.Tensor:
        return self.objective(model, micro_batch)


class LayerObserver:
    """Records the figures of one pass; see `StepContext.observers`.

    Invariant: it holds no tensor on the device, and on the host only those requested.
    """

    def __init__(self, request: InspectionRequest) -> None:
        self._request = request
        self.observations: list[LayerObservation] = []

    def __call__(self, call: LayerCall, layer_forward: Callable[..., Any]) -> Callable[..., Any]:
        """Return the forward for this call of a layer."""
        if call.unit.key not in self._request.keys:
            return layer_forward

        def observed(*args: Any, **kwargs: Any) -> Any:
            wanted = self._request.attention
            recorded = wanted and not _is_compiled(call, layer_forward)
            # `call.k` numbers the micro-batches of this pass; `micro_batches` has their numbers in a step.
            maps = AttentionMaps(self._request.rows[call.k].leading, self._request.row, self._request.positions)
            with maps if recorded else nullcontext():  # not around compiled code: Dynamo would trace the mode
                outputs = layer_forward(*args, **kwargs)
            why = "" if not wanted or maps.maps else (maps.missing_reason or _NO_ATTENTION) if recorded else _COMPILED
            # At once, and only figures: a kept activation would occupy memory while all other layers run.
            observation = self._observe(call, pytree.tree_leaves((args, kwargs)), pytree.tree_leaves(outputs))
            self.observations.append(replace(observation, attention=tuple(maps.maps), why_no_attention=why))
            return outputs

        return observed

    @torch.no_grad()
    def _observe(self, call: LayerCall, inputs: Sequence[Any], outputs: Sequence[Any]) -> LayerObservation:
        k, rows = self._request.micro_batches[call.k], self._request.rows[call.k]
        empty = LayerObservation(call.unit.key, call.unit.name, k, call.visit, None, None, None, None, None)
        states = hidden_states(inputs, outputs)
        if states is None:
            return replace(empty, why_not_at=_NO_HIDDEN_STATE)
        before, after = states
        added, cosine = relative_change(before, after)
        entered, left = activation_stats(before), activation_stats(after)
        observation = replace(empty, entered=entered, left=left, added=added, cosine=cosine)
        if why_not := _no_positions_reason(before.shape, rows):
            return replace(observation, why_not_at=why_not)
        first = self._request.row, slice(self._request.positions)
        return replace(observation, added_at=relative_change_by_position(before[first], after[first]))


def _no_positions_reason(shape: Sequence[int], rows: MicroBatchRows) -> str:
    """Return why a hidden state of a shape has no positions of a row; empty for (rows, positions, features)."""
    if len(shape) != 3:
        return f"the hidden state has the shape {tuple(shape)}, which is not (rows, positions, features)"
    return rows.first_dim_problem(shape, "the hidden state")


def _is_compiled(call: LayerCall, layer_forward: Callable[..., Any]) -> bool:
    """Return whether a part of the layer, or its forward in a pass, is compiled."""
    return hasattr(layer_forward, "get_compiler_config") or any(
        compiled_attribute(part) is not None for part in call.unit.module.modules()
    )
