"""State that an optimizer keeps of a parameter, tensors and values in containers: copied, counted, compared."""

from __future__ import annotations

import copy
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

from l2l_core._torch import is_traceable_wrapper_subclass, pytree
from l2l_core.eps.optimizers.optimizer_settings import is_same


def clone_state(state: Mapping[str, Any]) -> dict[str, Any]:
    """Copy what the optimizer knows of a parameter; tensors may be in containers of it."""
    return {name: pytree.tree_map(_copy_leaf, value) for name, value in state.items()}


def _copy_leaf(leaf: Any) -> Any:
    return leaf.clone() if isinstance(leaf, torch.Tensor) else copy.deepcopy(leaf)


def state_bytes(*states: Mapping[str, Any]) -> int:
    """Count the bytes of tensors in what the optimizer knows of some parameters; what they have in common, once."""
    return ByteCounter(states).nbytes


class ByteCounter:
    """Counts the bytes of tensors in states that come and go; what several have in common, as long as one of them is there."""

    def __init__(self, states: Iterable[Mapping[str, Any]] = ()) -> None:
        self.nbytes = 0
        self._uses: Counter[int] = Counter()  # of the memory at an address
        self.add(states)

    def add(self, states: Iterable[Mapping[str, Any]]) -> None:
        """Count these as well."""
        uses = self._uses
        for tensor in (tensor for state in states for tensor in tensors_of(state)):
            address = tensor.data_ptr()
            self.nbytes += 0 if uses[address] else tensor.nbytes
            uses[address] += 1

    def remove(self, states: Iterable[Mapping[str, Any]]) -> None:
        """Count these no longer, as far as they were counted."""
        for tensor in (tensor for state in states for tensor in tensors_of(state) if self._uses[tensor.data_ptr()]):
            self._uses[tensor.data_ptr()] -= 1
            self.nbytes -= 0 if self._uses[tensor.data_ptr()] else tensor.nbytes


def tensors_of(state: Mapping[str, Any]) -> list[torch.Tensor]:
    """List the tensors in what the optimizer knows of a parameter; of one that is put together from others, those."""
    found: list[torch.Tensor] = []
    for value in state.values():
        if type(value) is torch.Tensor:  # nearly all are, and all of them are counted after every step
            found.append(value)
        else:
            found += [
                plain for leaf in _leaves(value) if isinstance(leaf, torch.Tensor) for plain in _plain_tensors(leaf)
            ]
    return found


def _plain_tensors(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Take apart what says of itself only what it stands for: a quantised tensor has the shape and type of a plain one."""
    if not is_traceable_wrapper_subclass(tensor):
        yield tensor
        return
    for name in tensor.__tensor_flatten__()[0]:
        yield from _plain_tensors(getattr(tensor, name))


def _leaves(value: Any) -> Sequence[Any]:
    return pytree.tree_leaves(value) if isinstance(value, list | tuple | dict | deque) else (value,)


def differing_state(one: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
    """List the names of what differs in what two optimizers know of a parameter."""
    both = {**one, **other}
    return [name for name in both if name not in one or name not in other or not _equal_values(one[name], other[name])]


def _equal_values(one: Any, other: Any) -> bool:
    """Compare values of an optimizer's state; what is no plain value, by what it says of itself."""
    ones, others = pytree.tree_leaves(one), pytree.tree_leaves(other)
    if len(ones) != len(others):
        return False
    pairs = zip(ones, others, strict=True)
    return all(is_same(a, b) if isinstance(a, torch.Tensor) else is_same(a, b) or repr(a) == repr(b) for a, b in pairs)
