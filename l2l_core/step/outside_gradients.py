"""Gradients of leaves outside of the model, such as a head in the loss, around steps that are undone."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import wraps
from typing import Any

import torch
from torch import nn

from l2l_core._torch import AccumulateGrad, pytree


class OutsideGradients:
    """Keeps the gradients that leaves outside of the model have before backward, and restores them.

    Args:
        params: the parameters of the model, which are left alone.
    """

    def __init__(self, params: Iterable[nn.Parameter]) -> None:
        self._params = set(params)
        self._before: dict[torch.Tensor, tuple[torch.Tensor | None, torch.Tensor | None]] = {}

    def keeping(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a function that returns a loss or outputs, a pytree, from which backward starts later."""

        @wraps(function)
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            outputs = function(*args, **kwargs)
            for leaf in _leaves_of(outputs):
                if leaf not in self._params and leaf not in self._before:
                    grad = leaf.grad
                    self._before[leaf] = grad, None if grad is None else grad.detach().clone()
            return outputs

        return wrapped

    def restore(self) -> None:
        """Give the leaves the gradients that they had, with the values of then."""
        for leaf, (grad, values) in self._before.items():
            if grad is not None and values is not None:
                grad.detach().copy_(values)  # backward adds in place
            leaf.grad = grad


def _leaves_of(outputs: Any) -> Iterable[torch.Tensor]:
    upcoming = [each.grad_fn for each in pytree.tree_leaves(outputs) if isinstance(each, torch.Tensor)]
    seen = set(upcoming)
    while upcoming:
        node = upcoming.pop()
        if node is None:
            continue
        if type(node) is AccumulateGrad:
            yield node.variable  # pyright: ignore[reportAttributeAccessIssue]  # not in the stubs
        parents = {parent for parent, _ in node.next_functions} - seen
        seen |= parents
        upcoming += parents
