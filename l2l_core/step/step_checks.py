"""Checks after a micro-batch's forward, the last moment before it trains anything."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import NoReturn

import torch
from torch.autograd.graph import GradientEdge, get_gradient_edge

from l2l_core.eps import NonFiniteError
from l2l_core.eps.blocks import Unit, check_stamps, gradient_hook_message, stamps_of
from l2l_core.step.graph import Segment, reentrant_message
from l2l_core.step.micro_batch import StepContext, SuspendedForward
from l2l_core.step.per_micro_batch import PerMicroBatch


class StepChecks:
    """Refuses steps whose result would differ from plain training.

    Args:
        layer_params: parameters that only layers use, each with the name of a layer.
        per_micro_batch: updated when several segments use a parameter of the shell.
        extra_check: called after each forward; it may raise.
    """

    def __init__(
        self,
        ctx: StepContext,
        shell: Unit,
        layer_params: Mapping[torch.Tensor, str],
        per_micro_batch: PerMicroBatch,
        extra_check: Callable[[], None],
    ) -> None:
        self._ctx, self._shell, self._layer_params = ctx, shell, layer_params
        self._per_micro_batch, self._extra_check = per_micro_batch, extra_check
        self._stamps = stamps_of(shell.params)

    def check_visit(self, unit: Unit, is_revisit: bool) -> None:
        """Raise RuntimeError if the layer runs again in this pass (`is_revisit`) and must not."""
        if is_revisit:
            _refuse_param_hooks(unit, unit.params)
            if unit in self._ctx.reentrant_layers:
                raise RuntimeError(reentrant_message(f"layer {unit.name}"))

    def check_forward(self, forward: SuspendedForward, tail: GradientEdge | None, is_irregular: bool) -> list[Segment]:
        """Check a finished forward; return the segments of its shell code.

        Args:
            forward: forward of one micro-batch.
            tail: edge of its loss; None if no parameter contributes to it.
            is_irregular: whether micro-batches call layers in different orders.

        Raises:
            RuntimeError: the step would differ from plain training.
        """
        self._extra_check()
        for call in forward.calls:
            call.check_arguments_unchanged()
        check_stamps(self._shell.params, self._stamps, "the model's own code")
        forward.segmenter.check(tail, self._layer_params)
        segments = forward.segmenter.segments
        uses = Counter(leaf for segment in segments for leaf in segment.uses)
        shared = [param for param in self._shell.params if uses[param] > 1]
        self._per_micro_batch.includes_shell |= is_irregular or bool(shared)
        _refuse_param_hooks(self._shell, shared)
        if forward.segmenter.has_reentrant:
            raise RuntimeError(reentrant_message("the model's own code"))
        return segments

    def check_loss(self, forward: SuspendedForward, loss: torch.Tensor) -> GradientEdge | None:
        """Return the edge at which backward of the loss starts; None if no parameter contributes to it.

        Raises:
            NonFiniteError: the loss is not finite; names the first layer with such an output.
        """
        if not torch.isfinite(loss):  # the host waits for the device here, once per micro-batch
            raise NonFiniteError(self._explain_nonfinite(loss, forward))
        return get_gradient_edge(loss) if loss.requires_grad else None

    def _explain_nonfinite(self, loss: torch.Tensor, forward: SuspendedForward) -> str:
        producer = "the batch or the code before the first layer"
        for call in forward.calls:
            self._ctx.stash.fetch(call.tensors, forward.k)
            if not all(bool(torch.isfinite(t).all()) for t in call.tensors if t.is_floating_point()):
                break
            producer = f"layer {call.unit.name} ({call.unit.key})"
        else:
            producer = f"{producer}, or the loss after it"
        return nonfinite_message(forward.k, loss, producer)


def nonfinite_message(k: int, loss: torch.Tensor, producer: str) -> str:
    """Return the message for a loss that is not finite."""
    return f"the loss of micro-batch {k} is {loss.item()}; first produced by {producer}. Nothing was updated"


def refuse_frozen_model() -> NoReturn:
    """Raise RuntimeError for a step that would train nothing."""
    raise RuntimeError("no loss depends on a parameter that requires a gradient: is the whole model frozen?")


def _refuse_param_hooks(unit: Unit, params: Sequence[torch.Tensor]) -> None:
    """Raise RuntimeError if parameters with several partial gradients have hooks, which would get each part alone."""
    named = ((param, name) for block in unit.blocks for param, name in zip(block.params, block.names, strict=True))
    names: dict[torch.Tensor, str] = dict(named)
    for param in params:
        if param._backward_hooks:
            raise RuntimeError(gradient_hook_message(names[param]))
