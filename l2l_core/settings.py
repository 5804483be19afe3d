"""What an optimizer keeps beside the state of its parameters: settings and counters, in groups, defaults and attributes.

An optimizer that runs block by block would count a step once per block, or each part would count for itself. So a part
starts every update with copies of the whole's settings, and what it makes of them is taken over once, when the step is
over: the whole has counted one step, as in core.

Only plain values travel so: numbers, strings, small tensors, and lists and dictionaries of them. Anything else (a
dictionary by parameter, an object) the parts have in common.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

Settings = list[dict[str, Any]]  # of the instance, of its defaults, of each group
Changes = dict[tuple[int, str], Any]  # which of these, name -> value

_ATOMS = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)
_SMALL = 64  # elements: a tensor of more is no setting
_NOT_SETTINGS = frozenset({"params", "param_names", "param_groups", "state", "defaults"})


def settings_of(optimizer: Optimizer) -> Settings:
    """Copies of the plain values."""
    return [{n: own(value) for n, value in held.items() if _counts(n, value)} for held in _holders(optimizer)]


def lend(whole: Optimizer, part: Optimizer) -> None:
    """Give a part the state of the whole, and settings of its own that are equal to those of the whole."""
    part.state = whole.state
    for theirs, mine in zip(_holders(whole), _holders(part), strict=True):
        for name in [name for name, value in mine.items() if name not in theirs and _counts(name, value)]:
            del mine[name]
        in_common = (
            () if theirs is whole.__dict__ else [item for item in theirs.items() if item[0] not in _NOT_SETTINGS]
        )
        mine.update(in_common)  # of groups and defaults also what is no plain value
        mine.update((name, own(value)) for name, value in theirs.items() if _counts(name, value))


def changes_of(part: Optimizer, given: Settings) -> Changes:
    """What a part has made of the settings that it was given."""
    return {
        (index, name): own(value)
        for index, (held, before) in enumerate(zip(_holders(part), given, strict=True))
        for name, value in held.items()
        if _counts(name, value) and (name not in before or not is_same(value, before[name]))
    }


def settle(whole: Optimizer, changes: Changes) -> None:
    """Take over what parts have made of the settings; a tensor stays the one that others hold."""
    holders = _holders(whole)
    for (index, name), value in changes.items():
        held = holders[index].get(name)
        if isinstance(held, torch.Tensor) and isinstance(value, torch.Tensor) and held.shape == value.shape:
            with torch.no_grad():
                held.copy_(value)
        else:
            holders[index][name] = value


def own(value: Any) -> Any:
    """A copy of a plain value; the value itself if it is none."""
    if isinstance(value, _ATOMS):
        return value
    if not is_plain(value):
        return value
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if isinstance(value, dict):
        return {key: own(item) for key, item in value.items()}
    return [own(item) for item in value] if isinstance(value, list) else tuple(own(item) for item in value)


def is_plain(value: Any) -> bool:
    """Whether it is a number, a string, a small tensor, or a list, tuple or dictionary of such."""
    if isinstance(value, _ATOMS):
        return True
    if isinstance(value, torch.Tensor):
        return not isinstance(value, nn.Parameter) and value.layout is torch.strided and value.numel() <= _SMALL
    if type(value) is dict:
        return all(isinstance(key, str | int) for key in value) and all(map(is_plain, value.values()))
    return type(value) in (list, tuple) and all(map(is_plain, value))


def is_same(one: Any, other: Any) -> bool:
    """Whether two plain values have the same bits and types; one NaN is like another."""
    if one is other:
        return True
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and (torch.equal(one, other) or _same_with_nan(one, other))
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(is_same(item, other[key]) for key, item in one.items())
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(is_same, one, other))
    return bool(one == other) or (isinstance(one, float) and math.isnan(one) and math.isnan(other))


def _same_with_nan(one: torch.Tensor, other: torch.Tensor) -> bool:
    same_shape = one.shape == other.shape and one.is_floating_point()
    return same_shape and bool(((one == other) | ((one != one) & (other != other))).all())


def _holders(optimizer: Optimizer) -> list[dict[str, Any]]:
    return [optimizer.__dict__, optimizer.defaults, *optimizer.param_groups]


def _counts(name: str, value: Any) -> bool:
    return name not in _NOT_SETTINGS and not name.startswith("_optimizer_") and is_plain(value)
