"""What an optimizer keeps of parameters that nobody has made, in bytes: it is tried on two small ones of as many dimensions.

A tensor of state is of the parameter's shape, or of some of its dimensions (factored moments), or its bytes are a constant and
so many per element (counts; the scales of 8-bit blocks). One that both small parameters share is there once for all.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import torch
from torch import nn
from torch.optim import Optimizer

from l2l_core.eps.blocks import aligned
from l2l_core.eps.optimizers import rounds_weights, tensors_of

MakeOptimizer = Callable[[Sequence[nn.Parameter]], Optimizer]
_LARGE = 1 << 14  # elements: smaller parameters are tried as they are, since their state may be of another kind
_TOY = 1 << 13  # elements of the first small one; the second has twice as many


class _Known(NamedTuple):
    """Bytes of the tensors that are kept of a parameter: of its own, and of those that all share."""

    own: tuple[int, ...]
    common: tuple[int, ...]


class KeptState:
    """Tells the bytes of an optimizer's state after a step.

    Args:
        make: gives an optimizer over parameters.

    Attributes:
        optimizer: one that was made so.
        rounds_weights: whether it rounds weights to bfloat16, so that masters may be of that type.

    Raises:
        TypeError: it gives none.
    """

    def __init__(self, make: MakeOptimizer) -> None:
        self._make = make
        self.optimizer = make([nn.Parameter(torch.ones(1))])
        if not isinstance(self.optimizer, Optimizer):
            raise TypeError(
                f"optimizer={make!r} makes {self.optimizer!r}: give a function from parameters to a torch optimizer, such as "
                "partial(torch.optim.AdamW, lr=1e-4)"
            )
        self.rounds_weights = rounds_weights(self.optimizer)
        self._known: dict[tuple[int, ...], _Known] = {}

    def nbytes(self, shapes: Iterable[Sequence[int]]) -> int:
        """Count what is kept of parameters of these shapes, without what all share."""
        return sum(sum(self._of(shape).own) for shape in shapes)

    def common(self, shapes: Iterable[Sequence[int]]) -> int:
        """Count what they all share."""
        return max((sum(self._of(shape).common) for shape in shapes), default=0)

    def in_file(self, shapes: Iterable[Sequence[int]]) -> int:
        """Count the same in a record, where tensors are aligned, and each parameter has its own copy of what all share."""
        return sum(aligned(nbytes, 1) for shape in shapes for nbytes in (n for each in self._of(shape) for n in each))

    def _of(self, shape: Sequence[int]) -> _Known:
        shape = tuple(shape)
        if shape not in self._known:
            self._known[shape] = self._try(shape)
        return self._known[shape]

    def _try(self, shape: tuple[int, ...]) -> _Known:
        numel = math.prod(shape)
        small, twice = _toys(len(shape)) if numel > _LARGE else (shape, shape)
        toys = [nn.Parameter(torch.ones(sides)) for sides in (small, twice)]
        optimizer = self._make(toys)
        for toy in toys:
            toy.grad = torch.ones_like(toy)
        optimizer.step()
        one, other = (list(tensors_of(optimizer.state.get(toy, {}))) for toy in toys)
        common = {a.data_ptr() for a in one} & {b.data_ptr() for b in other if b.nbytes}
        pairs = [(a, b) for a, b in zip(one, other, strict=True) if a.data_ptr() not in common]
        shared = {a.data_ptr(): a.nbytes for a in one if a.data_ptr() in common}
        return _Known(tuple(_stretched(a, b, small, shape) for a, b in pairs), tuple(shared.values()))


def _toys(dimensions: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Give two shapes, the first with sides that differ, the second twice as long along the last."""
    first = [2**power for power in range(1, dimensions)]
    last = max(_TOY // math.prod(first), 2**dimensions)
    return (*first, last), (*first, 2 * last)


def _stretched(one: torch.Tensor, other: torch.Tensor, toy: tuple[int, ...], shape: tuple[int, ...]) -> int:
    """Count the bytes for `shape` of what is `one` for the small parameter, and `other` for that of twice as many elements."""
    if toy == shape:
        return one.nbytes
    if one.dim() == len(toy) and all(side in (1, whole) for side, whole in zip(one.shape, toy, strict=True)):
        sides = [1 if side == 1 else whole for side, whole in zip(one.shape, shape, strict=True)]
        return one.itemsize * math.prod(sides)
    numel = math.prod(toy)
    per_element = (other.numel() - one.numel()) / numel
    return one.itemsize * math.ceil(one.numel() + per_element * (math.prod(shape) - numel))


def bytes_per_parameter(kept: KeptState, shapes: Iterable[Sequence[int]]) -> int:
    """Round what is kept of parameters to whole bytes for each."""
    shapes = list(shapes)
    return round(kept.nbytes(shapes) / max(1, sum(map(math.prod, shapes))))
