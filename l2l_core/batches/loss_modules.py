"""Modules that a loss function uses beside the model, such as metrics."""

from __future__ import annotations

import gc
from collections import deque
from collections.abc import Hashable, Iterable, Iterator, Sequence
from functools import partial
from types import CellType, CodeType, FunctionType, MethodType, ModuleType

import torch
from torch import nn

from l2l_core.model import Restore, names_in, restore_all, snapshot_attributes, snapshot_value

_NOT_SEARCHED = (torch.Tensor, ModuleType, type, CodeType, str, bytes, int, float)
_MOST_ITEMS, _MOST_OBJECTS = 100, 1000  # a longer container holds data
_MOST_ELEMENTS = 2**24
_SETTINGS_DEPTH = 2  # references from a loss to its settings: its attributes and variables, and those of such an object


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


def settings_of(function: object) -> tuple[Hashable, ...]:
    """Return the settings of a loss: flags, strings and types of its values; of a number, whether it is 0.

    They change when a user switches a term on, or a mean to a sum; a counter changes them once.
    """
    found: list[Hashable] = []
    upcoming, depth = [function], 0
    while upcoming and depth < _SETTINGS_DEPTH:
        values = [(name, value) for each in upcoming for name, value in _named_values(each)]
        found += [(name, _mark(value)) for name, value in values]
        upcoming = [value for _, value in values if not isinstance(value, _NOT_SEARCHED)]
        depth += 1
    return tuple(found[:_MOST_OBJECTS])


def _named_values(value: object) -> Iterator[tuple[str, object]]:
    if isinstance(value, MethodType):
        yield from (("self", value.__self__), ("function", value.__func__))
    elif isinstance(value, partial):
        yield from ((str(i), each) for i, each in enumerate([value.func, *value.args]))
        yield from value.keywords.items()
    elif isinstance(value, FunctionType):
        if not str(value.__module__).startswith("torch."):
            names = value.__code__.co_freevars
            cells = [cell.cell_contents if _has_value(cell) else None for cell in value.__closure__ or ()]
            yield from zip(names, cells, strict=True)
            held = value.__globals__
            yield from ((name, held[name]) for name in names_in(value.__code__) if name in held)
    elif isinstance(value, dict):
        if len(value) <= _MOST_ITEMS:
            yield from ((str(name), each) for name, each in value.items())
    elif not isinstance(value, _NOT_SEARCHED):
        attributes = vars(value) if hasattr(value, "__dict__") else {}
        yield from ((name, each) for name, each in attributes.items() if not name.startswith("_"))


def _has_value(cell: CellType) -> bool:
    try:
        return cell.cell_contents is not cell
    except ValueError:  # the variable has no value yet
        return False


def _mark(value: object) -> Hashable:
    if value is None or isinstance(value, bool | str):
        return value
    return (type(value).__name__, bool(value)) if isinstance(value, int | float) else type(value).__name__


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
    return [*(value.__closure__ or ()), *defaults, *(held[name] for name in names_in(value.__code__) if name in held)]


def snapshot_modules(modules: Iterable[nn.Module]) -> Restore:
    """Snapshot attributes, hooks, buffers and parameters of modules; return a function that restores them.

    Parameters of more than `_MOST_ELEMENTS` elements in all are left out: those of a large teacher, which is seldom averaged.
    """
    modules = list(modules)
    params = list(dict.fromkeys(param for module in modules for param in module.parameters(recurse=False)))
    if sum(param.numel() for param in params) > _MOST_ELEMENTS:
        params = []
    buffers = (snapshot_value(module._buffers) for module in modules)
    return restore_all([snapshot_attributes(modules), *buffers, *map(_snapshot_param, params)])


def _snapshot_param(param: nn.Parameter) -> Restore:
    data, restore = param.data, snapshot_value(param.data)

    def restore_param() -> None:
        if param.data_ptr() != data.data_ptr():  # the loss has assigned other data
            param.data = data
        restore()

    return restore_param
