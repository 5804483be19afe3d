"""Partial optimizers: clones over other parameters, and updates of some parameters at a time.

A part shares the state of the whole optimizer and gets copies of its settings (`optimizer_settings.py`).
`optimizer_conformance.py` checks that updates in parts give the same bits as one step over all parameters.
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

# Not copied. The last two may be a scheduler's wrappers around the methods.
_PER_INSTANCE = ("param_groups", "state", "step", "zero_grad")


def clone_shallow(optimizer: Optimizer, groups: list[dict[str, Any]], state: Any) -> Optimizer:
    """Clone an optimizer over other parameter groups, with copies of the settings and without hooks and wrappers.

    Values that are not plain (a dictionary by parameter, for example) are shared with `optimizer`, as parts need them;
    `clone_deep` shares nothing.
    """
    clone = object.__new__(type(optimizer))  # the constructor's arguments are unknown
    values = {name: value for name, value in optimizer.__dict__.items() if name not in _PER_INSTANCE}
    clone.__dict__.update({name: _rebind_method(clone, copy_plain(value), optimizer) for name, value in values.items()})
    clone.defaults = {name: copy_plain(value) for name, value in optimizer.defaults.items()}
    clone.param_groups = [{name: copy_plain(value) for name, value in group.items()} for group in groups]
    return _with_state(clone, state, optimizer)


def clone_deep(
    optimizer: Optimizer, groups: list[dict[str, Any]], state: Any, counterparts: Mapping[Any, Any]
) -> Optimizer:
    """Clone an optimizer over other groups, sharing nothing with it, without hooks.

    Args:
        optimizer: the original.
        groups: groups with the new parameters; all other values are deep-copied.
        state: state of the new parameters.
        counterparts: replacements for objects that the optimizer refers to: parameters, the model.
    """
    clone = object.__new__(type(optimizer))
    memo = {id(old): new for old, new in counterparts.items()} | {id(optimizer): clone}
    skipped = (*_PER_INSTANCE, *_hook_attributes(optimizer))
    values = {name: value for name, value in optimizer.__dict__.items() if name not in skipped}
    clone.__dict__.update({name: _deep_copy(value, memo) for name, value in values.items()})
    clone.param_groups = [
        {name: value if name == "params" else _deep_copy(value, memo) for name, value in group.items()}
        for group in groups
    ]
    return _with_state(clone, state, optimizer)


def _with_state(clone: Optimizer, state: Any, optimizer: Optimizer) -> Optimizer:
    clone.state = state
    for name in _hook_attributes(optimizer):
        clone.__dict__[name] = OrderedDict()
    return clone


def _rebind_method(clone: Optimizer, value: Any, optimizer: Optimizer) -> Any:
    """Bind a method that the optimizer keeps as an attribute to the clone; return other values unchanged."""
    is_method = isinstance(value, MethodType) and value.__self__ is optimizer
    return MethodType(value.__func__, clone) if is_method else value


def _hook_attributes(optimizer: Optimizer) -> list[str]:
    return [name for name in optimizer.__dict__ if name.startswith("_optimizer_") and name.endswith("_hooks")]


def _deep_copy(value: Any, memo: dict[int, Any]) -> Any:
    try:
        return copy.deepcopy(value, memo)
    except Exception:  # a lock, a file, a tensor with a graph
        return value


def replace_params(optimizer: Optimizer, new: Mapping[nn.Parameter, nn.Parameter]) -> None:
    """Make `optimizer` update `new[p]` instead of `p`; groups, order and state are kept."""
    for group in optimizer.param_groups:
        group["params"] = [new.get(param, param) for param in group["params"]]
    for old, param in new.items():
        if old in optimizer.state:
            optimizer.state[param] = optimizer.state.pop(old)


def restrict_optimizer(optimizer: Optimizer, params: Sequence[nn.Parameter]) -> Optimizer:
    """Return a part of `optimizer` for some of its parameters, with shared state and copied settings."""
    wanted = set(params)  # keep empty groups: parts and the whole are matched by group
    groups = [{**g, "params": [p for p in g["params"] if p in wanted]} for g in optimizer.param_groups]
    return clone_shallow(optimizer, groups, optimizer.state)


def scale_lr(part: Optimizer, factor: float) -> None:
    """Multiply the learning rate of every group, until settings are copied again."""
    if factor != 1.0:
        for group in part.param_groups:
            group["lr"] = group["lr"] * factor


def update_part(part: Optimizer, whole: Optimizer, lr_factor: float = 1.0) -> SettingChanges:
    """Update the parameters of a part, at `lr_factor` times the learning rate.

    Returns the part's changes of the settings, for `apply_changes` after all parts of the step.
    """
    copy_settings(whole, part)
    scale_lr(part, lr_factor)
    given = settings_of(part)  # after scaling, which is not a change by the part
    step_part(part)
    changes = changes_of(part, given)
    # A learning rate derived from a scaled one is not a change of the whole
    return changes if lr_factor == 1.0 else {place: value for place, value in changes.items() if place[1] != "lr"}
