"""Modules and values that a loss function uses beside the model, such as metrics and counters of its calls."""

from __future__ import annotations

import gc
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from copy import copy
from functools import partial
from itertools import islice
from types import CodeType, FunctionType, MethodType, ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import nn

from l2l_core.model import Restore, restore_all, snapshot_attributes, snapshot_value

_NOT_SEARCHED = (torch.Tensor, ModuleType, type, CodeType, str, bytes, int, float)
_MOST_ITEMS, _MOST_OBJECTS = 100, 1000  # a longer container holds data
# Their objects keep no counters of a loss
_PACKAGES = sys.stdlib_module_names | {"torch", "l2l_core", "workbench", "transformers", "numpy"}
_NEVER_CHANGED = (
    nn.Module,
    ModuleType,
    type,
    CodeType,
    str,
    bytes,
    int,
    float,
    complex,
    type(None),
)  # modules: elsewhere
_MOST_ELEMENTS = 2**20  # of a tensor whose values are kept


def modules_used_by(function: object) -> list[nn.Module]:
    """Return the modules that a function refers to, through closures, globals and objects, without the modules in them."""
    return [value for value in _objects_used_by(function) if isinstance(value, nn.Module)]


def refuse_gradient_scalers(function: object) -> None:
    """Raise ValueError if a function refers to a `torch.amp.GradScaler` that is enabled."""
    for value in _objects_used_by(function):
        if isinstance(value, torch.amp.GradScaler) and value.is_enabled():
            raise ValueError(
                "the loss or objective refers to a GradScaler that is enabled: a relay step updates at once, so it would train "
                "with scaled gradients, and scaler.step(optimizer) would find none. Leave the scaler out, with its step() and "
                "update(): float32 and RelayConfig(precision='bf16') need no loss scaling"
            )


def _objects_used_by(function: object) -> list[object]:
    seen: dict[int, object] = {}
    upcoming: deque[object] = deque([function])
    while upcoming and len(seen) < _MOST_OBJECTS:  # the nearest first
        value = upcoming.popleft()
        if id(value) in seen or isinstance(value, _NOT_SEARCHED):
            continue
        seen[id(value)] = value
        if not isinstance(value, nn.Module):
            upcoming.extend(_references(value))
    return list(seen.values())


def snapshot_values(function: object) -> Restore:
    """Snapshot numbers, tensors and containers that a function keeps; return a function that restores them.

    In variables of its closure, in globals, and in attributes of the function or of the object that it belongs to: counters of
    calls, running means, lists of losses. Containers are copied without what is in them, and large tensors, which are data, not
    at all.
    """
    restores: list[Restore] = []
    seen: dict[int, object] = {}
    upcoming: deque[object] = deque([function])
    while upcoming and len(seen) < _MOST_OBJECTS:
        value = upcoming.popleft()
        if id(value) in seen or isinstance(value, _NEVER_CHANGED):
            continue
        seen[id(value)] = value
        if isinstance(value, torch.Tensor):
            restores += [snapshot_value(value)] if value.numel() <= _MOST_ELEMENTS else []
        elif isinstance(value, list | deque | set | dict) and type(value).__module__ in ("builtins", "collections"):
            restores.append(partial(_refill, value, copy(value)))
            upcoming.extend(islice(value.values() if isinstance(value, dict) else value, _MOST_ITEMS))
        elif isinstance(value, tuple):
            upcoming.extend(value[:_MOST_ITEMS])
        elif isinstance(value, partial):
            upcoming.extend([value.func, *value.args, *value.keywords.values()])
        elif isinstance(value, MethodType):
            upcoming.extend([value.__func__, value.__self__])
        else:
            for write, held in _slots(value):
                restores.append(partial(write, held))
                upcoming.append(held)
    return restore_all(restores)


def _slots(value: object) -> Iterator[tuple[Callable[[Any], object], Any]]:
    """Yield the values that a function or a user's object keeps, each with the function that writes it."""
    if isinstance(value, FunctionType):
        held = value.__globals__
        if str(held.get("__name__")).startswith("torch."):
            return
        for cell in value.__closure__ or ():
            with suppress(ValueError):  # the variable has no value yet
                yield partial(setattr, cell, "cell_contents"), cell.cell_contents
        for name in _names_in(value.__code__):
            if name in held:
                yield partial(held.__setitem__, name), held[name]
    is_users = type(value).__module__.partition(".")[0] not in _PACKAGES
    attributes = getattr(value, "__dict__", None)
    if isinstance(attributes, dict) and (is_users or isinstance(value, FunctionType | SimpleNamespace)):
        yield from ((partial(attributes.__setitem__, name), each) for name, each in list(attributes.items()))


def _refill(container: Any, items: Any) -> None:
    container.clear()
    container.extend(items) if isinstance(container, list | deque) else container.update(items)


def metrics_in(module: nn.Module) -> list[nn.Module]:
    """Return the modules in `module` that have no parameters, nor have those in them: metrics, not parts of a teacher."""
    if next(module.parameters(), None) is None:
        return list(module.modules())
    return [metric for child in module.children() for metric in metrics_in(child)]


def _references(value: object) -> Sequence[object]:
    if not isinstance(value, FunctionType):
        return gc.get_referents(value)[:_MOST_ITEMS]
    held = value.__globals__
    if str(held.get("__name__")).startswith("torch."):
        return ()  # `torch.nn.functional` has no metrics
    defaults = [*(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values()]
    return [*(value.__closure__ or ()), *defaults, *(held[name] for name in _names_in(value.__code__) if name in held)]


def _names_in(code: CodeType) -> list[str]:
    inner = (_names_in(const) for const in code.co_consts if isinstance(const, CodeType))
    return [*code.co_names, *(name for names in inner for name in names)]


def snapshot_modules(modules: Iterable[nn.Module]) -> Restore:
    """Snapshot attributes, hooks and buffers of modules; return a function that restores them."""
    modules = list(modules)
    return restore_all([snapshot_attributes(modules), *(snapshot_value(module._buffers) for module in modules)])
