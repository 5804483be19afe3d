"""What the crossing has to know of an operation of shell code before it runs, and of a tensor that it may change."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import torch

# Functions that mean the tensor itself, not what flows through it.
_HOOKS = frozenset((torch.Tensor.register_hook, torch.Tensor.retain_grad))
_ON_OBJECT = _HOOKS | frozenset(
    getattr(torch.Tensor, name)
    for name in ("register_post_accumulate_grad_hook", "requires_grad_", "detach_", "__hash__", "__repr__")
)
_BACKWARD = frozenset((torch.autograd.grad, torch.autograd.backward, torch.Tensor.backward))
_VIEW_PROPERTIES = ("T", "mT", "H", "mH", "real", "imag")  # properties that make a differentiable view
_IN_PLACE = frozenset(
    f"__i{name}__"
    for name in ["add", "and", "floordiv", "lshift", "mod", "mul", "or", "pow", "rshift", "sub", "truediv", "xor"]
)


class FunctionTraits(NamedTuple):
    """What the crossing has to know of a function.

    Attributes:
        hooks: it puts a hook on the tensor.
        asks_the_graph: it gives out the tensor's node, on which hooks can be put that nobody sees.
        asks_the_object: it means the tensor itself, not what flows through it: an attribute that is no view, a hook.
        differentiates: it runs backward.
        is_in_place: it changes its first argument.
    """

    adds_hook: bool
    reads_grad_fn: bool
    acts_on_object: bool
    runs_backward: bool
    is_in_place: bool


@lru_cache(maxsize=4096)
def traits_of(func: Any) -> FunctionTraits:
    """Say what a function is; asked of every operation, so it is kept."""
    name = getattr(func, "__name__", "")
    of = getattr(func.__self__, "__name__", "") if name == "__get__" else ""
    sets, gets = name == "__set__", name == "__get__" and of not in _VIEW_PROPERTIES
    changes = name == "__setitem__" or name in _IN_PLACE or (name.endswith("_") and not name.endswith("__"))
    return FunctionTraits(
        func in _HOOKS, of == "grad_fn", func in _ON_OBJECT or sets or gets, func in _BACKWARD, changes
    )


class StorageExtent(NamedTuple):
    """Where what a layer gives out lies.

    Attributes:
        storage, first, last: which bytes it may touch.
        is_view: whether it is a view in the layer.
        keeps_strides: whether a gradient in its strides gives its base one in the base's.
    """

    storage: int
    first: int
    last: int
    is_view: bool
    keeps_strides: bool

    @staticmethod
    def of(tensor: torch.Tensor) -> StorageExtent:
        base, shape = tensor._base, tensor.shape
        strides = [stride for stride, size in zip(tensor.stride(), shape, strict=True) if size > 1]
        last = sum((size - 1) * stride for size, stride in zip(shape, tensor.stride(), strict=True) if size > 1)
        first = tensor.storage_offset()
        is_whole = base is None or tensor.numel() == base.numel()
        in_order = base is None or (base.is_contiguous() and strides == sorted(strides, reverse=True))
        storage = tensor.untyped_storage()._cdata
        return StorageExtent(storage, first, first + last, base is not None, is_whole or in_order)

    def overlaps(self, other: StorageExtent) -> bool:
        """Whether another one may lie in the same bytes."""
        return (
            other is not self
            and self.storage == other.storage
            and self.first <= other.last
            and other.first <= self.last
        )
