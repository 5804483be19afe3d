"""Forward of one stage of a pipeline: the model's own forward, in which the layers of other stages are skipped.

Before them, calls of other stages return placeholders, and the tensors that the stage receives take their place at its first
layer. The forward ends with the last layer of the stage. `KeptStage` leaves one autograd graph, as torch's pipelines expect;
`TreatedStage` runs forward and backward by a plan of the lab, which recomputes and offloads.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from l2l_core._torch import pytree
from l2l_core.model import RandomState
from l2l_core.parallel.pipeline_cut import PipelineCut, Results, Task, TensorForm
from l2l_core.strategies import Operation, PlanExecution, StagedForward

Tensor = torch.Tensor


class _PartOfForward(StagedForward):
    """Placeholders for the calls before a stage, and its received and sent tensors."""

    cut: PipelineCut
    stage: int  # of the pipeline
    _is_before = False
    _calls = 0

    def _begin(self, cut: PipelineCut, stage: int) -> None:
        self.cut, self.stage = cut, stage
        self.start, self.stop = cut.bounds[stage : stage + 2]
        self.received: dict[int, Tensor] = {}
        self.sent: dict[int, Tensor] = {}
        self._wanted = {*cut.crossing[stage + 1]}
        self._objects: dict[int, Tensor] = {}  # by number, until the stage begins

    def _pass_earlier_stages(self, received: Sequence[Tensor]) -> None:
        """Run the model's own code up to the stage, and take the tensors and the random state that it receives."""
        self._is_before = True
        for _ in range(self.start):
            self.run_stage()
        self._is_before = False
        self._objects.clear()
        self.received = dict(zip(self.cut.crossing[self.stage], received, strict=False))
        if self.cut.draws and self.start:
            torch.set_rng_state(received[-1].detach())

    def _forget(self) -> None:
        """Drop all tensors, since the micro-batch is over; cycles would keep them until the garbage collector runs."""
        vars(self).clear()

    def _outputs_of(self, tensors: Mapping[int, Tensor], loss: Tensor | None) -> tuple[Tensor, ...]:
        """Return what the stage sends: the loss, or the crossing tensors and the random state."""
        if loss is not None:
            return (loss,)
        crossing = self.cut.crossing[self.stage + 1]
        sent = [_as_sent(self.cut.forms[n], tensors[n], n in self.received) for n in crossing]
        return (*sent, torch.get_rng_state()) if self.cut.draws else tuple(sent)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        results = self.cut.calls[self._calls] if self._calls < len(self.cut.calls) else None
        self._calls += 1
        if results is None or not self._is_before:
            return super().__torch_function__(func, types, args, kwargs)
        for leaf in pytree.tree_leaves((args, kwargs or {})):
            self._make_ref(leaf)
        self.on_operation(func)
        return self._placeholders(results)

    def _placeholders(self, results: Results) -> Any:
        leaves = list(results.leaves)
        for position, number in enumerate(results.numbers):
            if number is not None:
                leaves[position] = self._placeholder(number)
        return pytree.tree_unflatten(leaves, results.tree_spec)

    def _placeholder(self, number: int) -> Tensor:
        if number not in self._objects:
            tensor = self.cut.forms[number].placeholder()
            if self._assign_number(tensor, self.stage_index) != number:
                raise RuntimeError(_other_path(self.stage_index))
            self._objects[number] = tensor
        return self._objects[number]

    def _make_ref(self, value: Any) -> Any:
        ref = super()._make_ref(value)
        if self._is_before and not self.is_static(value):
            self._objects[ref.number] = value  # a later call may return it
        return ref

    def _register_result(self, value: Any) -> int | None:
        number = super()._register_result(value)
        if self._is_before and number is not None:
            self._objects[number] = value
        return number

    def run_layer(self, layer_forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._is_before:
            return self._placeholders(self.cut.outputs[self.stage_index])
        return super().run_layer(layer_forward, args, kwargs)

    def on_output(self, tensor: Tensor, number: int) -> None:
        if self._is_before and number in self.cut.forms:
            return  # a placeholder
        super().on_output(tensor, number)
        if number in self._wanted:
            self.sent[number] = tensor

    def substitute(self, tensor: Tensor, number: int) -> Tensor:
        return self.received.get(number, tensor)


class KeptStage(_PartOfForward):
    """Forward of a stage for one micro-batch that leaves its autograd graph."""

    def __init__(
        self, cut: PipelineCut, stage: int, model: nn.Module, layers: Mapping[nn.Module, str], task: Task
    ) -> None:
        super().__init__(model, layers, task)
        self._begin(cut, stage)

    def forward(self, received: Sequence[Tensor], random_state: RandomState) -> tuple[Tensor, ...]:
        """Run the stage, and return what it sends: crossing tensors, or the loss."""
        loss = None
        with self.patch_layers():
            random_state.restore()
            self._pass_earlier_stages(received)
            for _ in range(self.start, self.stop):
                loss = self.run_stage()
            self._check_end(loss)
            sent = self._outputs_of({**self.received, **self.sent}, loss)
        self._forget()
        return sent

    def _check_end(self, loss: Tensor | None) -> None:
        traced = self.cut.structure.signature
        if tuple(self.signature) != traced[: len(self.signature)] or (loss is None) != (
            self.stop < self.cut.structure.stages
        ):
            raise RuntimeError(_other_path(self.stage_index))

    def run_layer(self, layer_forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return super().run_layer(layer_forward, args, kwargs) if self._is_before else layer_forward(*args, **kwargs)


class TreatedStage(_PartOfForward, PlanExecution):
    """Forward and backward of a stage for one micro-batch by operations of the lab.

    Args:
        operations: on the layers of the stage, from 0, and on an empty stage at their end that stands for the wait.
    """

    def __init__(self, cut: PipelineCut, stage: int, operations: Sequence[Operation], *args: Any) -> None:
        PlanExecution.__init__(self, *args)
        self._begin(cut, stage)
        count = self.stop - self.start
        wait = [position for position, operation in enumerate(operations) if operation.stage == count]
        moved = [Operation(kind, self.start + i) for kind, i in operations]
        self._forward, self._backward_operations = (
            moved[: wait[0]],
            [each for position, each in enumerate(moved) if position > wait[0] and position not in wait],
        )

    def forward(self, received: Sequence[Tensor], random_state: RandomState) -> tuple[Tensor, ...]:
        """Run the operations before the wait, and return what the stage sends, or the loss."""
        with self.patch_layers():
            random_state.restore()
            self._pass_earlier_stages(received)
            own = {number: tensor.detach().clone() for number, tensor in self.received.items()}
            differentiable = self.structure.differentiable
            self._boundary = {number: tensor for number, tensor in own.items() if number in differentiable}
            self.constants.update((number, tensor) for number, tensor in own.items() if number not in differentiable)
            self.received = own
            for operation in self._forward:
                self._execute(operation)
        loss = self.loss if self.stop == self.structure.stages else None
        with torch.no_grad():
            sent = self._outputs_of({**self.received, **self.sent, **self._boundary}, loss)
        self.sent, self.received = {}, {}
        return tuple(tensor.detach() for tensor in sent)

    def substitute(self, tensor: Tensor, number: int) -> Tensor:
        return PlanExecution.substitute(self, super().substitute(tensor, number), number)

    def backward(self, gradients: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Run the operations after the wait from the gradients of what was sent; return those of what was received."""
        self._boundary = {}
        self._pending_gradients = {
            number: gradient
            for number, gradient in zip(self.cut.crossing[self.stage + 1], gradients, strict=False)
            if gradient is not None
        }
        for operation in self._backward_operations:
            self._execute(operation)
        assert not (self._records or self._kept_inputs), f"left: {list(self._records)}, {list(self._kept_inputs)}"
        found = [self._pending_gradients.get(number) for number in self.cut.crossing[self.stage]]
        result = [*found, None] if self.cut.draws and self.stage else found
        self._forget()
        return result


def _as_sent(form: TensorForm, tensor: Tensor, is_received: bool) -> Tensor:
    """Return a tensor in the strides that the receiver expects; neither a view nor a leaf, which torch cannot detach."""
    if tensor.stride() == form.stride and not (is_received or tensor._is_view()):
        return tensor
    return form._replace(requires_grad=False).empty().copy_(tensor)


def laid_out_as(form: TensorForm, gradient: Tensor) -> Tensor:
    """Return a gradient with the strides of its tensor, as the receiver expects them."""
    return gradient if gradient.stride() == form.stride else form._replace(requires_grad=False).empty().copy_(gradient)


def _other_path(stage: int) -> str:
    return (
        f"the model takes another path than when it was cut, in layer call {stage}, and a pipeline has one path. Train models "
        "that skip layers at random, or choose layers by values, with a relay: Relay(model)"
    )
