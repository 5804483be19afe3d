"""Arguments and outputs of layers taken apart into leaves and put together again.

PyTorch's pytrees do that for everything, and take longer than a small layer. So what nearly all layers take and give, plain
tuples, lists and dicts of tensors and plain values, is done here; the rest is left to them, caches being leaves.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any

import torch

from l2l_core._torch import pytree
from l2l_core.model import is_cache
from l2l_core.step.graph import GuardedTensor

_LEAF_TYPES = frozenset(
    (torch.Tensor, torch.nn.Parameter, GuardedTensor, type(None), bool, int, float, str, torch.dtype, torch.device)
)


class _UnsupportedTree(Exception):
    """Something else is in the tree."""


def flatten(tree: Any) -> tuple[list[Any], Any]:
    """Take a tree apart: its leaves in order, and what `unflatten` needs besides."""
    leaves: list[Any] = []
    try:
        return leaves, _spec_of(tree, leaves)
    except _UnsupportedTree:
        return pytree.tree_flatten(tree, is_leaf=is_cache)


def unflatten(leaves: Sequence[Any], spec: Any) -> Any:
    """Put together what `flatten` has taken apart, or other leaves in the same way."""
    return pytree.tree_unflatten(leaves, spec) if isinstance(spec, pytree.TreeSpec) else _build(iter(leaves), spec)


def _spec_of(tree: Any, leaves: list[Any]) -> Any:
    """None for a leaf; of a container its type, the keys of a dict, and the specs of what is in it, or how many leaves are."""
    kind = type(tree)
    if kind in _LEAF_TYPES:
        leaves.append(tree)
        return None
    if kind is not tuple and kind is not list and kind is not dict:
        raise _UnsupportedTree
    parts = [_spec_of(part, leaves) for part in (tree.values() if kind is dict else tree)]
    return kind, list(tree) if kind is dict else None, parts if any(parts) else len(parts)


def _build(leaves: Iterator[Any], spec: Any) -> Any:
    if spec is None:
        return next(leaves)
    kind, keys, parts = spec
    items = list(islice(leaves, parts)) if isinstance(parts, int) else [_build(leaves, part) for part in parts]
    if kind is dict:
        return dict(zip(keys, items, strict=True))
    return items if kind is list else tuple(items)
