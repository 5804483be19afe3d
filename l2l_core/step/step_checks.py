"""What is looked at when a micro-batch's forward is over: the last moment before anything of it is trained."""

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
    """Refuses what would be trained wrong.

    Args:
        run: the pass.
        shell: what is in no layer.
        inside: parameters that only layers use, and a layer's name.
        apart: told which parameters of the shell several segments read.
        besides: looks at what others want to have looked at.
    """

    def __init__(
        self,
        ctx: StepContext,
        shell: Unit,
        layer_params: Mapping[torch.Tensor, str],
        per_micro_batch: PerMicroBatch,
        extra_check: Callable[[], None] = lambda: None,
    ) -> None:
        self._ctx, self._shell, self._layer_params, self._per_micro_batch, self._extra_check = (
            ctx,
            shell,
            layer_params,
            per_micro_batch,
            extra_check,
        )
        self._stamps = stamps_of(shell.params)

    def check_visit(self, unit: Unit, is_revisit: bool) -> None:
        """Look at a layer that is about to run; `again`: not for the first time in this pass.

        Raises:
            RuntimeError: it cannot run twice.
        """
        if is_revisit:
            refuse_param_hooks(unit, unit.params)
            if unit in self._ctx.reentrant_layers:
                raise RuntimeError(reentrant_message(f"layer {unit.name}"))

    def check_forward(self, forward: SuspendedForward, tail: GradientEdge | None, is_irregular: bool) -> list[Segment]:
        """Look through a finished forward; returns the segments of its shell code.

        Args:
            forward: of one micro-batch.
            tail: its loss, if that depends on a parameter.
            is_irregular: whether micro-batches take different ways.

        Raises:
            RuntimeError: training would not equal plain training, and why.
        """
        self._extra_check()
        for call in forward.calls:
            call.check_arguments_unchanged()
        check_stamps(self._shell.params, self._stamps, "the model's own code")
        forward.segmenter.check(tail, self._layer_params)
        segments = forward.segmenter.segments
        several = _shared_across_segments(segments, self._shell.params)
        self._per_micro_batch.includes_shell |= is_irregular or bool(several)
        refuse_param_hooks(self._shell, several)
        if any(segment.has_reentrant for segment in segments):
            raise RuntimeError(reentrant_message("the model's own code"))
        return segments

    def check_loss(self, forward: SuspendedForward, loss: torch.Tensor) -> GradientEdge | None:
        """Return where backward of the loss starts; None if it depends on no parameter.

        Raises:
            NonFiniteError: it is not finite; names the layer that gave out the first such value.
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
    """The message about a loss that is not finite."""
    return f"the loss of micro-batch {k} is {loss.item()}; first produced by {producer}. Nothing was updated"


def refuse_frozen_model() -> NoReturn:
    """Refuse a step that would train nothing.

    Raises:
        RuntimeError: always.
    """
    raise RuntimeError("no loss depends on a parameter that requires a gradient: is the whole model frozen?")


def refuse_param_hooks(unit: Unit, params: Sequence[torch.Tensor]) -> None:
    """Refuse hooks on parameters whose gradient comes in several parts: they would see each by itself.

    Raises:
        RuntimeError: names the parameter.
    """
    names = {param: name for block in unit.blocks for param, name in zip(block.params, block.names, strict=True)}
    for param in params:
        if param._backward_hooks:
            raise RuntimeError(gradient_hook_message(names[param]))


def _shared_across_segments(segments: Sequence[Segment], params: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Find which of these parameters get gradients from several segments."""
    reads = Counter(leaf for segment in segments for leaf in segment.uses)
    return [param for param in params if reads[param] > 1]
