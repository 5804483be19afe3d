"""Modules that a loss function uses beside the model, such as metrics."""

from __future__ import annotations

import gc
from collections import deque
from collections.abc import Iterable, Sequence
from types import CodeType, FunctionType, ModuleType

import torch
from torch import nn

from l2l_core.model import Restore, names_in, restore_all, snapshot_attributes, snapshot_value

_NOT_SEARCHED = (torch.Tensor, ModuleType, type, CodeType, str, bytes, int, float)
_MOST_ITEMS, _MOST_OBJECTS = 100, 1000  # a longer container holds data


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
    """Snapshot attributes, hooks and buffers of modules; return a function that restores them."""
    modules = list(modules)
    return restore_all([snapshot_attributes(modules), *(snapshot_value(module._buffers) for module in modules)])
