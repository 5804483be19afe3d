"""Optimizer settings: values and counters in groups, defaults and attributes, beside the state of parameters.

Run block by block, an optimizer would count a step once per block, or each part would count separately. So a part starts every
update with copies of the whole optimizer's settings, and its changes are applied once, at the end of the step: the whole counts
one step, as in core.

Only plain values are copied: numbers, strings, small tensors, and containers of them. Parts share all other values (a dictionary
by parameter, an object).
"""

from __future__ import annotations

import math
from collections import OrderedDict, deque
from enum import Enum
from functools import cache
from typing import Any

import torch
from torch.optim import Optimizer

from l2l_core.model import equal_values, is_sparse

OptimizerSettings = list[dict[str, Any]]  # of the instance, its defaults, each group
SettingChanges = dict[tuple[int, str], Any]  # (index in OptimizerSettings, name) -> new value

_ATOMS = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)
_IMMUTABLE = frozenset(_ATOMS)
_SMALL = 64  # elements: a larger tensor is not a setting
_SHARED_VALUE = "\0in common"  # marks a value that is not plain
_ABSENT = object()
_TORCH_FLAGS = (
    "_opt_called",
    "_warned_capturable_if_run_uncaptured",
    "_zero_grad_profile_name",
)  # PyTorch's internal notes
_NOT_SETTINGS = frozenset({"params", "param_names", "param_groups", "state", "defaults", *_TORCH_FLAGS})


def settings_of(optimizer: Optimizer) -> OptimizerSettings:
    """Copy the plain values; other values are replaced by a marker."""
    return [
        {n: copy_plain(value) if is_plain(value) else _SHARED_VALUE for n, value in held.items() if _is_setting(n)}
        for held in _holders(optimizer)
    ]


def settings_to_save(optimizer: Optimizer) -> tuple[OptimizerSettings, OptimizerSettings]:
    """Return the contents of a save: plain values of attributes and defaults, and all values of groups except parameters."""
    groups = [{name: value for name, value in group.items() if _is_setting(name)} for group in optimizer.param_groups]
    return settings_of(optimizer)[:2], groups


def copy_settings(whole: Optimizer, part: Optimizer) -> None:
    """Give a part the state of the whole optimizer and copies of its settings."""
    part.state = whole.state  # every time, since `load_state_dict` replaces it
    for theirs, mine in zip(_holders(whole), _holders(part), strict=True):
        if not mine.keys() <= theirs.keys():
            for name in [name for name, value in mine.items() if name not in theirs and _is_plain_setting(name, value)]:
                del mine[name]
        other = [(name, value) for name, value in theirs.items() if not _is_same_atom(value, mine.get(name, _ABSENT))]
        # Groups and defaults share all values. Attributes do not: hooks and bound methods belong to the part
        shared = () if theirs is whole.__dict__ else [item for item in other if item[0] not in _NOT_SETTINGS]
        mine.update(shared)
        mine.update([(name, copy_plain(value)) for name, value in other if _is_plain_setting(name, value)])


def changes_of(part: Optimizer, given: OptimizerSettings) -> SettingChanges:
    """Return the settings that a part has changed."""
    return {
        (index, name): copy_plain(value)
        for index, (held, before) in enumerate(zip(_holders(part), given, strict=True))
        for name, value in held.items()
        if not _is_same_atom(value, before.get(name, _ABSENT))
        and _is_plain_setting(name, value)
        and (name not in before or not is_same(value, before[name]))
    }


def merge_changes(changes: SettingChanges, more: SettingChanges) -> None:
    """Add another part's changes of settings in the same step.

    Raises:
        ValueError: two parts changed a setting to different values.
    """
    unlike = [place for place, value in more.items() if place in changes and not is_same(changes[place], value)]
    if unlike:
        _, name = unlike[0]
        raise ValueError(
            f"the optimizer has computed {changes[unlike[0]]!r} as its setting {name!r} for one layer and {more[unlike[0]]!r} "
            "for another: it depends on several layers, or on a learning rate that warms up. Use an optimizer that treats each "
            "parameter by itself, and insert layers with warmup=0"
        )
    changes.update(more)


def apply_changes(whole: Optimizer, changes: SettingChanges) -> None:
    """Apply the changes of settings by parts; tensors are updated in place."""
    holders = _holders(whole)
    for (index, name), value in changes.items():
        held = holders[index].get(name)
        if isinstance(held, torch.Tensor) and isinstance(value, torch.Tensor) and held.shape == value.shape:
            with torch.no_grad():
                held.copy_(value)
        else:
            holders[index][name] = value


def load_settings(optimizer: Optimizer, settings: OptimizerSettings, exact: bool = True) -> None:
    """Set an optimizer's settings to those of another moment or process, which must not be used elsewhere.

    Args:
        optimizer: the optimizer.
        settings: of the instance, its defaults and its groups, or of its groups alone.
        exact: remove plain values that are not among them. Other values are kept; enumerations keep their type.
    """
    holders = _holders(optimizer)
    for held, wanted in zip(holders[len(holders) - len(settings) :], settings, strict=True):
        for name in [n for n, value in held.items() if exact and n not in wanted and _is_plain_setting(n, value)]:
            del held[name]
        for name, value in wanted.items():
            if not (isinstance(value, str) and value == _SHARED_VALUE):
                held[name] = type(old)(value) if isinstance(old := held.get(name), Enum) else value


def differing_settings(one: OptimizerSettings, other: OptimizerSettings) -> list[str]:
    """Return the names of settings and counters that differ; values that are not plain are not compared.

    (A learning-rate scheduler replaces `step` of the instance by a function, in one of them.)
    """
    names = (
        name
        for ours, theirs in zip(one, other, strict=True)
        for name in {**ours, **theirs}
        if not is_same(ours.get(name, _SHARED_VALUE), theirs.get(name, _SHARED_VALUE))
    )
    return list(dict.fromkeys(names))


def copy_plain(value: Any) -> Any:
    """Copy a plain value; return any other value itself."""
    if isinstance(value, _ATOMS) or not is_plain(value):
        return value
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if isinstance(value, dict):
        return type(value)((key, copy_plain(item)) for key, item in value.items())
    if isinstance(value, deque):
        return deque(map(copy_plain, value), value.maxlen)
    return type(value)(map(copy_plain, value))


def is_plain(value: Any) -> bool:
    """Return whether a value is a number, a string, a small tensor, or a container of these."""
    if isinstance(value, _ATOMS):
        return True
    if isinstance(value, torch.Tensor):  # no subclass, whose copies may be anything
        return type(value) is torch.Tensor and value.layout is torch.strided and value.numel() <= _SMALL
    if type(value) in (dict, OrderedDict):
        return all(isinstance(key, str | int) for key in value) and all(map(is_plain, value.values()))
    return type(value) in (list, tuple, deque, set, frozenset) and all(map(is_plain, value))


def is_same(one: Any, other: Any) -> bool:
    """Return whether two plain values have equal values and types; NaN equals NaN, and -0.0 equals 0.0."""
    if one is other:
        return True
    if type(one) is not type(other):  # 1, 1.0 and True are equal, but not in a save
        return False
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and (equal_values(one, other) or _same_with_nan(one, other))
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(is_same(item, other[key]) for key, item in one.items())
    if isinstance(one, deque) and one.maxlen != other.maxlen:
        return False
    if isinstance(one, list | tuple | deque):
        return len(one) == len(other) and all(map(is_same, one, other))
    return bool(one == other) or (isinstance(one, float) and math.isnan(one) and math.isnan(other))


def _same_with_nan(one: torch.Tensor, other: torch.Tensor) -> bool:
    if one.shape != other.shape or one.layout is not other.layout or is_sparse(one) or not one.is_floating_point():
        return False
    return bool(((one == other) | ((one != one) & (other != other))).all())


def _holders(optimizer: Optimizer) -> list[dict[str, Any]]:
    return [optimizer.__dict__, optimizer.defaults, *optimizer.param_groups]


def _is_same_atom(one: Any, other: Any) -> bool:
    """Return whether both are one immutable object, which is true of most settings."""
    return one is other and type(one) in _IMMUTABLE


@cache
def _is_setting(name: str) -> bool:
    return name not in _NOT_SETTINGS and not name.startswith("_optimizer_")


def _is_plain_setting(name: str, value: Any) -> bool:
    return _is_setting(name) and is_plain(value)
