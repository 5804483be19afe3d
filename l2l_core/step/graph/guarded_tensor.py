"""Guarded tensors: tensors of suspended micro-batches that are checked, and fetched, before they are used.

While a micro-batch is suspended, the bytes of its tensors may be off the device, and another micro-batch must not read them.
Layers run without any mode, for speed. So each tensor of a suspended micro-batch is made an instance of a subclass of
`torch.Tensor` whose `__torch_function__` fetches the bytes, or refuses the step. Unguarded tensors cost nothing.

Tensors saved by autograd are not covered; backward through shell code runs under the stash mode instead.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch

from l2l_core._torch import DisableTorchFunctionSubclass, pytree

unguarded = DisableTorchFunctionSubclass  # in this block the engine uses guarded tensors without a check

_METADATA = frozenset((  # methods that read none of a tensor's bytes
    "untyped_storage", "size", "dim", "stride", "numel", "nelement", "ndimension", "element_size", "storage_offset",
    "is_contiguous", "is_floating_point", "is_complex", "is_signed", "get_device", "register_hook", "retain_grad",
    "_is_view", "_use_count", "__len__", "__hash__",
))  # fmt: skip
_VIEW_PROPERTIES = frozenset(("T", "mT", "H", "mH", "real", "imag", "data"))


class GuardedTensor(torch.Tensor):
    """A tensor whose use is checked. Tensors enter and leave this class by assignment to `__class__`."""

    _relay_guard: _GuardMark

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        # Most properties are metadata; some return views, which would not be guarded.
        if name in _METADATA or (name in ("__get__", "__set__") and not _is_view_property(func)):
            with unguarded():
                return func(*args, **kwargs)
        for leaf in pytree.tree_leaves((args, kwargs)):
            if type(leaf) is GuardedTensor:
                leaf._relay_guard.guard.check_read(leaf)
        return func(*args, **kwargs)


def _is_view_property(func: Any) -> bool:
    return getattr(getattr(func, "__self__", None), "__name__", "") in _VIEW_PROPERTIES


def unguard(tensor: torch.Tensor) -> torch.Tensor:
    """Make a tensor an ordinary one and return it; its bytes must be on the device."""
    if type(tensor) is GuardedTensor:
        tensor.__class__ = torch.Tensor  # pyright: ignore[reportAttributeAccessIssue]  # allowed: the layouts are equal
    return tensor


class TensorGuard:
    """The tensors of one pass that are guarded while their micro-batch is suspended; none in inference.

    Invariant: after `close` no tensor is guarded.

    Args:
        check: called before a guarded tensor that a micro-batch made is used; raises if the use is not allowed.
        restore: called before an unguarded tensor is read by code that no mode observes.

    Attributes:
        is_active: False in inference.
    """

    def __init__(self, check: Callable[[torch.Tensor, int], None], restore: Callable[[torch.Tensor], None]) -> None:
        self._check, self._restore, self.is_active = check, restore, torch.is_grad_enabled()
        self._unguarded: list[weakref.ref[torch.Tensor]] = []  # of the current micro-batch
        self._guarded: dict[int, weakref.ref[torch.Tensor]] = {}

    def register(self, tree: Any, k: int) -> Any:
        """Record that micro-batch `k` made these tensors, and return them."""
        if not self.is_active:
            return tree
        for tensor in tree if isinstance(tree, tuple | list) else (tree,):
            if type(tensor) is torch.Tensor:
                vars(tensor).setdefault("_relay_guard", _GuardMark(self, k))
                self._unguarded.append(weakref.ref(tensor))
        return tree

    def guard_all(self) -> None:
        """Guard the tensors of the current micro-batch, which is about to be suspended."""
        for ref in self._unguarded:
            tensor = ref()
            if type(tensor) is torch.Tensor:
                tensor.__class__ = GuardedTensor
                self._guarded[id(tensor)] = ref
        self._unguarded.clear()

    def mark_replaced(self, tensor: torch.Tensor, k: int) -> bool:
        """Record that `k` keeps another value in place of `tensor`; return whether a later micro-batch has read `tensor`."""
        mark = getattr(tensor, "_relay_guard", None)
        if mark is None or mark.k >= k:
            return False
        mark.is_replaced = True
        return mark.is_shared

    def check_read(self, tensor: GuardedTensor) -> None:
        """Check the use of a guarded tensor, and unguard it."""
        self._check(tensor, tensor._relay_guard.k)
        self.unguard_all([tensor])

    def unguard_all(self, tensors: Iterable[torch.Tensor]) -> None:
        """Unguard tensors of the current micro-batch, since some code takes another path for subclasses."""
        for tensor in tensors:
            if type(tensor) is GuardedTensor:
                unguard(tensor)
                self._guarded.pop(id(tensor), None)
                self._unguarded.append(weakref.ref(tensor))  # guarded again at the next suspension

    def check_reads(self, values: Iterable[Any], k: int | None = None) -> None:
        """Check and fetch the tensors among `values`, or only those of `k`, before unobserved code reads them."""
        for tensor in [value for value in values if isinstance(value, torch.Tensor)]:
            if type(tensor) is not GuardedTensor:
                self._restore(tensor)
            elif k is None or tensor._relay_guard.k == k:
                tensor._relay_guard.guard.check_read(tensor)

    def check_arguments(self, tensors: Iterable[torch.Tensor], k: int) -> None:
        """Check the tensors that micro-batch `k` gives to a layer and has not made; the stash fetches its own."""
        for tensor in tensors:
            if type(tensor) is GuardedTensor and tensor._relay_guard.k != k:
                self.check_read(tensor)

    def forget(self, tensor: torch.Tensor) -> None:
        """Drop the weak references to a tensor, with which `swap_tensors` would refuse it."""
        unguard(tensor)
        self._guarded.pop(id(tensor), None)
        self._unguarded = [ref for ref in self._unguarded if ref() is not tensor]

    def close(self) -> None:
        """Unguard every tensor at the end of the pass."""
        for ref in [*self._unguarded, *self._guarded.values()]:
            if (tensor := ref()) is not None:
                unguard(tensor)
                vars(tensor).pop("_relay_guard", None)
        self._unguarded.clear()
        self._guarded.clear()


@dataclass(eq=False, slots=True)
class _GuardMark:
    """Attribute of a tensor: its guard, and the micro-batch that made it.

    Attributes:
        is_shared: whether another micro-batch has read the tensor.
        is_replaced: whether another micro-batch has put another value in its place on the layer that keeps it.
    """

    guard: TensorGuard
    k: int
    is_shared: bool = False
    is_replaced: bool = False
