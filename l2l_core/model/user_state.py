"""Snapshots of what a user's functions, hooks and objects keep, around runs that plain training does not have.

Such runs are comparisons, trials of an optimizer, forecasts and recomputes. A counter in a closure, a list of losses, a running
mean or a generator must afterwards be as if they had not been made.
"""

from __future__ import annotations

import itertools
import random
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from copy import copy
from functools import partial
from itertools import islice
from types import CodeType, FunctionType, MethodType, ModuleType, SimpleNamespace
from typing import Any

import numpy
import torch
from torch import nn

from l2l_core._torch import hooks_of_all_modules
from l2l_core.model.state_snapshot import HOOK_DICTS, INTERNALS, Restore, restore_all, snapshot_value

_MOST_ITEMS, _MOST_OBJECTS = 100, 5_000  # a longer container holds data
_NEAR, _FAR = 3, 100  # references between a root and a value that is included
_MOST_ELEMENTS = 2**24  # of all tensors whose values are kept, the nearest first: larger ones are data
_MOST_STATISTICS = 2**12  # elements of a tensor in which a layer counts
# Their functions and objects keep no state of a loss, a hook or a layer
_PACKAGES = sys.stdlib_module_names - {"__main__"} | {"torch", "l2l_core", "workbench", "transformers", "numpy"}
_NEVER_CHANGED = (ModuleType, CodeType, str, bytes, int, float, complex, type(None))
_CLASS_VALUES = (bool, int, float, str, tuple, torch.Tensor, type(None))
_FUNCTIONS = (FunctionType, MethodType, partial, type)
_GENERATORS = (torch.Generator, random.Random, numpy.random.Generator, numpy.random.RandomState, numpy.ndarray)


def snapshot_user_state(
    roots: Iterable[object], modules: Iterable[nn.Module] = (), for_recompute: bool = False
) -> Restore:
    """Snapshot numbers, tensors, containers and generators that functions and objects keep; return what restores them.

    Found in variables of closures, defaults, globals that a function names, attributes of functions, of a user's objects and of
    their classes. Containers are copied without what is in them; large tensors, which are data, and tensors with a graph are
    left out.

    Args:
        roots: functions and objects to begin with.
        modules: modules whose plain attributes and hooks are included; of other modules nothing is.
        for_recompute: leave out what functions and classes keep, which may belong to the pass that runs now, and objects far
            from the modules; and keep new attributes, which may note that a module has made something in its first run.
    """
    restores: list[Restore] = []
    elements = 0  # of tensors copied
    seen: dict[int, object] = {}
    level = [*roots, *_values_of_modules(modules, restores, for_recompute)]
    for _ in range(_NEAR if for_recompute else _FAR):
        following: list[object] = []
        for value in level:
            if id(value) in seen or isinstance(value, (*_NEVER_CHANGED, nn.Parameter)) or _is_ours(value):
                continue
            seen[id(value)] = value
            if isinstance(value, nn.Module):  # such as a loss: its forward may name globals
                following += {type(module) for module in value.modules()}
                continue
            if isinstance(value, torch.Tensor):
                if value.grad_fn is None and elements + value.numel() <= _MOST_ELEMENTS:
                    elements += value.numel()
                    restores.append(_snapshot_tensor(value))
            elif not (for_recompute and isinstance(value, _FUNCTIONS)):
                following += _snapshot_held(value, restores)
        level = following if len(seen) < _MOST_OBJECTS else []
    return restore_all(restores)


def _snapshot_held(value: object, restores: list[Restore]) -> Sequence[object]:
    """Snapshot which values a container, a function, a class or an object has; return those values."""
    if isinstance(value, list | deque | set | dict) and _package(type(value)) in ("builtins", "collections"):
        restores.append(partial(_refill, value, copy(value)))
        return list(islice(value.values() if isinstance(value, dict) else value, _MOST_ITEMS))
    if isinstance(value, tuple):
        return value[:_MOST_ITEMS]
    if isinstance(value, partial):
        return [value.func, *value.args, *value.keywords.values()]
    if isinstance(value, MethodType):
        return [value.__func__, value.__self__]
    if isinstance(value, _GENERATORS):
        restores.append(snapshot_value(value))
        return []
    if isinstance(value, type):
        return _snapshot_class(value, restores)
    held: list[object] = [type(value)]
    attributes = getattr(value, "__dict__", None)
    keeps = isinstance(value, FunctionType | SimpleNamespace) or _package(type(value)) not in _PACKAGES
    if keeps and isinstance(attributes, dict):
        restores.append(partial(_refill, attributes, _with_counters_copied(attributes)))
        held += attributes.values()
    if keeps and not isinstance(value, FunctionType):
        for name in _slots_of(type(value)):
            if hasattr(value, name):
                each = getattr(value, name)
                restores.append(partial(object.__setattr__, value, name, _copied_if_counter(each)))
                held.append(each)
    if isinstance(value, FunctionType):
        for write, each in _variables(value):
            restores.append(partial(write, _copied_if_counter(each)))
            held.append(each)
        held += [*(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values()]
    return held


def _slots_of(cls: type) -> Iterator[str]:
    """Yield the names of attributes that are in slots of a user's class."""
    for base in cls.__mro__:
        slots = vars(base).get("__slots__", ()) if _package(base) not in _PACKAGES else ()
        yield from (name for name in ([slots] if isinstance(slots, str) else slots) if not name.startswith("__"))


def _copied_if_counter(value: object) -> Any:
    # It cannot be rewound, so that its variable gets a copy.
    return copy(value) if isinstance(value, itertools.count) else value


def _with_counters_copied(attributes: dict[str, Any]) -> dict[str, Any]:
    return {name: _copied_if_counter(value) for name, value in attributes.items()}


@contextmanager
def preserved_user_state(*roots: object) -> Iterator[None]:
    """Restore what functions and objects keep after a block; see `snapshot_user_state`."""
    restore = snapshot_user_state(roots)
    try:
        yield
    finally:
        restore()


def _values_of_modules(modules: Iterable[nn.Module], restores: list[Restore], for_recompute: bool) -> Iterator[object]:
    """Snapshot which values the plain attributes of modules have; yield those values, hooks and classes."""
    for module in modules:
        attributes = vars(module)
        kept = {name: value for name, value in attributes.items() if is_state(name, value, for_recompute)}
        restores.append(partial(_restore_attributes, module, kept, for_recompute))
        yield from kept.values()
        yield type(module)
        for hooks in (attributes.get(name) for name in HOOK_DICTS):
            yield from hooks.values() if hooks else ()
        for param in attributes["_parameters"].values():
            yield from (getattr(param, "_backward_hooks", None) or {}).values()
    yield from hooks_of_all_modules()


def _restore_attributes(module: nn.Module, kept: dict[str, object], for_recompute: bool) -> None:
    attributes = vars(module)
    for name in [
        name for name, value in attributes.items() if name not in kept and is_state(name, value, for_recompute)
    ]:
        if not for_recompute or hasattr(type(module), name):
            del attributes[name]
    for name, value in kept.items():
        if attributes.get(name, attributes) is not value:
            attributes[name] = value


def is_state(name: str, value: object, for_recompute: bool = False) -> bool:
    """Return whether an attribute of a module may be a state.

    Internals are not, nor are tensors with a graph, nor, of a layer that is recomputed, tensors as large as activations.
    """
    if isinstance(value, torch.Tensor):
        return not value.requires_grad and not (for_recompute and value.numel() > _MOST_STATISTICS)
    return name not in INTERNALS


def _snapshot_tensor(tensor: torch.Tensor) -> Restore:
    """Snapshot a tensor's values, unless its bytes are off the device, where they do not change."""

    def is_here() -> bool:
        return tensor.layout is not torch.strided or not tensor.numel() or tensor.untyped_storage().nbytes() > 0

    if not is_here():
        return lambda: None
    restore = snapshot_value(tensor)
    return lambda: restore() if is_here() else None


def _snapshot_class(cls: type, restores: list[Restore]) -> list[object]:
    """Snapshot the plain values of a user's class; return its values, and its methods, which may name globals."""
    own = [
        (base, name, value)
        for base in cls.__mro__
        if _package(base) not in _PACKAGES
        for name, value in vars(base).items()
    ]
    named = [each for each in own if not each[1].startswith("__") and not callable(each[2])]
    restores.extend(partial(_set_class_value, *each) for each in named if isinstance(each[2], _CLASS_VALUES))
    methods = [getattr(value, "fget", None) or getattr(value, "__func__", value) for _, _, value in own]
    return [*(value for _, _, value in named), *(each for each in methods if isinstance(each, FunctionType))]


def _set_class_value(cls: type, name: str, value: object) -> None:
    now = vars(cls).get(name, _set_class_value)
    if now is not value and isinstance(now, _CLASS_VALUES):  # else a pass traces the attribute meanwhile
        setattr(cls, name, value)


def _variables(function: FunctionType) -> Iterator[tuple[Callable[[Any], object], Any]]:
    """Yield the values of a function's closure and of globals that it names, each with its writer."""
    for cell in function.__closure__ or ():
        with suppress(ValueError):  # the variable has no value yet
            yield partial(setattr, cell, "cell_contents"), cell.cell_contents
    held = function.__globals__
    # functools.wraps gives a wrapper the module of what it wraps: the one that defines it has its globals.
    if str(held.get("__name__")).partition(".")[0] in _PACKAGES:
        held = {}
    for name in names_in(function.__code__):
        if name in held:
            yield partial(held.__setitem__, name), held[name]


def _is_ours(value: object) -> bool:
    """Return whether it is of this package, so that it may belong to a pass that runs now."""
    is_tensor = isinstance(value, torch.Tensor)  # a guarded one has a class of the package
    return not is_tensor and _package(value if isinstance(value, FunctionType) else type(value)) in (
        "l2l_core",
        "workbench",
    )


def _package(value: type | FunctionType) -> str:
    return str(value.__module__).partition(".")[0]


def names_in(code: CodeType) -> list[str]:
    """Return the names of globals and attributes that a function, and those defined in it, refer to."""
    inner = (names_in(const) for const in code.co_consts if isinstance(const, CodeType))
    return [*code.co_names, *(name for names in inner for name in names)]


def _refill(container: Any, items: Any) -> None:
    if isinstance(container, dict):
        if len(items) != len(container) or any(container.get(key, items) is not item for key, item in items.items()):
            container.clear()
            for key, item in items.items():
                container[key] = item
        return
    container.clear()
    container.extend(items) if isinstance(container, list | deque) else container.update(items)
