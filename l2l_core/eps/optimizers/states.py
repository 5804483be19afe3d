"""What an optimizer knows of a parameter: tensors and values, in lists, dictionaries, deques: copied, counted, compared."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

from l2l_core.eps.optimizers.settings import is_same


def clone_state(state: Mapping[str, Any]) -> dict[str, Any]:
    """Copy what the optimizer knows of a parameter; tensors may be in containers of it."""
    return {name: pytree.tree_map(_copied, value) for name, value in state.items()}


def _copied(leaf: Any) -> Any:
    return leaf.clone() if isinstance(leaf, torch.Tensor) else copy.deepcopy(leaf)


def state_bytes(state: Mapping[str, Any]) -> int:
    """Count the bytes of tensors in what the optimizer knows of a parameter."""
    return sum(leaf.nbytes for value in state.values() for leaf in _leaves(value) if isinstance(leaf, torch.Tensor))


def _leaves(value: Any) -> Sequence[Any]:
    return pytree.tree_leaves(value) if isinstance(value, list | tuple | dict | deque) else (value,)


def differing(one: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
    """List the names of what differs in what two optimizers know of a parameter."""
    both = {**one, **other}
    return [name for name in both if name not in one or name not in other or not _alike(one[name], other[name])]


def _alike(one: Any, other: Any) -> bool:
    """Compare values of an optimizer's state; what is no plain value, by what it says of itself."""
    ones, others = pytree.tree_leaves(one), pytree.tree_leaves(other)
    if len(ones) != len(others):
        return False
    pairs = zip(ones, others, strict=True)
    return all(is_same(a, b) if isinstance(a, torch.Tensor) else is_same(a, b) or repr(a) == repr(b) for a, b in pairs)
