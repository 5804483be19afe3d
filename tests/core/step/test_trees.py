"""Trees of arguments: taken apart as PyTorch's pytrees do it, and put together again as they were."""

from __future__ import annotations

from collections import OrderedDict, defaultdict, namedtuple
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils import _pytree as pytree
from transformers import DynamicCache
from transformers.modeling_outputs import BaseModelOutput

from l2l_core.model import is_cache
from l2l_core.step.micro_batch.fast_pytree import flatten, unflatten

Pair = namedtuple("Pair", "left right")


class Plain:
    """No pytree."""


LEAVES = st.sampled_from([torch.zeros(2), torch.nn.Parameter(torch.ones(1)), None, True, 3, 0.5, "x", torch.float32])
UNUSUAL = st.sampled_from(
    [Plain(), DynamicCache(), Pair(torch.zeros(1), 2), OrderedDict(a=1), defaultdict(list), (), [], {}]
)


def trees(leaves: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.recursive(
        leaves,
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.lists(inner, max_size=3).map(tuple)
            | st.dictionaries(st.sampled_from("abc"), inner, max_size=3)
            | st.tuples(inner, inner).map(lambda two: Pair(*two))
        ),
        max_leaves=8,
    )


def same(a: Any, b: Any) -> bool:
    """Whether two trees have the same containers, keys in the same order, and the very same leaves."""
    if type(a) is not type(b):
        return False
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(a[key], b[key]) for key in a)
    if isinstance(a, tuple | list):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    return a is b


@given(trees(LEAVES | UNUSUAL))
def test_leaves_are_those_of_pytrees_and_come_together_again(tree: Any) -> None:
    leaves, spec = flatten(tree)
    theirs = pytree.tree_flatten(tree, is_leaf=is_cache)[0]
    assert len(leaves) == len(theirs) and all(a is b for a, b in zip(leaves, theirs, strict=True))
    assert same(unflatten(leaves, spec), tree)


@pytest.mark.parametrize(
    "tree", [torch.zeros(1), None, (), {"a": []}, [[], ({},)], BaseModelOutput(torch.zeros(1))], ids=str
)
def test_edges(tree: Any) -> None:
    leaves, spec = flatten(tree)
    new = unflatten([object() for _ in leaves], spec)
    assert type(new) is (object if spec is None else type(tree))
    assert same(unflatten(leaves, spec), tree) or isinstance(tree, BaseModelOutput)


def test_plain_trees_do_not_ask_pytrees(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pytree, "tree_flatten", None)
    leaves, spec = flatten(
        ((torch.zeros(1), None), {"mask": torch.ones(1), "position": (torch.ones(1), torch.ones(2))})
    )
    assert len(leaves) == 5 and len(unflatten(leaves, spec)) == 2
