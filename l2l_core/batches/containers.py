"""Open containers in batches and rebuild them around other contents.

PyTorch's pytrees cover dicts, lists, tuples, namedtuples and registered classes (transformers' ``ModelOutput``). This module
adds other mappings (``UserDict``, ``BatchEncoding``), subclasses of dict, list and tuple, dataclasses, frozen ones too, and
batches of other libraries (`library_batches.py`). They are rebuilt as a copy with other attributes, without calling their
constructors.
"""

from __future__ import annotations

import copy
from collections import UserList, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.utils.rnn import PackedSequence

from l2l_core._torch import pytree
from l2l_core.batches.library_batches import open_library_batch

_NOT_CONTAINERS = (torch.Tensor, nn.Module, type, str, bytes, torch.Size, PackedSequence)


@dataclass(frozen=True, slots=True)
class OpenedContainer:
    """A container, one level deep."""

    parts: list[Any]
    names: list[str]  # suffixes of the parts' names, such as `["x"]` or `.x`
    rebuild: Callable[[Sequence[Any]], Any]  # returns the same container around other parts
    is_plain: bool  # a pytree node; programs do not rely on the identity of such a container


def open_container(value: Any) -> OpenedContainer | None:
    """Open a container, one level deep; return None for other values."""
    if isinstance(value, _NOT_CONTAINERS):
        return None
    if (opened := open_library_batch(value)) is not None:
        return OpenedContainer(*opened, False)
    value_id = id(value)  # not the value itself: pytrees leave a reference cycle, which would keep it alive
    parts, spec = pytree.tree_flatten(value, is_leaf=lambda part: id(part) != value_id)
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
    if isinstance(value, Mapping) and not items and not held:  # its entries are not in attributes
        items, rebuild = dict(value), partial(_build_mapping, type(value), list(value))
    names = [f"[{key!r}]" for key in items] + ["" if name == "data" else f".{name}" for name in held]
    return OpenedContainer([*items.values(), *held.values()], names, rebuild, False)


def _attributes(value: Any) -> dict[str, Any]:
    """Return an object's attributes, from its dictionary and its slots."""
    slots = [field.name for field in fields(value)] if is_dataclass(value) else []
    held = {name: getattr(value, name) for name in slots if hasattr(value, name)}
    own = getattr(value, "__dict__", {})
    return held if own is value else held | dict(own)  # a dict may be its own attributes


def _replace_parts(value: Any, keys: Sequence[Any], names: Sequence[str], parts: Sequence[Any]) -> Any:
    """Copy `value` with other entries and attributes."""
    other = copy.copy(value)
    for key, part in zip(keys, parts, strict=False):
        dict.__setitem__(other, key, part)  # not `other[key] =`: a subclass may convert or refuse values
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
    """Return whether `value` is a list of items, as opposed to a record such as a namedtuple or a size."""
    if not isinstance(value, list | tuple | deque) or isinstance(value, torch.Size | PackedSequence):
        return False
    return not hasattr(value, "_fields") and not hasattr(value, "n_sequence_fields")


def with_items(value: Any, items: Sequence[Any]) -> Any:
    """Return a list, tuple or deque of the type of `value` with other items, in any number."""
    if isinstance(value, tuple):
        other = tuple.__new__(type(value), items)  # the constructor of a subclass may take other arguments
        getattr(other, "__dict__", {}).update(getattr(value, "__dict__", {}))
        return other
    other = copy.copy(value)  # so a deque keeps its maxlen, and a subclass its attributes
    other.clear()
    other.extend(items)
    return other


def map_leaves(value: Any, change: Callable[[Any], Any]) -> Any:
    """Apply `change` to every leaf of `value`; an object with no changed leaf is returned itself."""
    opened = open_container(value)
    if opened is None:
        return change(value)
    parts = [map_leaves(part, change) for part in opened.parts]
    return value if not opened.is_plain and same_leaves(parts, opened.parts) else opened.rebuild(parts)


def map_tensors(value: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Apply `change` to every tensor in `value`."""
    return map_leaves(value, lambda leaf: change(leaf) if isinstance(leaf, torch.Tensor) else leaf)


def named_leaves(value: Any, where: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the values in `value` that are not containers, in order, with their names; `where` is the name of `value`."""
    opened = open_container(value)
    if opened is None:
        yield where, value
    else:
        for part, name in zip(opened.parts, opened.names, strict=True):
            yield from named_leaves(part, where + name)


def leaves_in(value: Any) -> list[Any]:
    """List the values in `value` that are not containers, in order."""
    return [leaf for _, leaf in named_leaves(value)]


def refuse_gradients(batch: Any) -> None:
    """Raise ValueError if a tensor of the batch requires a gradient, because steps train on copies without history."""
    for name, leaf in named_leaves(batch, "batch"):
        if isinstance(leaf, torch.Tensor) and leaf.requires_grad:
            raise ValueError(
                f"{name} requires a gradient, which would not arrive: the relay trains on copies of the batch, on the device. "
                "Pass it with .detach(); to train it, or the module that computes it, make that a part of the model"
            )


def same_leaves(parts: Sequence[Any], others: Sequence[Any]) -> bool:
    """Return whether both have the same leaf objects, possibly in different containers."""
    ours, theirs = leaves_in(parts), leaves_in(others)
    return len(ours) == len(theirs) and all(one is other for one, other in zip(ours, theirs, strict=True))


def shapes_of(value: Any) -> tuple[Any, ...]:
    """Return shape and dtype of all tensors and arrays in `value`."""
    leaves = (leaf for leaf in leaves_in(value) if hasattr(leaf, "shape") and hasattr(leaf, "dtype"))
    return tuple((tuple(leaf.shape), leaf.dtype) for leaf in leaves)


def structure_of(value: Any) -> tuple[Any, ...]:
    """Return type and keys of `value`, and dtype and number of dimensions of all its tensors and arrays."""
    names = tuple(map(str, value.keys())) if isinstance(value, Mapping) else ()  # a TensorDict iterates over rows
    return (type(value).__name__, names, tuple((len(shape), str(dtype)) for shape, dtype in shapes_of(value)))


def is_record(value: Any) -> bool:
    """Return whether `value` can be a batch: a mapping, a sequence, or an object with columns."""
    if isinstance(value, Mapping | list | tuple):
        return not isinstance(value, PackedSequence)
    return not isinstance(value, UserList | deque) and open_container(value) is not None
