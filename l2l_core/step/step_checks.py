"""Checks after a micro-batch's forward, the last moment before it trains anything."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import NoReturn

import torch
from torch.autograd.graph import GradientEdge, get_gradient_edge

from l2l_core.eps import NonFiniteError
from l2l_core.eps.blocks import Block, Unit, check_stamps, gradient_hook_message, stamps_of, weights_changed_message
from l2l_core.step.graph import Segment, reentrant_message, walk_graph
from l2l_core.step.micro_batch import StepContext, SuspendedForward, layer_parameter_message
from l2l_core.step.pass_inputs import RelayParts


class PerMicroBatch:
    """Blocks whose gradients are kept apart by micro-batch, so that they are added in the order of plain training.

    Several visits or segments contribute to them; the set grows during a step.
    """

    def __init__(self, shell: Unit, always: bool) -> None:
        self._shell, self._always = set(shell.blocks), always
        self.visit_counts: Counter[str] = Counter()  # visits in forward so far, by key of the layer
        self.includes_shell = False  # several segments, or micro-batches in different orders, share its parameters
        self.revisited: set[str] = set()  # keys of layers visited again after a visit that was expected to be the last

    def __call__(self, block: Block) -> bool:
        """Whether the gradients of the block are kept apart by micro-batch."""
        if block.shared or self._always:
            return True
        if block in self._shell:
            return self.includes_shell
        return self.visit_counts[block.key] > 1 or block.key in self.revisited


class StepChecks:
    """Refuses steps whose result would differ from plain training."""

    def __init__(
        self,
        ctx: StepContext,
        parts: RelayParts,
        per_micro_batch: PerMicroBatch,  # updated when several segments use a parameter of the shell
        extra_check: Callable[[], None],  # called after each forward; it may raise
    ) -> None:
        self._ctx, self._shell = ctx, parts.shell
        self._per_micro_batch, self._extra_check = per_micro_batch, extra_check
        self._stamps = stamps_of(parts.shell.params)
        self._layers = [(unit, [param._version for param in unit.params]) for unit in parts.layers]
        own = set(parts.shell.params)
        self._layer_params: dict[torch.Tensor, tuple[str, str]] = {  # names of the layer and of the parameter
            param: (unit.name, name)
            for unit in parts.layers
            for block in unit.blocks
            for param, name in zip(block.params, block.names, strict=True)
            if param not in own
        }

    def check_visit(self, unit: Unit, is_revisit: bool) -> None:
        """Raise RuntimeError if the layer runs again in this pass (`is_revisit`) and must not."""
        if is_revisit:
            _refuse_param_hooks(unit, unit.params)
            if unit in self._ctx.reentrant_layers:
                raise RuntimeError(reentrant_message(f"layer {unit.name}"))

    def check_forward(self, forward: SuspendedForward, tail: GradientEdge | None, is_irregular: bool) -> list[Segment]:
        """Check a finished forward with the edge of its loss; return the segments of its shell code.

        Micro-batches that call layers in different orders are irregular.
        """
        self._extra_check()
        for call in forward.calls:
            call.check_arguments_unchanged()
        check_stamps(self._shell, self._stamps, "the model's own code")
        self._refuse_changed_layers()
        forward.segmenter.check(tail, self._layer_params)
        segments = forward.segmenter.segments
        uses = Counter(leaf for segment in segments for leaf in segment.uses)
        shared = [param for param in self._shell.params if uses[param] > 1]
        self._per_micro_batch.includes_shell |= is_irregular or bool(shared)
        _refuse_param_hooks(self._shell, shared)
        if forward.segmenter.has_reentrant:
            raise RuntimeError(reentrant_message("the model's own code"))
        return segments

    def _refuse_changed_layers(self) -> None:
        """Raise RuntimeError if the model's own code has changed a weight of a layer; nothing is updated yet."""
        for unit, versions in self._layers:
            for param, before in zip(unit.params, versions, strict=True):
                if param._version != before:
                    raise RuntimeError(weights_changed_message("the model's own code", param, [unit]))

    def check_loss(self, forward: SuspendedForward, loss: torch.Tensor) -> GradientEdge | None:
        """Return the edge at which backward of the loss starts, None if no parameter contributes; refuse a loss not finite."""
        if not torch.isfinite(loss):  # the host waits for the device here, once per micro-batch
            raise NonFiniteError(self._explain_nonfinite(loss, forward))
        return get_gradient_edge(loss) if loss.requires_grad else None

    def check_batch_loss(self, loss: torch.Tensor, began: int) -> GradientEdge | None:
        """Return the edge at which backward of the batch's loss starts, or None; refuse one that the relay gets wrong.

        `began` is autograd's sequence number before the loss.
        """
        if not torch.isfinite(loss):
            raise NonFiniteError(f"the loss of the batch is {loss.item()}. Nothing was updated")
        check_stamps(self._shell, self._stamps, "the loss")
        if not loss.requires_grad:
            return None
        edge = get_gradient_edge(loss)
        graph = walk_graph([edge])
        for leaf in graph.leaves:
            if leaf in self._layer_params:
                raise RuntimeError(layer_parameter_message("the loss of the batch", *self._layer_params[leaf]))
        if graph.first < began or graph.inputs:
            raise RuntimeError(
                "the loss of the batch reads a tensor that a micro-batch's forward left behind (on an attribute?), not only its "
                "outputs, so its gradient would miss the other micro-batches. Return that tensor from the model's forward"
            )
        if graph.has_reentrant:
            raise RuntimeError(reentrant_message("the loss of the batch"))
        return edge

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
