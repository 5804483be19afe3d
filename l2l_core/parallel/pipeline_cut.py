"""A model cut into stages of a pipeline: tensors that cross each cut, and parameters of each stage.

Found in one forward of the whole model on one micro-batch. The layers are those of a relay; the model's own code before a
layer belongs to the stage of that layer, and the code after the last one, with the loss, to the last stage. Every rank runs
the model's own forward. Operations of other stages return placeholders there, with the shapes seen here (`pipeline_stage.py`);
masks and positions, which are made of the batch alone, are computed on every rank.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn

from l2l_core._torch import pytree
from l2l_core.model import KVCaches, RandomState, preserve_random_state
from l2l_core.strategies import StageStructure, StructureTracer, restore_buffers

Tensor = torch.Tensor
Task = Callable[[], Tensor]  # runs the model on a micro-batch and returns its loss
_VALUES = {
    "item",
    "tolist",
    "__bool__",
    "__int__",
    "__float__",
    "__index__",
    "numpy",
    "equal",
    "allclose",
    "is_nonzero",
}
_VALUES_ADVICE = "Pipelines run such models by no other way here: train it with a relay, Relay(model)"


class TensorForm(NamedTuple):
    """Shape, strides, dtype and gradient of a tensor."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool

    @staticmethod
    def of(tensor: Tensor) -> TensorForm:
        """Return the form of a tensor; strides are those of a dense tensor if it has gaps or overlaps."""
        dense = torch.empty_like(tensor, device="meta")  # keeps the strides of a dense tensor
        return TensorForm(tuple(tensor.shape), dense.stride(), tensor.dtype, tensor.requires_grad)

    def placeholder(self) -> Tensor:
        """Return a tensor of this shape that takes the memory of one element."""
        return torch.zeros((), dtype=self.dtype, requires_grad=self.requires_grad).expand(self.shape)

    def empty(self) -> Tensor:
        """Return an empty tensor of this form."""
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, requires_grad=self.requires_grad)


class Results(NamedTuple):
    """Results of a call that other ranks do not repeat."""

    leaves: list[Any]  # values, tensors of the model, and None for other tensors
    numbers: list[int | None]  # of these, by leaf
    tree_spec: Any


@dataclass(frozen=True)
class PipelineCut:
    """The stages of a pipeline, for one form of micro-batch.

    Attributes:
        structure: of the layers; its last stage is the loss.
        bounds: by stage of the pipeline, the first layer; and the number of layers with the loss.
        crossing: by stage of the pipeline, and after the last one, the numbers of the tensors that it receives.
        forms: of tensors, by number.
        calls: by call in the model's own code, its results, or None if every rank repeats it.
        outputs: by layer, the results of its call.
        parameters: by layer, and for the loss, the names of the parameters that it reads.
        buffers: by layer, and for the loss, the names of the buffers that it changes.
        draws: True if the forward draws random numbers, so that the generator's state crosses too.

    Example:
        See `Pipeline`.
    """

    structure: StageStructure
    bounds: tuple[int, ...]
    crossing: tuple[tuple[int, ...], ...]
    forms: Mapping[int, TensorForm]
    calls: Sequence[Results | None]
    outputs: Sequence[Results]
    parameters: tuple[frozenset[str], ...]
    buffers: tuple[frozenset[str], ...]
    draws: bool

    @property
    def stages(self) -> int:
        """Number of stages of the pipeline."""
        return len(self.bounds) - 1

    def parameters_of(self, stage: int) -> frozenset[str]:
        """Return the names of the parameters that a stage reads."""
        return frozenset().union(*self.parameters[self.bounds[stage] : self.bounds[stage + 1]])

    def received(self, stage: int) -> list[TensorForm]:
        """Return the forms of the tensors that a stage receives; the generator's state is the last."""
        forms = [self.forms[number] for number in self.crossing[stage]]
        state = torch.get_rng_state()
        return [*forms, TensorForm.of(state)] if self.draws else forms

    def message_bytes(self, stage: int) -> int:
        """Return the bytes of the message that a stage receives."""
        return sum(form.empty().nbytes for form in self.received(stage)) if stage else 0

    def gradient_bytes(self, stage: int) -> int:
        """Return the bytes of the gradients that a stage sends back."""
        return sum(form.empty().nbytes for form in self.received(stage) if form.requires_grad) if stage else 0


def cut_model(
    model: nn.Module, layers: Mapping[nn.Module, str], task: Task, stages: int, bounds: Sequence[int] | None = None
) -> PipelineCut:
    """Cut a model into stages; restore buffers and random state afterwards.

    Args:
        model: runs once.
        layers: names by module.
        task: runs the model on a micro-batch.
        stages: number of stages.
        bounds: by stage, its first layer, from 0; default about as many layers in each.

    Raises:
        RuntimeError, TypeError: the model cannot be cut; the message has the remedy.
        ValueError: there are fewer layers than stages, or the bounds are not ascending from 0.
    """
    buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
    try:
        with preserve_random_state(), KVCaches(model).disabled():
            RandomState.from_seed(0).restore()
            tracer = _CutTracer(model, layers, task)
            structure = tracer.trace()
            return tracer.cut(structure, _check_bounds(bounds, structure.stages - 1, stages))
    finally:
        restore_buffers(buffers)


def _check_bounds(bounds: Sequence[int] | None, layers: int, stages: int) -> tuple[int, ...]:
    if layers < stages:
        raise ValueError(f"{layers} layer calls for {stages} stages: use fewer ranks, or fewer stages on each")
    chosen = [i * layers // stages for i in range(stages)] if bounds is None else list(bounds)
    if len(chosen) != stages or sorted({0, *chosen}) != chosen or chosen[-1] > layers:
        raise ValueError(
            f"bounds={chosen}: give the first layer of each of {stages} stages in ascending order, from 0 to {layers}"
        )
    return (*chosen, layers + 1)


class _CutTracer(StructureTracer):
    """Records the results of every call, and which of them depend on layers, parameters or random numbers.

    Invariant: `StructureTracer` keeps every tensor, so identities are unique.
    """

    def __init__(self, model: nn.Module, layers: Mapping[nn.Module, str], task: Task) -> None:
        super().__init__(model, layers, task)
        self.calls: list[Results | None] = []
        self.outputs: list[Results] = []
        self._dependent: dict[int, Tensor] = {}  # by id, tensors that ranks do not compute for other stages
        self._forms: dict[int, TensorForm] = {}  # by number
        self._draws = False
        names = {id(param): name for name, param in model.named_parameters()}  # the first name of a shared one
        self._names_by_id = names
        self._parameters: list[set[str]] = []
        self._modules = {name: module for module, name in layers.items()}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        leaves = pytree.tree_leaves((args, kwargs or {}))
        depends = any(self._depends(leaf) for leaf in leaves)
        if depends and getattr(func, "__name__", "") in _VALUES:
            raise RuntimeError(
                f"the model's own code reads the values of a tensor that layers make ({func.__name__}), before layer call "
                f"{self.stage_index}; other ranks do not have it. {_VALUES_ADVICE}"
            )
        self._read_parameters(leaves)
        operations, made, state = len(self.signature), len(self.made_in), torch.get_rng_state()
        versions = [leaf._version if isinstance(leaf, Tensor) else 0 for leaf in leaves]
        out = super().__torch_function__(func, types, args, kwargs)
        drawn = not torch.equal(state, torch.get_rng_state())
        self._draws |= drawn
        if len(self.signature) == operations or not (depends or drawn):
            self.calls.append(None)
            return out
        changed = [
            leaf
            for leaf, old in zip(leaves, versions, strict=True)
            if isinstance(leaf, Tensor) and leaf._version != old
        ]
        self.calls.append(self._note(out, made, changed))
        return out

    def _depends(self, value: Any) -> bool:
        return isinstance(value, Tensor) and (value.requires_grad or id(value) in self._dependent)

    def _read_parameters(self, leaves: Sequence[Any]) -> None:
        while len(self._parameters) <= self.stage_index:
            self._parameters.append(set())
        self._parameters[-1].update(self._names_by_id[id(leaf)] for leaf in leaves if id(leaf) in self._names_by_id)

    def run_layer(self, layer_forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self._read_parameters(list(self._modules[self.layer_name].parameters()))
        state = torch.get_rng_state()
        out = super().run_layer(layer_forward, args, kwargs)
        self._draws |= not torch.equal(state, torch.get_rng_state())
        return out

    def _call_layer(
        self, name: str, layer_forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        made = len(self.made_in)
        out = super()._call_layer(name, layer_forward, args, kwargs)
        self.outputs.append(self._note(out, made))
        return out

    def _note(self, out: Any, made: int, changed: Sequence[Tensor] = ()) -> Results:
        """Note what a call returns; tensors that it has made, numbered from `made` on, or changed depend on it."""
        leaves, tree_spec = pytree.tree_flatten(out)
        numbers = [None if self.is_static(leaf) else self.numbers.get(leaf) for leaf in leaves]
        made_now = [leaf for leaf, number in zip(leaves, numbers, strict=True) if number is not None and number >= made]
        for tensor in (*made_now, *changed):
            if (number := self.numbers.get(tensor)) is not None:
                self._dependent[id(tensor)] = tensor
                self._forms[number] = TensorForm.of(tensor)
        kept = [leaf if number is None else None for leaf, number in zip(leaves, numbers, strict=True)]
        return Results(kept, numbers, tree_spec)

    def cut(self, structure: StageStructure, bounds: tuple[int, ...]) -> PipelineCut:
        """Return the cut at these layers."""
        crossing = [
            sorted(
                number
                for number, last in self._last_reader.items()
                if number in self._forms and self.made_in[number] < bound <= last
            )
            for bound in bounds
        ]
        every = {name for names in self._parameters for name in names}
        unread = [name for name, param in self.model.named_parameters() if name not in every and param.requires_grad]
        parameters = [frozenset(names) for names in self._parameters]
        parameters += [frozenset()] * (structure.stages - len(parameters))
        parameters[-1] |= frozenset(unread)
        return PipelineCut(
            structure,
            bounds,
            (*map(tuple, crossing[:-1]), ()),
            self._forms,
            self.calls,
            self.outputs,
            tuple(parameters),
            tuple(map(frozenset, self._changed_buffers)),
            self._draws,
        )
