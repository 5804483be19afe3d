"""An optimizer in parts: twins of it over other parameters, and updates of some of its parameters at a time.

A part shares the state of the whole and is lent its settings (`optimizer_settings.py`). `optimizer_conformance.py` checks whether updates
in parts give the same bits as one step over all.
"""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from types import MethodType
from typing import Any

from torch import nn
from torch.optim import Optimizer

from l2l_core.eps.optimizers.optimizer_settings import (
    SettingChanges,
    changes_of,
    copy_plain,
    copy_settings,
    settings_of,
)
from l2l_core.eps.optimizers.step_hooks import step_part

_PER_INSTANCE = (
    "param_groups",
    "state",
    "step",
    "zero_grad",
)  # the last two: a scheduler's wrappers around the methods


def clone_shallow(optimizer: Optimizer, groups: list[dict[str, Any]], state: Any) -> Optimizer:
    """Make an optimizer of the same kind over other parameter groups, with settings of its own.

    Its hooks and wrappers stay behind. What is no plain value (a dictionary by parameter, say) it has in common with
    `optimizer`, as a part must; `copy_over` shares nothing.
    """
    twin = object.__new__(type(optimizer))  # the arguments of its constructor are not known
    kept = {name: value for name, value in optimizer.__dict__.items() if name not in _PER_INSTANCE}
    twin.__dict__.update({name: _rebind_method(twin, copy_plain(value), optimizer) for name, value in kept.items()})
    twin.defaults = {name: copy_plain(value) for name, value in optimizer.defaults.items()}
    twin.param_groups, twin.state = (
        [{name: copy_plain(value) for name, value in group.items()} for group in groups],
        state,
    )
    for name in _hook_attributes(optimizer):
        twin.__dict__[name] = OrderedDict()
    return twin


def clone_deep(
    optimizer: Optimizer, groups: list[dict[str, Any]], state: Any, counterparts: Mapping[Any, Any]
) -> Optimizer:
    """Make an optimizer of the same kind over other groups; it shares nothing with `optimizer`, and has no hooks.

    Args:
        groups: with the new parameters; the other values are copied, however deep.
        state: of the new parameters.
        counterparts: what stands for what, wherever the optimizer refers to it: parameters, the model.
    """
    twin = object.__new__(type(optimizer))
    memo = {id(old): new for old, new in counterparts.items()} | {id(optimizer): twin}
    kept = {
        name: value
        for name, value in optimizer.__dict__.items()
        if name not in (*_PER_INSTANCE, *_hook_attributes(optimizer))
    }
    twin.__dict__.update({name: _deep_copy(value, memo) for name, value in kept.items()})
    twin.param_groups = [
        {name: value if name == "params" else _deep_copy(value, memo) for name, value in group.items()}
        for group in groups
    ]
    twin.state = state
    for name in _hook_attributes(optimizer):
        twin.__dict__[name] = OrderedDict()
    return twin


def _rebind_method(twin: Optimizer, value: Any, optimizer: Optimizer) -> Any:
    """Bind a method that the optimizer keeps as an attribute to the twin; other values stay."""
    is_method = isinstance(value, MethodType) and value.__self__ is optimizer
    return MethodType(value.__func__, twin) if is_method else value


def _hook_attributes(optimizer: Optimizer) -> list[str]:
    return [name for name in optimizer.__dict__ if name.startswith("_optimizer_") and name.endswith("_hooks")]


def _deep_copy(value: Any, memo: dict[int, Any]) -> Any:
    try:
        return copy.deepcopy(value, memo)
    except Exception:  # a lock, a file, a tensor with a graph
        return value


def replace_params(optimizer: Optimizer, new: Mapping[nn.Parameter, nn.Parameter]) -> None:
    """Let `optimizer` update `new[p]` wherever it updated `p`; groups, order and state are kept."""
    for group in optimizer.param_groups:
        group["params"] = [new.get(param, param) for param in group["params"]]
    for old, param in new.items():
        if old in optimizer.state:
            optimizer.state[param] = optimizer.state.pop(old)


def restrict_optimizer(optimizer: Optimizer, params: Sequence[nn.Parameter]) -> Optimizer:
    """Restrict `optimizer` to some of its parameters; state is shared with it, settings are lent (`optimizer_settings.py`)."""
    wanted = set(params)  # groups stay, empty ones too: parts and the whole are paired group by group
    groups = [{**g, "params": [p for p in g["params"] if p in wanted]} for g in optimizer.param_groups]
    return clone_shallow(optimizer, groups, optimizer.state)


def scale_lr(part: Optimizer, factor: float) -> None:
    """Multiply the learning rate of every group, until the settings are taken over again."""
    if factor != 1.0:
        for group in part.param_groups:
            group["lr"] = group["lr"] * factor


def update_part(part: Optimizer, whole: Optimizer, lr_factor: float = 1.0) -> SettingChanges:
    """Let a part of an optimizer update its parameters, at `rate` times the learning rate.

    Returns what it made of the settings; `settle` them when all parts of the step have had their turn.
    """
    copy_settings(whole, part)
    scale_lr(part, lr_factor)
    given = settings_of(part)  # after scaling, which is no change that the part makes
    step_part(part)
    changes = changes_of(part, given)
    # A rate that follows from a scaled one is the part's alone
    return changes if lr_factor == 1.0 else {place: value for place, value in changes.items() if place[1] != "lr"}
