"""Optimizer state of a parameter (tensors, and values in containers): copies, byte counts, comparisons."""

from __future__ import annotations

import copy
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch

from l2l_core._torch import is_traceable_wrapper_subclass, pytree
from l2l_core.eps.optimizers.optimizer_settings import is_same


def clone_state(state: Mapping[str, Any]) -> dict[str, Any]:
    """Copy the state of a parameter, including tensors in containers."""
    return {name: pytree.tree_map(_copy_leaf, value) for name, value in state.items()}


def _copy_leaf(leaf: Any) -> Any:
    return leaf.clone() if isinstance(leaf, torch.Tensor) else copy.deepcopy(leaf)


def state_bytes(*states: Mapping[str, Any]) -> int:
    """Return the bytes of the tensors in states; shared memory counts once."""
    return ByteCounter(states).nbytes


class ByteCounter:
    """Running count of the bytes of tensors in states; shared memory counts once."""

    def __init__(self, states: Iterable[Mapping[str, Any]] = ()) -> None:
        self.nbytes = 0
        self._uses: Counter[int] = Counter()  # by address of the memory
        self.add(states)

    def add(self, states: Iterable[Mapping[str, Any]]) -> None:
        """Add states to the count."""
        uses = self._uses
        for tensor in (tensor for state in states for tensor in tensors_of(state)):
            address = tensor.data_ptr()
            self.nbytes += 0 if uses[address] else tensor.nbytes
            uses[address] += 1

    def remove(self, states: Iterable[Mapping[str, Any]]) -> None:
        """Remove states from the count."""
        for tensor in (tensor for state in states for tensor in tensors_of(state) if self._uses[tensor.data_ptr()]):
            self._uses[tensor.data_ptr()] -= 1
            self.nbytes -= 0 if self._uses[tensor.data_ptr()] else tensor.nbytes


def tensors_of(state: Mapping[str, Any]) -> list[torch.Tensor]:
    """Return the tensors in the state of a parameter; for wrapper subclasses, the inner tensors."""
    found: list[torch.Tensor] = []
    for value in state.values():
        if type(value) is torch.Tensor:  # the common case, in a function called after every step
            found.append(value)
        else:
            leaves = pytree.tree_leaves(value) if isinstance(value, list | tuple | dict | deque) else (value,)
            found += [plain for leaf in leaves if isinstance(leaf, torch.Tensor) for plain in _plain_tensors(leaf)]
    return found


def _plain_tensors(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield the inner tensors of a wrapper subclass, such as a quantised tensor, or the tensor itself."""
    if not is_traceable_wrapper_subclass(tensor):
        yield tensor
        return
    for name in tensor.__tensor_flatten__()[0]:
        yield from _plain_tensors(getattr(tensor, name))


def differing_state(one: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
    """Return the names of values that differ between two states."""
    both = {**one, **other}
    return [name for name in both if name not in one or name not in other or not _equal_values(one[name], other[name])]


def _equal_values(one: Any, other: Any) -> bool:
    """Compare two values of an optimizer's state; values that are not plain by their `repr`."""
    ones, others = pytree.tree_leaves(one), pytree.tree_leaves(other)
    if len(ones) != len(others):
        return False
    pairs = zip(ones, others, strict=True)
    return all(is_same(a, b) if isinstance(a, torch.Tensor) else is_same(a, b) or repr(a) == repr(b) for a, b in pairs)
