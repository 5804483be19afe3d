"""What an optimizer keeps beside the state of its parameters: settings and counters, in groups, defaults and attributes.

An optimizer that runs block by block would count a step once per block, or each part would count for itself. So a part
starts every update with copies of the whole's settings, and what it makes of them is taken over once, when the step is
over: the whole has counted one step, as in core.

Only plain values travel so: numbers, strings, small tensors, and containers of them. Anything else (a dictionary by
parameter, an object) the parts have in common.
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

OptimizerSettings = list[dict[str, Any]]  # of the instance, of its defaults, of each group
SettingChanges = dict[tuple[int, str], Any]  # which of these, name -> value

_ATOMS = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)
_IMMUTABLE = frozenset(_ATOMS)
_SMALL = 64  # elements: a tensor of more is no setting
_SHARED_VALUE = "\0in common"  # in place of what is no plain value
_ABSENT = object()
_TORCH_FLAGS = ("_opt_called", "_warned_capturable_if_run_uncaptured", "_zero_grad_profile_name")  # PyTorch's own notes
_NOT_SETTINGS = frozenset({"params", "param_names", "param_groups", "state", "defaults", *_TORCH_FLAGS})


def settings_of(optimizer: Optimizer) -> OptimizerSettings:
    """Copy the plain values; of the others say only that there are such."""
    return [
        {n: copy_plain(value) if is_plain(value) else _SHARED_VALUE for n, value in held.items() if _is_setting(n)}
        for held in _holders(optimizer)
    ]


def settings_to_save(optimizer: Optimizer) -> tuple[OptimizerSettings, OptimizerSettings]:
    """Give what a save holds: plain values of attributes and defaults, and all that is in the groups but parameters."""
    groups = [{name: value for name, value in group.items() if _is_setting(name)} for group in optimizer.param_groups]
    return settings_of(optimizer)[:2], groups


def copy_settings(whole: Optimizer, part: Optimizer) -> None:
    """Give a part the state of the whole, and settings of its own that are equal to those of the whole."""
    part.state = whole.state  # anew every time: `load_state_dict` gives the whole another one
    for theirs, mine in zip(_holders(whole), _holders(part), strict=True):
        if not mine.keys() <= theirs.keys():
            for name in [name for name, value in mine.items() if name not in theirs and _is_plain_setting(name, value)]:
                del mine[name]
        other = [(name, value) for name, value in theirs.items() if not _is_same_atom(value, mine.get(name, _ABSENT))]
        # Not of the instance: hooks and bound methods among its attributes are the part's own
        in_common = () if theirs is whole.__dict__ else [item for item in other if item[0] not in _NOT_SETTINGS]
        mine.update(in_common)  # of groups and defaults also what is no plain value
        mine.update([(name, copy_plain(value)) for name, value in other if _is_plain_setting(name, value)])


def changes_of(part: Optimizer, given: OptimizerSettings) -> SettingChanges:
    """Find what a part has made of the settings that it was given."""
    return {
        (index, name): copy_plain(value)
        for index, (held, before) in enumerate(zip(_holders(part), given, strict=True))
        for name, value in held.items()
        if not _is_same_atom(value, before.get(name, _ABSENT))
        and _is_plain_setting(name, value)
        and (name not in before or not is_same(value, before[name]))
    }


def merge_changes(changes: SettingChanges, more: SettingChanges) -> None:
    """Add what another part has made of the settings in the same step.

    Raises:
        ValueError: another part has made something else of one of them, so they do not count the step alike.
    """
    unlike = [place for place, value in more.items() if place in changes and not is_same(changes[place], value)]
    if unlike:
        _, name = unlike[0]
        raise ValueError(
            f"the optimizer has made {changes[unlike[0]]!r} of its setting {name!r} for one layer and {more[unlike[0]]!r} for "
            "another: it computes it from several layers, or from a learning rate that warms up. Use an optimizer that "
            "treats each parameter by itself, and insert layers with warmup=0"
        )
    changes.update(more)


def apply_changes(whole: Optimizer, changes: SettingChanges) -> None:
    """Take over what parts have made of the settings; a tensor stays the one that others hold."""
    holders = _holders(whole)
    for (index, name), value in changes.items():
        held = holders[index].get(name)
        if isinstance(held, torch.Tensor) and isinstance(value, torch.Tensor) and held.shape == value.shape:
            with torch.no_grad():
                held.copy_(value)
        else:
            holders[index][name] = value


def load_settings(optimizer: Optimizer, settings: OptimizerSettings, exact: bool = True) -> None:
    """Give an optimizer the settings that another moment, or another process, had; they are its own from now on.

    Args:
        settings: of the instance, its defaults and its groups, or of its groups alone.
        only: whether plain values that are not among them go. What is no plain value stays as it is; an enumeration's stays one.
    """
    holders = _holders(optimizer)
    for held, wanted in zip(holders[len(holders) - len(settings) :], settings, strict=True):
        for name in [
            name for name, value in held.items() if exact and name not in wanted and _is_plain_setting(name, value)
        ]:
            del held[name]
        for name, value in wanted.items():
            if not (isinstance(value, str) and value == _SHARED_VALUE):
                held[name] = type(old)(value) if isinstance(old := held.get(name), Enum) else value


def differing_settings(one: OptimizerSettings, other: OptimizerSettings) -> list[str]:
    """List the names of settings and counters that differ; values that are not plain are not compared.

    A learning-rate scheduler replaces `step` of the instance by a function, on one side alone.
    """
    names = (
        name
        for ours, theirs in zip(one, other, strict=True)
        for name in {**ours, **theirs}
        if not is_same(ours.get(name, _SHARED_VALUE), theirs.get(name, _SHARED_VALUE))
    )
    return list(dict.fromkeys(names))


def copy_plain(value: Any) -> Any:
    """Copy a plain value; give the value itself if it is none."""
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
    """Tell whether it is a number, a string, a small tensor, or a container of such."""
    if isinstance(value, _ATOMS):
        return True
    if isinstance(value, torch.Tensor):  # of no class of its own, whose copies may be anything
        return type(value) is torch.Tensor and value.layout is torch.strided and value.numel() <= _SMALL
    if type(value) in (dict, OrderedDict):
        return all(isinstance(key, str | int) for key in value) and all(map(is_plain, value.values()))
    return type(value) in (list, tuple, deque, set, frozenset) and all(map(is_plain, value))


def is_same(one: Any, other: Any) -> bool:
    """Tell whether two plain values are equal and of the same types; one NaN is like another, and -0.0 is like 0.0."""
    if one is other:
        return True
    if type(one) is not type(other):  # 1, 1.0 and True are equal, and a save tells them apart
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
    same_shape = (
        one.shape == other.shape and one.layout is other.layout and not is_sparse(one) and one.is_floating_point()
    )
    return same_shape and bool(((one == other) | ((one != one) & (other != other))).all())


def _holders(optimizer: Optimizer) -> list[dict[str, Any]]:
    return [optimizer.__dict__, optimizer.defaults, *optimizer.param_groups]


def _is_same_atom(one: Any, other: Any) -> bool:
    """Tell whether it is one value that nobody can change; of most settings that is all there is to find out."""
    return one is other and type(one) in _IMMUTABLE


@cache
def _is_setting(name: str) -> bool:
    return name not in _NOT_SETTINGS and not name.startswith("_optimizer_")


def _is_plain_setting(name: str, value: Any) -> bool:
    return _is_setting(name) and is_plain(value)
