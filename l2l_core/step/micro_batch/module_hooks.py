"""Hooks of modules during a relay: gradients that leave a layer sideways, and the user's hooks fired once.

A layer may hand tensors to the rest of the model without returning them: a hook that the model has installed records
router logits, a submodule leaves an auxiliary loss on an attribute. Such *side outputs* are found by being still alive
when the layer's own graph is gone, and are named by where they came from, so that the recompute finds them again.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as nn_module
from torch.utils.hooks import RemovableHandle

from l2l_core.eps.blocks import Unit
from l2l_core.model import compiled_modules, modules_in_graph, modules_of
from l2l_core.step.graph import is_segment_input
from l2l_core.step.micro_batch.temporary_attribute import TemporaryAttribute
from l2l_core.step.traffic import MeterRecord, StaleMeterError

Locator = tuple[str, ...]  # ("output", path, call, index) or ("attribute", path, name)


class SideOutputs:
    """Watches the submodules of the layer that runs.

    It installs one global forward hook while a layer runs, and none in the shell. Such a hook makes every call of a module
    slower, so that layers which gave out nothing on the side while a pass was metered are not watched in passes like it.

    Args:
        metered: what is known of passes of this kind, or gets to be known.
        learns: whether this is the metered pass.
    """

    def __init__(self, record: MeterRecord, is_metering: bool) -> None:
        self._record, self._is_metering = record, is_metering
        self._paths: dict[nn.Module, str] = {}
        self._paths_by_layer: dict[nn.Module, dict[nn.Module, str]] = {}
        self._calls: dict[str, int] = {}  # how often each has been called in this run, less one
        self._outputs: dict[Locator, Any] | None = None
        self._strong = False
        self._handle: RemovableHandle | None = None

    def record_layer(self, unit: Unit) -> None:
        """A layer has given out something on the side."""
        if self._is_metering:
            self._record.side_output_layers.add(unit.key)

    def check_attribute(self, unit: Unit, value: Any) -> None:
        """A layer keeps something on an attribute.

        Raises:
            NewHabit: it can be differentiated, and the layer gave out nothing on the side before.
        """
        if not isinstance(value, torch.Tensor) or value.grad_fn is None or self._is_watched(unit):
            return
        if not is_segment_input(value.grad_fn):  # what the layer was given is cut already
            raise StaleMeterError(f"layer {unit.name} keeps a tensor that has a gradient on an attribute")

    def _is_watched(self, unit: Unit) -> bool:
        return self._is_metering or unit.key in self._record.side_output_layers

    def watch(self, unit: Unit, strong: bool = False) -> AbstractContextManager[dict[Locator, Any]]:
        """Note what submodules of a layer give out in the block: weakly, or `strong` references while recomputing."""
        return self._watch(unit, strong) if self._is_watched(unit) else nullcontext({})

    @contextmanager
    def _watch(self, unit: Unit, strong: bool) -> Iterator[dict[Locator, Any]]:
        layer = unit.module
        if layer not in self._paths_by_layer:
            self._paths_by_layer[layer] = {module: path for path, module in layer.named_modules() if path}
        self._paths, self._strong, self._outputs = self._paths_by_layer[layer], strong, {}
        self._calls.clear()
        self._handle = nn_module.register_module_forward_hook(self._on_output)
        try:
            yield self._outputs
        finally:
            self._handle.remove()
            self._handle = self._outputs = None

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Take every hook of the engine away in the block."""
        if self._handle is None:
            yield
            return
        self._handle.remove()
        try:
            yield
        finally:
            self._handle = nn_module.register_module_forward_hook(self._on_output)

    def attribute_tensors(self, unit: Unit) -> dict[Locator, torch.Tensor]:
        """Find tensors with a graph that the layer's modules keep as plain attributes."""
        found: dict[Locator, torch.Tensor] = {}
        if not self._is_watched(unit):
            return found
        for module, path in [(unit.module, ""), *self._paths_by_layer[unit.module].items()]:
            held = vars(module)
            for name in [name for name, value in held.items() if isinstance(value, torch.Tensor)]:
                if (node := held[name].grad_fn) is not None and not is_segment_input(node):
                    found["attribute", path, name] = held[name]
        return found

    def _on_output(self, module: nn.Module, args: Any, output: Any) -> None:
        if self._outputs is None or (path := self._paths.get(module)) is None:
            return
        self._calls[path] = call = self._calls.get(path, -1) + 1
        for index, tensor in enumerate((output,) if isinstance(output, torch.Tensor) else _tensors(output)):
            if tensor.grad_fn is not None:
                self._outputs["output", path, str(call), str(index)] = tensor if self._strong else weakref.ref(tensor)


def alive_outputs(weak_outputs: Mapping[Locator, Any]) -> dict[Locator, torch.Tensor]:
    """Find which weakly noted tensors Python code still holds; what only autograd has saved does not count."""
    found = {locator: tensor for locator, ref in weak_outputs.items() if (tensor := _alive_tensor(ref)) is not None}
    unique = {id(tensor): locator for locator, tensor in reversed(found.items())}
    return {locator: found[locator] for locator in unique.values()}


def _alive_tensor(ref: Callable[[], torch.Tensor | None]) -> torch.Tensor | None:
    tensor = ref()
    if tensor is None or tensor.grad_fn is None or is_segment_input(tensor.grad_fn):
        return None
    return tensor if tensor._use_count() == 1 or sys.getrefcount(tensor) > _refcount_when_saved() else None


@cache
def _refcount_when_saved() -> int:
    """Ask `sys.getrefcount`, in `_held`, of a tensor that autograd alone keeps alive: torch's versions differ."""
    x = torch.ones(1, requires_grad=True) * 2
    saved_by = x * x
    ref = weakref.ref(x)
    del x
    tensor = ref()
    count = sys.getrefcount(tensor)
    assert saved_by.requires_grad
    return count


def _tensors(output: Any) -> Iterator[torch.Tensor]:
    if isinstance(output, torch.Tensor):
        yield output
    elif isinstance(output, tuple | list):
        for item in output:
            yield from _tensors(item)
    elif isinstance(output, Mapping):
        yield from _tensors(list(output.values()))


class UserHooks:
    """Keeps hooks on submodules of layers from firing again when a layer is recomputed.

    Hooks that change what flows (they returned a value, or are torch's own: spectral norm, pruning) do run again, or the
    recompute would compute something else.
    """

    def __init__(self, layers: Mapping[Any, nn.Module]) -> None:
        self._layers = list(layers.values())
        self._wrapped: list[tuple[dict[int, Any], int, Any]] = []  # where, under which key, what was there
        self._wrapped_keys: set[tuple[int, int]] = set()
        self._modules: dict[nn.Module, list[nn.Module]] = {}
        self._silent = False

    def __enter__(self) -> UserHooks:
        for layer in self._layers:
            self.wrap_layer(layer)
        return self

    def __exit__(self, *exc: object) -> None:
        for hooks, key, hook in self._wrapped:
            if key in hooks:
                hooks[key] = hook

    def wrap_layer(self, layer: nn.Module) -> None:
        """Keep the hooks on a layer's submodules in check too that were put there since."""
        if layer not in self._modules:
            compiled = {
                module for part in compiled_modules(layer) for module in modules_in_graph(part)
            }  # of those there are none
            self._modules[layer] = [m for m in modules_of(layer) if m is not layer and m not in compiled]
        for module in self._modules[layer]:
            if module._forward_pre_hooks or module._forward_hooks:
                for hooks in (module._forward_pre_hooks, module._forward_hooks):
                    for key in [key for key in hooks if (id(hooks), key) not in self._wrapped_keys]:
                        self._wrapped_keys.add((id(hooks), key))
                        self._wrapped.append((hooks, key, hooks[key]))
                        hooks[key] = self._wrap(hooks[key])

    def silenced(self) -> AbstractContextManager[None]:
        """Keep observers quiet in the block."""
        return TemporaryAttribute(self, "_silent", True)

    def _wrap(self, hook: Callable[..., Any]) -> Callable[..., Any]:
        acts = (getattr(hook, "__module__", None) or type(hook).__module__).startswith("torch.")

        def wrapped(*args: Any, **kwargs: Any) -> Any:
            nonlocal acts
            if self._silent and not acts:
                return None
            result = hook(*args, **kwargs)
            acts = acts or result is not None
            return result

        return wrapped
