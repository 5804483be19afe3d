"""One micro-batch's forward, stage by stage: the model's own code as a coroutine that stops at layer calls.

A function mode, in force in shell code alone, notes every operation on a *tape* and says which tensors it gets: the
subclass hands it others in place of those of earlier stages, and that substitution is the cut. The tape is this
micro-batch's own and is replayed on equal values, so Python branches of the model cannot come out differently.
"""

from __future__ import annotations

import contextvars
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
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
    """Stands on the tape for a tensor, by its number."""

    number: int


class TapeEntry(NamedTuple):
    """One operation of shell code, or the layer call of a stage: tensors among its arguments are `Ref`."""

    function: Callable[..., Any]
    leaves: list[Any]
    tree_spec: Any
    result_numbers: list[int | None]  # numbers of the results, in pytree order


@dataclass(eq=False)
class StageTape:
    """One stage of one micro-batch: what is needed to run it again."""

    index: int
    random_state: RandomState
    shell_entries: list[TapeEntry] = field(default_factory=list)
    layer_entry: TapeEntry | None = None  # None in the last stage
    buffers: dict[str, Tensor] = field(default_factory=dict)


class StagedForward(TorchFunctionMode):
    """Runs the model up to the end of one stage at a time.

    Invariant: a tensor that shell code reads in a stage is one of this stage, a leaf that stands for an older one, or one
    without a gradient.

    Args:
        model: runs as it is; layers' forwards are shadowed in `shadowing`.
        layers: by module, their names.
        task: runs the model and returns the scalar loss.
    """

    def __init__(self, model: nn.Module, layers: Mapping[nn.Module, str], task: Callable[[], Tensor]) -> None:
        super().__init__()
        self.model, self.layers = model, layers
        self.stages: list[StageTape] = []
        self.constants: dict[int, Tensor] = {}  # read across cuts, without a gradient
        self.made_in: list[int] = []  # the stage of every number
        self.signature: list[tuple[int, str]] = []
        self.numbers: Any = WeakTensorKeyDictionary()
        self._model_tensors = {id(tensor) for tensor in (*model.parameters(), *model.buffers())}
        self._task: Callable[[], Tensor] | None = task
        self.layer_name = ""  # of the layer that was called last
        self._coroutine = greenlet.greenlet(self._run)
        self._coroutine.gr_context = contextvars.copy_context()

    def _run(self) -> Any:
        task, self._task = self._task, None
        return task()  # type: ignore[misc]

    # -- what subclasses say -------------------------------------------------------------------------------------------

    @abstractmethod
    def substitute(self, tensor: Tensor, number: int) -> Tensor:
        """Return what the present stage reads in place of an older tensor."""

    @abstractmethod
    def on_output(self, tensor: Tensor, number: int) -> None:
        """Hear of a tensor that the present stage has made."""

    @abstractmethod
    def run_layer(self, layer_forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the layer `name`."""

    # -- going on ------------------------------------------------------------------------------------------------------

    @contextmanager
    def patch_layers(self) -> Iterator[None]:
        """Let layer calls stop the forward, in the block; what has not finished at its end is unwound."""
        before = [(module, call_attribute(module)) for module in self.layers]
        own = [vars(module).get(name) for module, name in before]
        for module, name in before:
            setattr(module, name, self._patched_forward(self.layers[module], getattr(module, name)))
        try:
            yield
        finally:
            for (module, name), real in zip(before, own, strict=True):
                delattr(module, name)
                if real is not None:
                    setattr(module, name, real)
            if self._coroutine and not self._coroutine.dead:
                self._coroutine.throw()

    def _patched_forward(self, name: str, layer_forward: Callable[..., Any]) -> Callable[..., Any]:
        def forward(*args: Any, **kwargs: Any) -> Any:
            if greenlet.getcurrent() is not self._coroutine:
                raise RuntimeError(
                    f"layer {name} was called outside of the forward that a plan runs. Is gradient checkpointing on? A plan "
                    "recomputes layers itself: call model.gradient_checkpointing_disable()"
                )
            with DisableTorchFunction():  # the tape is for shell code
                out = self._call_layer(name, layer_forward, args, kwargs)
            self._coroutine.parent.switch()  # type: ignore[union-attr]  # the stage is over
            return out

        return forward

    def run_stage(self) -> Tensor | None:
        """Run one stage; returns the loss if it was the last one."""
        self.stages.append(StageTape(len(self.stages), RandomState.capture()))
        with self:
            loss = self._coroutine.switch()
            if function_modes()[-1] is not self:
                raise RuntimeError(
                    f"layer {self.layer_name} was called within a torch function mode: close it before the call"
                )
        return loss if self._coroutine.dead else None

    def _call_layer(
        self, name: str, layer_forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Run a layer here, in the model's own frames and context, on what stands for its arguments."""
        self.layer_name = name
        leaves, form = pytree.tree_flatten((args, kwargs))
        _refuse_hidden_in(leaves, f"an argument of layer {name}")
        refs = [self._make_ref(leaf) for leaf in leaves]
        args, kwargs = pytree.tree_unflatten([self._resolve(leaf) for leaf in leaves], form)
        del leaves
        out = self.run_layer(layer_forward, args, kwargs)
        results = pytree.tree_leaves(out)
        _refuse_hidden_in(results, f"an output of layer {name}")
        self.stages[-1].layer_entry = TapeEntry(
            layer_forward, refs, form, [self._register_result(leaf) for leaf in results]
        )
        return out

    @property
    def stage_index(self) -> int:
        """Number of the present stage."""
        return len(self.stages) - 1

    # -- shell code ----------------------------------------------------------------------------------------------------

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        leaves, form = pytree.tree_flatten((args, kwargs or {}))
        refs = [self._make_ref(leaf) for leaf in leaves]
        read = [self._resolve(leaf) for leaf in leaves]
        versions = [leaf._version for leaf in read if isinstance(leaf, Tensor)]
        args, kwargs = pytree.tree_unflatten(read, form)
        out = func(*args, **kwargs)
        results = pytree.tree_leaves(out)
        changed = versions != [leaf._version for leaf in read if isinstance(leaf, Tensor)]
        if changed or any(isinstance(leaf, Tensor) for leaf in results):
            self.on_operation(func)
            self.stages[-1].shell_entries.append(
                TapeEntry(func, refs, form, [self._register_result(leaf) for leaf in results])
            )
        return out

    def on_operation(self, func: Any) -> None:
        """An operation goes on the tape."""
        self.signature.append((self.stage_index, getattr(func, "__name__", str(func))))

    def is_static(self, value: Any) -> bool:
        """Whether it is no tensor that flows: a parameter, a buffer, or no tensor at all."""
        return not isinstance(value, Tensor) or id(value) in self._model_tensors

    def assign_number(self, tensor: Tensor, stage: int) -> int:
        """Give a tensor a number, that it was made in `stage`."""
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
                    f"stage {self.stage_index} reads a differentiable tensor of shape {tuple(value.shape)} that was made out of sight, "
                    "by a custom autograd.Function of shell code, by scripted code, or inside of a layer and handed out past its "
                    "output. Move the function into a module and name that among layers=, or return the tensor from the layer"
                )
            number = self.assign_number(value, -1)
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
            number = self.assign_number(value, self.stage_index)
        if self.made_in[number] == self.stage_index:
            self.on_output(value, number)
        return number


def _refuse_hidden_in(leaves: list[Any], what: str) -> None:
    for leaf in leaves:
        if not isinstance(leaf, Tensor):
            refuse_hidden_tensors(leaf, what)
