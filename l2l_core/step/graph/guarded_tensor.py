"""Tensors of micro-batches that are not at work: whoever touches one is seen, at no cost to anybody else.

While a micro-batch waits, the bytes of its tensors may be elsewhere, and what another one would read there is not its own.
Layers run without any mode, for speed. So the tensor objects themselves are on guard: for as long as their micro-batch
waits they belong to a subclass of `torch.Tensor`, and whatever is done with one asks first. Then its bytes come back, or,
if it is not for the one who asks, the step is refused.

What autograd has saved is not reached in this way; backward through shell code runs under the stash's watch instead.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch

from l2l_core._torch import DisableTorchFunctionSubclass, pytree

ReadCheck = Callable[[torch.Tensor, int], None]  # a tensor, and the micro-batch that made it
unguarded = DisableTorchFunctionSubclass  # in such a block the engine looks at guarded tensors itself

_METADATA = frozenset(  # methods that say something of a tensor and read none of its bytes
    [
        "untyped_storage",
        "size",
        "dim",
        "stride",
        "numel",
        "nelement",
        "ndimension",
        "element_size",
        "storage_offset",
        "is_contiguous",
        "is_floating_point",
        "is_complex",
        "is_signed",
        "get_device",
        "register_hook",
        "retain_grad",
        "_is_view",
        "_use_count",
        "__len__",
        "__hash__",
    ]
)


class GuardedTensor(torch.Tensor):
    """A tensor on guard; never made, only entered and left by assigning `__class__`."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        # Most properties tell something of a tensor; some (`T`, `data`) give views, which nobody would guard.
        if name in _METADATA or (name in ("__get__", "__set__") and not _is_view_property(func)):
            with unguarded():
                return func(*args, **kwargs)
        for leaf in pytree.tree_leaves((args, kwargs)):
            if type(leaf) is GuardedTensor:
                leaf._relay_aside.check_read(leaf)
        return func(*args, **kwargs)


def _is_view_property(func: Any) -> bool:
    return getattr(getattr(func, "__self__", None), "__name__", "") in ("T", "mT", "H", "mH", "real", "imag", "data")


def unguard(tensor: torch.Tensor) -> torch.Tensor:
    """Guard the tensor no longer, and return it; for the engine, which has brought its bytes."""
    if type(tensor) is GuardedTensor:
        tensor.__class__ = torch.Tensor
    return tensor


class TensorGuard:
    """The tensors of one pass that are on guard while their micro-batch waits.

    Invariant: after `close` none is.

    Args:
        ask: called before anything is done with a guarded tensor; raises if that must not be.
        bring: called before anything is done, unseen, with a tensor that is not guarded.
        active: whether there is anything to guard.
    """

    def __init__(self, check: ReadCheck, restore: Callable[[torch.Tensor], None], active: bool) -> None:
        self._check, self._restore, self._active = check, restore, active
        self._unguarded: list[weakref.ref[torch.Tensor]] = []  # of the micro-batch at work
        self._guarded: dict[int, weakref.ref[torch.Tensor]] = {}

    def register(self, tree: Any, k: int) -> Any:
        """Note that micro-batch `k` has made these tensors; return them."""
        if not self._active:
            return tree
        for tensor in (tree,) if isinstance(tree, torch.Tensor) else tree if isinstance(tree, tuple | list) else ():
            if type(tensor) is torch.Tensor:
                if not hasattr(tensor, "_relay_aside"):
                    tensor._relay_aside = _GuardMark(self, k)  # type: ignore[attr-defined]
                self._unguarded.append(weakref.ref(tensor))
        return tree

    def guard_all(self) -> None:
        """The micro-batch at work gives way."""
        for ref in self._unguarded:
            tensor = ref()
            if tensor is not None and type(tensor) is torch.Tensor:
                tensor.__class__ = GuardedTensor
                self._guarded[id(tensor)] = ref
        self._unguarded.clear()

    def mark_replaced(self, tensor: torch.Tensor, k: int) -> bool:
        """Note that `k` keeps something else where `tensor` was; whether it, or one before it, has read that."""
        mark = getattr(tensor, "_relay_aside", None)
        if mark is None or mark.k >= k:
            return False
        mark.is_replaced = True
        return mark.is_shared

    def check_read(self, tensor: torch.Tensor, k: int) -> None:
        """Somebody is about to do something with a guarded tensor."""
        self._check(tensor, k)
        self._unguard(tensor)

    def unguard_all(self, tensors: Iterable[torch.Tensor]) -> None:
        """These are for the one at work: code that looks for subclasses, to take another path, shall find none."""
        for tensor in tensors:
            if type(tensor) is GuardedTensor:
                self._unguard(tensor)

    def check_reads(self, values: Iterable[Any], k: int | None = None) -> None:
        """Somebody is about to read the tensors among these where it is not seen; of guarded ones all, or those of `k`."""
        for tensor in [value for value in values if isinstance(value, torch.Tensor)]:
            if type(tensor) is not GuardedTensor:
                self._restore(tensor)
            elif k is None or tensor._relay_aside.k == k:
                tensor._relay_aside.check_read(tensor)

    def _unguard(self, tensor: torch.Tensor) -> None:
        unguard(tensor)
        ref = self._guarded.pop(id(tensor), None)
        # Whoever asked is at work: on guard again when that one gives way.
        self._unguarded.append(ref if ref is not None else weakref.ref(tensor))

    def forget(self, tensor: torch.Tensor) -> None:
        """Hold no reference to a tensor object, which is about to be exchanged."""
        unguard(tensor)
        self._guarded.pop(id(tensor), None)
        # `swap_tensors` refuses a tensor with weak references.
        self._unguarded = [ref for ref in self._unguarded if ref() is not tensor]

    def close(self) -> None:
        """The pass is over: every tensor is an ordinary one."""
        for ref in [*self._unguarded, *self._guarded.values()]:
            if (tensor := ref()) is not None:
                unguard(tensor)
                vars(tensor).pop("_relay_aside", None)
        self._unguarded.clear()
        self._guarded.clear()


class _GuardMark:
    """On a tensor: which micro-batch made it, and whom to ask.

    Attributes:
        is_lent: another micro-batch has read it.
        is_replaced: another micro-batch has put something else in its place on the layer that keeps it.
    """

    __slots__ = ("_guard", "is_replaced", "is_shared", "k")

    def __init__(self, guard: TensorGuard, k: int) -> None:
        self._guard, self.k = guard, k
        self.is_shared = self.is_replaced = False

    def check_read(self, tensor: torch.Tensor) -> None:
        self._guard.check_read(tensor, self.k)
