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

OptimizerFactory = Callable[[Sequence[nn.Parameter]], Optimizer]
_MAX_EXACT_NUMEL = (
    1 << 14
)  # elements: smaller parameters are tried as they are, since their state may be of another kind
_TRIAL_NUMEL = 1 << 13  # elements of the first small one; the second has twice as many


class _StateBytes(NamedTuple):
    """Bytes of the tensors that are kept of a parameter: of its own, and of those that all share."""

    own: tuple[int, ...]
    shared: tuple[int, ...]


class OptimizerStateSize:
    """Tells the bytes of an optimizer's state after a step.

    Args:
        make: gives an optimizer over parameters.

    Attributes:
        optimizer: one that was made so.
        rounds_weights: whether it rounds weights to bfloat16, so that masters may be of that type.

    Raises:
        TypeError: it gives none.
    """

    def __init__(self, make: OptimizerFactory) -> None:
        self._make = make
        self.optimizer = make([nn.Parameter(torch.ones(1))])
        if not isinstance(self.optimizer, Optimizer):
            raise TypeError(
                f"optimizer={make!r} makes {self.optimizer!r}: give a function from parameters to a torch optimizer, such as "
                "partial(torch.optim.AdamW, lr=1e-4)"
            )
        self.rounds_weights = rounds_weights(self.optimizer)
        self._cache: dict[tuple[int, ...], _StateBytes] = {}

    def nbytes(self, shapes: Iterable[Sequence[int]]) -> int:
        """Count what is kept of parameters of these shapes, without what all share."""
        return sum(sum(self._state_bytes(shape).own) for shape in shapes)

    def shared_bytes(self, shapes: Iterable[Sequence[int]]) -> int:
        """Count what they all share."""
        return max((sum(self._state_bytes(shape).shared) for shape in shapes), default=0)

    def record_bytes(self, shapes: Iterable[Sequence[int]]) -> int:
        """Count the same in a record, where tensors are aligned, and each parameter has its own copy of what all share."""
        return sum(
            aligned(nbytes, 1) for shape in shapes for nbytes in (n for each in self._state_bytes(shape) for n in each)
        )

    def _state_bytes(self, shape: Sequence[int]) -> _StateBytes:
        shape = tuple(shape)
        if shape not in self._cache:
            self._cache[shape] = self._measure(shape)
        return self._cache[shape]

    def _measure(self, shape: tuple[int, ...]) -> _StateBytes:
        numel = math.prod(shape)
        small, twice = _trial_shapes(len(shape)) if numel > _MAX_EXACT_NUMEL else (shape, shape)
        toys = [nn.Parameter(torch.ones(sides)) for sides in (small, twice)]
        optimizer = self._make(toys)
        for toy in toys:
            toy.grad = torch.ones_like(toy)
        optimizer.step()
        one, other = (list(tensors_of(optimizer.state.get(toy, {}))) for toy in toys)
        common = {a.data_ptr() for a in one} & {b.data_ptr() for b in other if b.nbytes}
        pairs = [(a, b) for a, b in zip(one, other, strict=True) if a.data_ptr() not in common]
        shared = {a.data_ptr(): a.nbytes for a in one if a.data_ptr() in common}
        return _StateBytes(tuple(_extrapolate_bytes(a, b, small, shape) for a, b in pairs), tuple(shared.values()))


def _trial_shapes(dimensions: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Give two shapes, the first with sides that differ, the second twice as long along the last."""
    first = [2**power for power in range(1, dimensions)]
    last = max(_TRIAL_NUMEL // math.prod(first), 2**dimensions)
    return (*first, last), (*first, 2 * last)


def _extrapolate_bytes(
    one: torch.Tensor, other: torch.Tensor, trial_shape: tuple[int, ...], shape: tuple[int, ...]
) -> int:
    """Count the bytes for `shape` of what is `one` for the small parameter, and `other` for that of twice as many elements."""
    if trial_shape == shape:
        return one.nbytes
    if one.dim() == len(trial_shape) and all(
        side in (1, whole) for side, whole in zip(one.shape, trial_shape, strict=True)
    ):
        sides = [1 if side == 1 else whole for side, whole in zip(one.shape, shape, strict=True)]
        return one.itemsize * math.prod(sides)
    numel = math.prod(trial_shape)
    per_element = (other.numel() - one.numel()) / numel
    return one.itemsize * math.ceil(one.numel() + per_element * (math.prod(shape) - numel))


def bytes_per_parameter(optimizer_state: OptimizerStateSize, shapes: Iterable[Sequence[int]]) -> int:
    """Round what is kept of parameters to whole bytes for each."""
    shapes = list(shapes)
    return round(optimizer_state.nbytes(shapes) / max(1, sum(map(math.prod, shapes))))
