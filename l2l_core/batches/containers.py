"""Containers as programs use them for batches: what they hold, and the same container around other things.

PyTorch's pytrees know dicts, lists, tuples, namedtuples and what is registered with them (transformers' ``ModelOutput``).
Here are known besides: other mappings (``UserDict``, ``BatchEncoding``), subclasses of dict, list and tuple, and dataclasses,
frozen ones too. Of those a copy is made with other attributes; no code of theirs is asked to rebuild them.
"""

from __future__ import annotations

import copy
from collections import UserList, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.utils.rnn import PackedSequence

from l2l_core._torch import pytree

_NOT_CONTAINERS = (torch.Tensor, nn.Module, type, str, bytes, torch.Size, PackedSequence)


@dataclass(frozen=True, slots=True)
class OpenedContainer:
    """A container, one level deep.

    Attributes:
        parts: what it holds.
        names: of the parts, as code would write them behind the container's own name.
        rebuild: the same container around other parts.
        is_plain: Python's own or known to pytrees; it has no identity that a program would rely on.
    """

    parts: list[Any]
    names: list[str]
    rebuild: Callable[[Sequence[Any]], Any]
    is_plain: bool


def open_container(value: Any) -> OpenedContainer | None:
    """Open a container, one level deep; None for everything else."""
    if isinstance(value, _NOT_CONTAINERS):
        return None
    mine = id(value)  # not the value itself: pytrees leave a cycle behind, which would keep it
    parts, spec = pytree.tree_flatten(value, is_leaf=lambda part: id(part) != mine)
    if not (len(parts) == 1 and parts[0] is value):
        return OpenedContainer(
            parts, _names(value, parts), lambda others: pytree.tree_unflatten(list(others), spec), True
        )
    if isinstance(value, list | tuple):
        return OpenedContainer(list(value), _names(value, list(value)), lambda others: with_items(value, others), False)
    if isinstance(value, Mapping | UserList) or is_dataclass(value):
        return _open_object(value)
    return None


def _open_object(value: Any) -> OpenedContainer:
    items = dict(value) if isinstance(value, dict) else {}
    held = _attributes(value)
    rebuild: Callable[[Sequence[Any]], Any] = partial(_replace_parts, value, list(items), list(held))
    if isinstance(value, Mapping) and not items and not held:  # it keeps its entries where Python cannot look
        items, rebuild = dict(value), partial(_build_mapping, type(value), list(value))
    names = [f"[{key!r}]" for key in items] + ["" if name == "data" else f".{name}" for name in held]
    return OpenedContainer([*items.values(), *held.values()], names, rebuild, False)


def _attributes(value: Any) -> dict[str, Any]:
    """Return own attributes, whether they live in a dictionary or in slots."""
    slots = [field.name for field in fields(value)] if is_dataclass(value) else []
    held = {name: getattr(value, name) for name in slots if hasattr(value, name)}
    own = getattr(value, "__dict__", {})
    return held if own is value else held | dict(own)  # a dict may be its own attributes


def _replace_parts(value: Any, keys: Sequence[Any], names: Sequence[str], parts: Sequence[Any]) -> Any:
    """Copy `value` with other entries and attributes; frozen dataclasses do not ask."""
    other = copy.copy(value)
    for key, part in zip(keys, parts, strict=False):
        dict.__setitem__(other, key, part)  # not `other[key] =`: a subclass may convert, or refuse
    if getattr(value, "__dict__", None) is value:
        other.__dict__ = other
    own = getattr(other, "__dict__", {})
    for name, part in zip(names, parts[len(keys) :], strict=True):
        if name in own or not is_dataclass(other):
            own[name] = part
        else:
            object.__setattr__(other, name, part)  # a frozen dataclass refuses `setattr`
    return other


def _build_mapping(kind: Callable[[dict[Any, Any]], Any], keys: Sequence[Any], parts: Sequence[Any]) -> Any:
    return kind(dict(zip(keys, parts, strict=True)))


def _names(value: Any, parts: Sequence[Any]) -> list[str]:
    if isinstance(value, Mapping) and len(value) == len(parts):
        return [f"[{key!r}]" for key in value]
    return [f".{name}" for name in getattr(value, "_fields", ())] or [f"[{i}]" for i in range(len(parts))]


def is_sequence(value: Any) -> bool:
    """Whether this is a list of things, as opposed to a record with a place for each (a namedtuple, a size)."""
    if not isinstance(value, list | tuple | deque) or isinstance(value, torch.Size | PackedSequence):
        return False
    return not hasattr(value, "_fields") and not hasattr(value, "n_sequence_fields")


def with_items(value: Any, items: Sequence[Any]) -> Any:
    """Make a list, tuple or deque of the type of `value` with other items, be they more or fewer."""
    if isinstance(value, tuple):
        made = tuple.__new__(type(value), items)  # a subclass may take other arguments
        getattr(made, "__dict__", {}).update(getattr(value, "__dict__", {}))
        return made
    other = copy.copy(value)  # so a deque keeps its maxlen, and a subclass its attributes
    other.clear()
    other.extend(items)
    return other


def map_leaves(value: Any, change: Callable[[Any], Any]) -> Any:
    """Apply `change` to whatever in `value` is no container; an object with nothing changed stays the same one."""
    opened = open_container(value)
    if opened is None:
        return change(value)
    parts = [map_leaves(part, change) for part in opened.parts]
    return value if not opened.is_plain and same_leaves(parts, opened.parts) else opened.rebuild(parts)


def map_tensors(value: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Apply `change` to every tensor in `value`."""
    return map_leaves(value, lambda leaf: change(leaf) if isinstance(leaf, torch.Tensor) else leaf)


def leaves_in(value: Any) -> list[Any]:
    """List everything in `value` that is no container, in order."""
    opened = open_container(value)
    return [value] if opened is None else [leaf for part in opened.parts for leaf in leaves_in(part)]


def same_leaves(parts: Sequence[Any], others: Sequence[Any]) -> bool:
    """Whether these hold the same things, in containers that may have been made anew."""
    ours, theirs = leaves_in(parts), leaves_in(others)
    return len(ours) == len(theirs) and all(one is other for one, other in zip(ours, theirs, strict=True))


def shapes_of(value: Any) -> tuple[Any, ...]:
    """List the shapes and types of all tensors and arrays in `value`."""
    leaves = (leaf for leaf in leaves_in(value) if hasattr(leaf, "shape") and hasattr(leaf, "dtype"))
    return tuple((tuple(leaf.shape), leaf.dtype) for leaf in leaves)


def structure_of(value: Any) -> tuple[Any, ...]:
    """List the types and numbers of dimensions of all tensors and arrays in `value`, and the names where it is a mapping."""
    names = tuple(map(str, value)) if isinstance(value, Mapping) else ()
    return (type(value).__name__, names, tuple((len(shape), str(dtype)) for shape, dtype in shapes_of(value)))


def is_record(value: Any) -> bool:
    """Whether `value` can be a batch of its own: a mapping, a sequence, or an object that holds its columns."""
    if isinstance(value, Mapping | list | tuple):
        return not isinstance(value, PackedSequence)
    return not isinstance(value, UserList | deque) and open_container(value) is not None
