"""Traits of the functions that shell code calls, and the storage extents of tensors that they may change."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import torch

from l2l_core.model import dense_parts

HOOKS = frozenset((torch.Tensor.register_hook, torch.Tensor.retain_grad))
_ON_OBJECT = HOOKS | frozenset(
    getattr(torch.Tensor, name)
    for name in ("register_post_accumulate_grad_hook", "requires_grad_", "detach_", "__hash__", "__repr__")
)
BACKWARD = frozenset((torch.autograd.grad, torch.autograd.backward, torch.Tensor.backward))
_VIEW_PROPERTIES = ("T", "mT", "H", "mH", "real", "imag")  # properties that make a differentiable view
_IN_PLACE = frozenset(
    f"__i{name}__"
    for name in ["add", "and", "floordiv", "lshift", "mod", "mul", "or", "pow", "rshift", "sub", "truediv", "xor"]
)


@lru_cache(maxsize=4096)
def acts_on_object(func: Any) -> bool:
    """Whether a function acts on the tensor object, not on its values."""
    name = getattr(func, "__name__", "")
    return (
        func in _ON_OBJECT or name == "__set__" or (name == "__get__" and _attribute_of(func) not in _VIEW_PROPERTIES)
    )


@lru_cache(maxsize=4096)
def reads_grad_fn(func: Any) -> bool:
    """Whether a function returns a tensor's graph node, on which unobserved hooks can be put."""
    return getattr(func, "__name__", "") == "__get__" and _attribute_of(func) == "grad_fn"


@lru_cache(maxsize=4096)
def is_in_place(func: Any) -> bool:
    """Whether a function changes its first argument."""
    name = getattr(func, "__name__", "")
    return name == "__setitem__" or name in _IN_PLACE or (name.endswith("_") and not name.endswith("__"))


def _attribute_of(getter: Any) -> str:
    return getattr(getter.__self__, "__name__", "")


class StorageExtent(NamedTuple):
    """The part of a storage that a tensor may use.

    Attributes:
        first, last: the range of its elements.
        keeps_strides: whether a gradient in the view's strides gives the base a gradient in the base's strides.
    """

    storage: int
    first: int
    last: int
    is_view: bool
    keeps_strides: bool

    @staticmethod
    def of(tensor: torch.Tensor) -> StorageExtent:
        tensor = dense_parts(tensor)[-1] if tensor.layout is torch.jagged else tensor
        base = tensor._base
        steps = [(size, stride) for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if size > 1]
        strides = [stride for _, stride in steps]
        first = int(tensor.storage_offset())
        last = first + sum((size - 1) * stride for size, stride in steps)
        is_whole = base is None or tensor.numel() == base.numel()
        in_order = base is None or (base.is_contiguous() and strides == sorted(strides, reverse=True))
        storage = tensor.untyped_storage()._cdata
        return StorageExtent(storage, first, last, base is not None, is_whole or in_order)

    def overlaps(self, other: StorageExtent) -> bool:
        """Whether another extent may share elements with this one."""
        return (
            other is not self
            and self.storage == other.storage
            and self.first <= other.last
            and other.first <= self.last
        )
