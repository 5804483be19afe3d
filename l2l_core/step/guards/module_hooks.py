"""Hooks on modules of layers: one finds side outputs, and those of the user are silenced in a recompute.

A layer may pass tensors to the rest of the model without returning them: a hook of the model records router logits, a submodule
keeps an auxiliary loss on an attribute. Such *side outputs* are the tensors that are still alive after the layer's graph is
dropped. Each is identified by its module and position, so that the recompute finds it again.
"""

from __future__ import annotations

import sys
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from functools import cache
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as nn_module
from torch.utils.hooks import RemovableHandle

from l2l_core.eps.blocks import Unit
from l2l_core.model import compiled_modules, modules_in_graph
from l2l_core.step.graph import is_segment_input
from l2l_core.step.traffic import MeterRecord, StaleMeterError

Locator = tuple[str, ...]  # ("output", path, call, index) or ("attribute", path, name)


@contextmanager
def temporarily(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Set an attribute in the block."""
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


class InstancePatch:
    """A temporary value of a module's entry point, such as `forward`."""

    def __init__(self, module: nn.Module, name: str, value: Any) -> None:
        self._attributes, self._name, self._value = vars(module), name, value
        self._own = self._attributes.get(name)

    @property
    def is_applied(self) -> bool:
        return self._attributes.get(self._name) is self._value

    def apply(self) -> None:
        self._attributes[self._name] = self._value

    def undo(self) -> None:
        if self._own is None:
            self._attributes.pop(self._name, None)
        else:
            self._attributes[self._name] = self._own


class SideOutputs:
    """Finds side outputs of the running layer.

    It installs one global forward hook while a layer runs, and none in the shell. The hook makes every call of a module slower,
    so layers without side outputs in the metered pass are not watched in later passes of the same kind.

    Args:
        record: filled by the metered pass of this kind.
    """

    def __init__(self, record: MeterRecord, is_metering: bool) -> None:
        self._record, self._is_metering = record, is_metering
        self._hook: Callable[..., None] | None = None
        self._handle: RemovableHandle | None = None  # of the hook, while it is registered

    def record_layer(self, unit: Unit) -> None:
        """Record that a layer has side outputs."""
        if self._is_metering:
            self._record.side_output_layers.add(unit.key)

    def check_attribute(self, unit: Unit, value: Any) -> None:
        """Raise StaleMeterError if a layer without side outputs in the metered pass keeps a differentiable tensor."""
        if isinstance(value, torch.Tensor) and not self._is_watched(unit) and _has_own_graph(value):
            raise StaleMeterError(f"layer {unit.name} keeps a tensor that has a gradient on an attribute")

    def _is_watched(self, unit: Unit) -> bool:
        return self._is_metering or unit.key in self._record.side_output_layers

    @contextmanager
    def watch(self, unit: Unit, strong: bool = False) -> Iterator[dict[Locator, Any]]:
        """Collect outputs of a layer's submodules in the block: weak references, or `strong` ones for a recompute."""
        outputs: dict[Locator, Any] = {}
        if not self._is_watched(unit):
            yield outputs
            return
        paths = {module: path for path, module in unit.module.named_modules()}
        calls = Counter[str]()

        def hook(module: nn.Module, args: Any, output: Any) -> None:
            if not (path := paths.get(module)):  # another module, or the layer itself
                return
            for index, tensor in enumerate(_tensors(output)):
                if tensor.grad_fn is not None:
                    locator = "output", path, str(calls[path]), str(index)
                    outputs[locator] = tensor if strong else weakref.ref(tensor)
            calls[path] += 1

        self._hook, self._handle = hook, nn_module.register_module_forward_hook(hook)
        try:
            yield outputs
        finally:
            self._handle.remove()
            self._hook = self._handle = None  # the hook holds the outputs

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Remove the global hook in the block."""
        if self._hook is None or self._handle is None:
            yield
            return
        self._handle.remove()
        try:
            yield
        finally:
            self._handle = nn_module.register_module_forward_hook(self._hook)

    def attribute_tensors(self, unit: Unit, began: int) -> dict[Locator, torch.Tensor]:
        """Return the tensors that the layer has made and its modules keep as plain attributes.

        Older ones, of nodes before the sequence number `began`, are the model's own: it has left them on the layer.
        """
        found: dict[Locator, torch.Tensor] = {}
        if not self._is_watched(unit):
            return found
        for path, module in unit.module.named_modules():
            for name, value in vars(module).items():
                node = value.grad_fn if isinstance(value, torch.Tensor) else None
                if node is not None and not is_segment_input(node) and node._sequence_nr() >= began:
                    found["attribute", path, name] = value
        return found


def _has_own_graph(tensor: torch.Tensor) -> bool:
    """Whether a tensor was made by differentiable operations of its layer."""
    return tensor.grad_fn is not None and not is_segment_input(tensor.grad_fn)


def alive_outputs(weak_outputs: Mapping[Locator, Any]) -> dict[Locator, torch.Tensor]:
    """Return the tensors that Python code still holds, without those that only autograd has saved."""
    found = {locator: tensor for locator, ref in weak_outputs.items() if (tensor := _alive_tensor(ref)) is not None}
    unique = {id(tensor): locator for locator, tensor in reversed(found.items())}
    return {locator: found[locator] for locator in unique.values()}


def _alive_tensor(ref: Callable[[], Any]) -> torch.Tensor | None:
    tensor = ref()
    if tensor is None or not _has_own_graph(tensor):
        return None
    return tensor if tensor._use_count() == 1 or sys.getrefcount(tensor) > _refcount_when_saved() else None


@cache
def _refcount_when_saved() -> int:
    """Return `sys.getrefcount` in `_alive_tensor` of a tensor that only autograd holds; it depends on torch's version."""
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
    """Silences hooks on submodules of layers while a layer is recomputed.

    Hooks that change values (they returned one, or are torch's own: spectral norm, pruning) run again, since the recompute needs
    them.
    """

    def __init__(self, layers: Iterable[nn.Module]) -> None:
        self._layers = list(layers)
        self._originals: dict[tuple[int, int], tuple[dict[int, Any], Any]] = {}  # id, key -> hooks of a module, hook
        self._modules: dict[int, list[nn.Module]] = {}  # by id of a layer
        self._silent = False

    def __enter__(self) -> UserHooks:
        for layer in self._layers:
            self.wrap_layer(layer)
        return self

    def __exit__(self, *exc: object) -> None:
        for (_, key), (hooks, hook) in self._originals.items():
            if key in hooks:
                hooks[key] = hook

    def wrap_layer(self, layer: nn.Module) -> None:
        """Wrap the hooks on a layer's submodules that are not wrapped yet, except in compiled regions."""
        if id(layer) not in self._modules:
            compiled = {id(module) for region in compiled_modules(layer) for module in modules_in_graph(region)}
            self._modules[id(layer)] = [m for m in layer.modules() if m is not layer and id(m) not in compiled]
        for module in self._modules[id(layer)]:
            for hooks in (module._forward_pre_hooks, module._forward_hooks):
                for key in [key for key in hooks if (id(hooks), key) not in self._originals]:
                    self._originals[id(hooks), key] = hooks, hooks[key]
                    hooks[key] = self._wrap(hooks[key])

    def silenced(self) -> AbstractContextManager[None]:
        """Skip hooks that only observe in the block."""
        return temporarily(self, "_silent", True)

    def _wrap(self, hook: Callable[..., Any]) -> Callable[..., Any]:
        changes_values = (getattr(hook, "__module__", None) or type(hook).__module__).startswith("torch.")

        def wrapped(*args: Any, **kwargs: Any) -> Any:
            nonlocal changes_values
            if self._silent and not changes_values:
                return None
            result = hook(*args, **kwargs)
            changes_values = changes_values or result is not None
            return result

        return wrapped
