"""What is looked at when a micro-batch's forward is over: the last moment before anything of it is trained."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import NoReturn

import torch
from torch.autograd.graph import GradientEdge, get_gradient_edge

from l2l_core.eps import NonFiniteError
from l2l_core.eps.blocks import Unit, check_stamps, hooked, stamps_of
from l2l_core.step.apart import Apart
from l2l_core.step.graph import Segment, nested
from l2l_core.step.micro_batch import Forward, Pass


class Checks:
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
        run: Pass,
        shell: Unit,
        inside: Mapping[torch.Tensor, str],
        apart: Apart,
        besides: Callable[[], None] = lambda: None,
    ) -> None:
        self._run, self._shell, self._inside, self._apart, self._besides = run, shell, inside, apart, besides
        self._stamps = stamps_of(shell.params)

    def visit(self, unit: Unit, again: bool) -> None:
        """Look at a layer that is about to run; `again`: not for the first time in this pass.

        Raises:
            RuntimeError: it cannot run twice.
        """
        if again:
            refuse_hooks(unit, unit.params)
            if unit in self._run.nesting:
                raise RuntimeError(nested(f"layer {unit.name}"))

    def forward(self, forward: Forward, tail: GradientEdge | None, is_irregular: bool) -> list[Segment]:
        """Look through a finished forward; returns the segments of its shell code.

        Args:
            forward: of one micro-batch.
            tail: its loss, if that depends on a parameter.
            is_irregular: whether micro-batches take different ways.

        Raises:
            RuntimeError: training would not equal plain training, and why.
        """
        self._besides()
        for call in forward.calls:
            call.check_unchanged()
        check_stamps(self._shell.params, self._stamps, "the model's own code")
        forward.crossing.check(tail, self._inside)
        segments = forward.crossing.segments
        several = _read_in_several(segments, self._shell.params)
        self._apart.shell_is |= is_irregular or bool(several)
        refuse_hooks(self._shell, several)
        if any(segment.is_nested for segment in segments):
            raise RuntimeError(nested("the model's own code"))
        return segments

    def loss(self, forward: Forward, loss: torch.Tensor) -> GradientEdge | None:
        """Return where backward of the loss starts; None if it depends on no parameter.

        Raises:
            NonFiniteError: it is not finite; names the layer that gave out the first such value.
        """
        if not torch.isfinite(loss):  # the host waits for the device here, once per micro-batch
            raise NonFiniteError(self._explain(loss, forward))
        return get_gradient_edge(loss) if loss.requires_grad else None

    def _explain(self, loss: torch.Tensor, forward: Forward) -> str:
        producer = "the batch or the code before the first layer"
        for call in forward.calls:
            self._run.stash.fetch(call.tensors, forward.k)
            if not all(bool(torch.isfinite(t).all()) for t in call.tensors if t.is_floating_point()):
                break
            producer = f"layer {call.unit.name} ({call.unit.key})"
        else:
            producer = f"{producer}, or the loss after it"
        return not_finite(forward.k, loss, producer)


def not_finite(k: int, loss: torch.Tensor, producer: str) -> str:
    """The message about a loss that is not finite."""
    return f"the loss of micro-batch {k} is {loss.item()}; first produced by {producer}. Nothing was updated"


def refuse_idle() -> NoReturn:
    """Refuse a step that would train nothing.

    Raises:
        RuntimeError: always.
    """
    raise RuntimeError("no loss depends on a parameter that requires a gradient: is the whole model frozen?")


def refuse_hooks(unit: Unit, params: Sequence[torch.Tensor]) -> None:
    """Refuse hooks on parameters whose gradient comes in several parts: they would see each by itself.

    Raises:
        RuntimeError: names the parameter.
    """
    names = {param: name for block in unit.blocks for param, name in zip(block.params, block.names, strict=True)}
    for param in params:
        if param._backward_hooks:
            raise RuntimeError(hooked(names[param]))


def _read_in_several(segments: Sequence[Segment], params: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Find which of these parameters get gradients from several segments."""
    reads = Counter(leaf for segment in segments for leaf in segment.uses)
    return [param for param in params if reads[param] > 1]
