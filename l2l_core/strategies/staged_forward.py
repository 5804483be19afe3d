"""The forward of one micro-batch, run stage by stage, and the tapes from which stages are replayed.

The model's own code runs in a greenlet that is suspended at layer calls. A function mode, active in shell code alone,
records every operation on a tape and chooses the tensors that it gets: subclasses substitute tensors of earlier stages,
which cuts the graph. A tape belongs to one micro-batch and is replayed on equal values, so Python branches of the model
cannot differ.
"""

from __future__ import annotations

import contextvars
from abc import abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import greenlet
import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakTensorKeyDictionary

from l2l_core._torch import DisableTorchFunction, function_modes, pytree
from l2l_core.model import RandomState, call_attribute, refuse_hidden_tensors

Tensor = torch.Tensor


class TensorRef(NamedTuple):
    """Placeholder on the tape for a tensor, by its number."""

    number: int


class TapeEntry(NamedTuple):
    """An operation of shell code, or the layer call of a stage; its tensor arguments are `TensorRef`."""

    function: Callable[..., Any]
    leaves: list[Any]
    tree_spec: Any
    result_numbers: list[int | None]  # in pytree order; None for results that have no number


@dataclass(eq=False)
class StageTape:
    """All that a rerun of one stage of one micro-batch needs."""

    random_state: RandomState
    shell_entries: list[TapeEntry] = field(default_factory=list)
    layer_entry: TapeEntry | None = None  # None in the last stage
    buffers: dict[str, Tensor] = field(default_factory=dict)


def return_unchanged(value: Any, number: int | None = None) -> Any:
    """Return the value."""
    return value


class TapeReplay:
    """Replay of the tape of one stage.

    Args:
        boundary: differentiable tensors made before the stage, by number.
        constants: the other tensors that it reads, by number.
        buffers: substitutes of buffers, by id.
    """

    def __init__(
        self, boundary: Mapping[int, Tensor], constants: Mapping[int, Tensor], buffers: Mapping[int, Tensor]
    ) -> None:
        self.values = dict(boundary)  # tensors that are still needed
        self._constants, self._buffers = constants, buffers

    def run(
        self,
        entry: TapeEntry,
        on_input: Callable[[Tensor, int], Tensor] = return_unchanged,
        on_output: Callable[[Any], Any] = return_unchanged,
    ) -> None:
        """Run an operation again; `on_input` and `on_output` may substitute its tensors."""
        leaves = [self._value(leaf, on_input) for leaf in entry.leaves]
        args, kwargs = pytree.tree_unflatten(leaves, entry.tree_spec)
        del leaves
        out = entry.function(*args, **kwargs)
        del args, kwargs
        results = [on_output(leaf) for leaf in pytree.tree_leaves(out)]
        del out
        self.values.update((n, leaf) for n, leaf in zip(entry.result_numbers, results, strict=True) if n is not None)

    def _value(self, leaf: Any, on_input: Callable[[Tensor, int], Tensor]) -> Any:
        if type(leaf) is not TensorRef:
            return self._buffers.get(id(leaf), leaf)
        number = leaf.number
        return on_input(self.values[number], number) if number in self.values else self._constants[number]

    def keep_only(self, wanted: Collection[int], entry: TapeEntry) -> None:
        """Drop all values but `wanted` and the inputs of `entry`."""
        needed = {*wanted, *(leaf.number for leaf in entry.leaves if type(leaf) is TensorRef)}
        for number in self.values.keys() - needed:
            del self.values[number]


class StagedForward(TorchFunctionMode):
    """A forward that runs up to the end of one stage at a time.

    Invariant: a tensor that shell code reads in a stage was made in it, is a substitute for an older one, or has no gradient.

    Args:
        model: runs unchanged; the forwards of its layers are replaced in `patch_layers`.
        layers: names of layers, by module.
        task: runs the model and returns the scalar loss.

    Example:
        See `StructureTracer`.
    """

    def __init__(self, model: nn.Module, layers: Mapping[nn.Module, str], task: Callable[[], Tensor]) -> None:
        super().__init__()
        self.model, self.layers = model, layers
        self.stages: list[StageTape] = []  # that have begun
        self.constants: dict[int, Tensor] = {}  # tensors without a gradient that are read after a boundary, by number
        self.made_in: list[int] = []  # the stage of every numbered tensor; -1 for inputs
        self.signature: list[tuple[int, str]] = []  # operations of shell code: stage and name
        self.numbers: Any = WeakTensorKeyDictionary()
        self.layer_name = ""  # of the layer that was called last
        self._model_tensors = {id(tensor) for tensor in (*model.parameters(), *model.buffers())}
        self._coroutine = greenlet.greenlet(task)
        self._coroutine.gr_context = contextvars.copy_context()

    @abstractmethod
    def substitute(self, tensor: Tensor, number: int) -> Tensor:
        """Return the tensor that the current stage reads in place of an older one."""

    @abstractmethod
    def on_output(self, tensor: Tensor, number: int) -> None:
        """Handle a tensor that the current stage has made."""

    @abstractmethod
    def run_layer(self, layer_forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the layer `layer_name`."""

    # -- stages --------------------------------------------------------------------------------------------------------

    @contextmanager
    def patch_layers(self) -> Iterator[None]:
        """Suspend the forward at layer calls inside the block; an unfinished forward is unwound at its end."""
        with ExitStack() as stack:
            stack.callback(self._unwind)
            for module, name in self.layers.items():
                attribute = call_attribute(module)
                if (own := vars(module).get(attribute)) is not None:
                    stack.callback(setattr, module, attribute, own)
                stack.callback(delattr, module, attribute)
                setattr(module, attribute, self._patched_forward(name, getattr(module, attribute)))
            yield

    def _unwind(self) -> None:
        if self._coroutine and not self._coroutine.dead:
            self._coroutine.throw()

    def _patched_forward(self, name: str, layer_forward: Callable[..., Any]) -> Callable[..., Any]:
        def forward(*args: Any, **kwargs: Any) -> Any:
            if greenlet.getcurrent() is not self._coroutine:
                raise RuntimeError(
                    f"layer {name} was called outside of the forward that a plan runs. Is gradient checkpointing on? A plan "
                    "recomputes layers itself: call model.gradient_checkpointing_disable()"
                )
            with DisableTorchFunction():  # the tape records shell code only
                out = self._call_layer(name, layer_forward, args, kwargs)
            self._coroutine.parent.switch()  # type: ignore[union-attr]  # the stage is over
            return out

        return forward

    def run_stage(self) -> Tensor | None:
        """Run one stage; return the loss after the last stage, else None."""
        self.stages.append(StageTape(RandomState.capture()))
        with self:
            loss = self._coroutine.switch()
            if function_modes()[-1] is not self:
                raise RuntimeError(
                    f"layer {self.layer_name} was called within a torch function mode: close the mode before the call"
                )
        return loss if self._coroutine.dead else None

    @property
    def stage_index(self) -> int:
        """Number of the current stage."""
        return len(self.stages) - 1

    def _call_layer(
        self, name: str, layer_forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Run a layer in the model's own frames and context, on substitutes of its arguments."""
        self.layer_name = name
        leaves, tree_spec = pytree.tree_flatten((args, kwargs))
        _refuse_hidden_in(leaves, f"an argument of layer {name}")
        refs = [self._make_ref(leaf) for leaf in leaves]
        args, kwargs = pytree.tree_unflatten([self._resolve(leaf) for leaf in leaves], tree_spec)
        del leaves
        out = self.run_layer(layer_forward, args, kwargs)
        results = pytree.tree_leaves(out)
        _refuse_hidden_in(results, f"an output of layer {name}")
        numbers = [self._register_result(leaf) for leaf in results]
        self.stages[-1].layer_entry = TapeEntry(layer_forward, refs, tree_spec, numbers)
        return out

    # -- shell code ----------------------------------------------------------------------------------------------------

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        leaves, tree_spec = pytree.tree_flatten((args, kwargs or {}))
        refs = [self._make_ref(leaf) for leaf in leaves]
        read = [self._resolve(leaf) for leaf in leaves]
        versions = [leaf._version for leaf in read if isinstance(leaf, Tensor)]
        args, kwargs = pytree.tree_unflatten(read, tree_spec)
        out = func(*args, **kwargs)
        results = pytree.tree_leaves(out)
        changed = versions != [leaf._version for leaf in read if isinstance(leaf, Tensor)]
        if changed or any(isinstance(leaf, Tensor) for leaf in results):
            self.on_operation(func)
            numbers = [self._register_result(leaf) for leaf in results]
            self.stages[-1].shell_entries.append(TapeEntry(func, refs, tree_spec, numbers))
        return out

    def on_operation(self, func: Any) -> None:
        """Add an operation of shell code to the signature."""
        self.signature.append((self.stage_index, getattr(func, "__name__", str(func))))

    def is_static(self, value: Any) -> bool:
        """Return True for parameters, buffers and values that are not tensors."""
        return not isinstance(value, Tensor) or id(value) in self._model_tensors

    def _assign_number(self, tensor: Tensor, stage: int) -> int:
        self.numbers[tensor] = len(self.made_in)
        self.made_in.append(stage)
        return len(self.made_in) - 1

    def _make_ref(self, value: Any) -> Any:
        if self.is_static(value):
            return value
        number = self.numbers.get(value)
        if number is None:
            if value.requires_grad:
                raise RuntimeError(
                    f"stage {self.stage_index} reads a differentiable tensor of shape {tuple(value.shape)} that was made out of "
                    "sight, by a custom autograd.Function of shell code, by scripted code, or inside a layer that does not "
                    "return it. Move the function into a module and name that among layers=, or return the tensor from the layer"
                )
            number = self._assign_number(value, -1)
            self.constants[number] = value
        return TensorRef(number)

    def _resolve(self, value: Any) -> Any:
        if self.is_static(value):
            return value
        number = self.numbers[value]
        return value if self.made_in[number] == self.stage_index else self.substitute(value, number)

    def _register_result(self, value: Any) -> int | None:
        if self.is_static(value):
            return None
        number = self.numbers.get(value)
        if number is None:
            number = self._assign_number(value, self.stage_index)
        if self.made_in[number] == self.stage_index:
            self.on_output(value, number)
        return number


def _refuse_hidden_in(leaves: list[Any], what: str) -> None:
    for leaf in leaves:
        if not isinstance(leaf, Tensor):
            refuse_hidden_tensors(leaf, what)
