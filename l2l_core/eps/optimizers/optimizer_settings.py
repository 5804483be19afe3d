"""Optimizer settings (values and counters in groups, defaults and attributes), and the state of parameters beside them.

Run block by block, an optimizer would count a step once per block, or each part would count separately. So a part starts every
update with copies of the whole optimizer's settings, and its changes are applied once, at the end of the step: the whole counts
one step, as in core.

Only plain values are copied: numbers, strings, small tensors, and containers of them. Parts share all other values (a dictionary
by parameter, an object).
"""

from __future__ import annotations

import math
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Mapping
from copy import deepcopy
from enum import Enum
from functools import cache
from typing import Any

import torch
from torch.optim import Optimizer

from l2l_core._torch import is_traceable_wrapper_subclass, pytree
from l2l_core.eps.optimizers.optimizer_list import members_of, with_members
from l2l_core.model import equal_values, is_sparse, restore_all, snapshot_except, snapshot_value

OptimizerSettings = list[dict[str, Any]]  # of the instance, its defaults, each group
SettingChanges = dict[tuple[int, str], Any]  # (index in OptimizerSettings, name) -> new value

_ATOMS = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)
_SMALL = 64  # elements: a larger tensor is not a setting
_SHARED_VALUE = "\0in common"  # marks a value that is not plain
# PyTorch's internal notes
_TORCH_FLAGS = ("_opt_called", "_warned_capturable_if_run_uncaptured", "_zero_grad_profile_name")
_NOT_SETTINGS = frozenset({"params", "param_names", "param_groups", "state", "defaults", *_TORCH_FLAGS})


def user_objects_of(optimizer: Optimizer) -> list[object]:
    """Return an optimizer's class and its attributes except groups and state, for `snapshot_user_state`."""
    no_attributes = ("param_groups", "state", "defaults", "optimizers")
    held = ((type(each), vars(each)) for each in with_members(optimizer))
    return [
        value
        for kind, attributes in held
        for value in (kind, *(value for name, value in attributes.items() if name not in no_attributes))
    ]


def snapshot_optimizer(optimizer: Optimizer, with_state: bool = False) -> Callable[[], object]:
    """Snapshot attributes, groups and defaults of an optimizer, and of those in a list; return what restores them."""
    held = map(vars, with_members(optimizer))
    return restore_all([snapshot_value(each) if with_state else snapshot_except(each, {"state"}) for each in held])


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
    for theirs, mine in zip(members_of(whole), members_of(part), strict=True):
        mine.state = theirs.state  # every time, since `load_state_dict` replaces it
    for theirs, mine in zip(_holders(whole), _holders(part), strict=True):
        for name in [name for name, value in mine.items() if name not in theirs and _is_plain_setting(name, value)]:
            del mine[name]
        for name, value in theirs.items():
            if _is_plain_setting(name, value):
                mine[name] = copy_plain(value)
            # Groups and defaults share other values. Attributes do not: hooks and bound methods belong to the part
            elif theirs is not whole.__dict__ and name not in _NOT_SETTINGS:
                mine[name] = value


def changes_of(part: Optimizer, given: OptimizerSettings) -> SettingChanges:
    """Return the settings that a part has changed."""
    return {
        (index, name): copy_plain(value)
        for index, (held, before) in enumerate(zip(_holders(part), given, strict=True))
        for name, value in held.items()
        if _is_plain_setting(name, value) and (name not in before or not is_same(value, before[name]))
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

    They are those of the instance, its defaults and its groups, or of its groups alone. `exact` removes plain values that are not
    among them. Other values are kept; enumerations keep their type.
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
    return pytree.tree_map(
        lambda leaf: leaf.detach().clone() if isinstance(leaf, torch.Tensor) else deepcopy(leaf), value
    )


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
        if one.dtype != other.dtype or equal_values(one, other):
            return one.dtype == other.dtype
        is_comparable = one.shape == other.shape and one.layout is other.layout and not is_sparse(one)
        return is_comparable and one.is_floating_point() and torch.allclose(one, other, 0, 0, equal_nan=True)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(is_same(item, other[key]) for key, item in one.items())
    if isinstance(one, deque) and one.maxlen != other.maxlen:
        return False
    if isinstance(one, list | tuple | deque):
        return len(one) == len(other) and all(map(is_same, one, other))
    return bool(one == other) or (isinstance(one, float) and math.isnan(one) and math.isnan(other))


def _holders(optimizer: Optimizer) -> list[dict[str, Any]]:
    return [optimizer.__dict__, optimizer.defaults, *optimizer.param_groups]


@cache
def _is_setting(name: str) -> bool:
    return name not in _NOT_SETTINGS and not name.startswith("_optimizer_")


def _is_plain_setting(name: str, value: Any) -> bool:
    return _is_setting(name) and is_plain(value)


def clone_state(state: Mapping[str, Any]) -> dict[str, Any]:
    """Copy the state of a parameter, including tensors in containers."""
    return {name: pytree.tree_map(_copy_leaf, value) for name, value in state.items()}


def _copy_leaf(leaf: Any) -> Any:
    return leaf.clone() if isinstance(leaf, torch.Tensor) else deepcopy(leaf)


def state_bytes(*states: Mapping[str, Any]) -> int:
    """Return the bytes of the tensors in states; shared memory counts once."""
    sizes: dict[int, int] = {}  # by address of the memory
    for tensor in (tensor for state in states for tensor in tensors_of(state)):
        sizes.setdefault(tensor.data_ptr(), tensor.nbytes)
    return sum(sizes.values())


def tensors_of(state: Mapping[str, Any]) -> list[torch.Tensor]:
    """Return the tensors in the state of a parameter; for wrapper subclasses, the inner tensors."""
    found: list[torch.Tensor] = []
    for value in state.values():
        if type(value) is torch.Tensor:  # the common case, in a function called after every step
            found.append(value)
        else:
            leaves = pytree.tree_leaves(value) if isinstance(value, list | tuple | dict | deque) else (value,)
            found += [plain for leaf in leaves if isinstance(leaf, torch.Tensor) for plain in _plain_tensors(leaf)]
    return found


def _plain_tensors(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield the inner tensors of a wrapper subclass, such as a quantised tensor, or the tensor itself."""
    if not is_traceable_wrapper_subclass(tensor):
        yield tensor
        return
    for name in tensor.__tensor_flatten__()[0]:
        yield from _plain_tensors(getattr(tensor, name))


def differing_state(one: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
    """Return the names of values that differ between two states."""
    both = {**one, **other}
    return [name for name in both if name not in one or name not in other or not _equal_values(one[name], other[name])]


def _equal_values(one: Any, other: Any) -> bool:
    """Compare two values of an optimizer's state; values that are not plain by their `repr`."""
    ones, others = pytree.tree_leaves(one), pytree.tree_leaves(other)
    if len(ones) != len(others):
        return False
    pairs = zip(ones, others, strict=True)
    return all(is_same(a, b) if isinstance(a, torch.Tensor) else is_same(a, b) or repr(a) == repr(b) for a, b in pairs)
