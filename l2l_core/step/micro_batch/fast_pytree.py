"""Flatten and unflatten arguments and outputs of layers, faster than PyTorch's pytrees.

Tuples, lists and dicts of tensors and plain values are handled here. Other trees are passed to PyTorch, with caches as leaves.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from l2l_core._torch import pytree
from l2l_core.model import is_cache
from l2l_core.step.graph import GuardedTensor

_LEAF_TYPES = frozenset(
    (torch.Tensor, torch.nn.Parameter, GuardedTensor, type(None), bool, int, float, str, torch.dtype, torch.device)
)


def flatten(tree: Any) -> tuple[list[Any], Any]:
    """Return the leaves of a tree in order, and the spec for `unflatten`."""
    leaves: list[Any] = []
    try:
        return leaves, _spec_of(tree, leaves)
    except TypeError:  # another type of value
        return pytree.tree_flatten(tree, is_leaf=is_cache)


def unflatten(leaves: Sequence[Any], spec: Any) -> Any:
    """Build the tree with this spec from leaves."""
    return pytree.tree_unflatten(leaves, spec) if isinstance(spec, pytree.TreeSpec) else _build(iter(leaves), spec)


def _spec_of(tree: Any, leaves: list[Any]) -> Any:
    """Return None for a leaf, else (type, keys of a dict, specs of parts)."""
    kind = type(tree)
    if kind in _LEAF_TYPES:
        leaves.append(tree)
        return None
    if kind is not tuple and kind is not list and kind is not dict:
        raise TypeError
    parts = [_spec_of(part, leaves) for part in (tree.values() if kind is dict else tree)]
    return kind, list(tree) if kind is dict else None, parts


def _build(leaves: Iterator[Any], spec: Any) -> Any:
    if spec is None:
        return next(leaves)
    kind, keys, parts = spec
    items = [_build(leaves, part) for part in parts]
    return dict(zip(keys, items, strict=True)) if kind is dict else kind(items)
