"""Bytes of an optimizer's state for parameters that do not exist yet.

They are measured on two small parameters of as many dimensions. A state tensor has the parameter's shape, or some of its
dimensions (factored moments), or a size linear in the number of elements (counts, scales of 8-bit blocks). A tensor shared by
both small parameters exists once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from functools import cache

import torch
from torch import nn
from torch.optim import Optimizer

from l2l_core.eps.blocks import aligned
from l2l_core.eps.optimizers import rounds_weights, tensors_of

OptimizerFactory = Callable[[Sequence[nn.Parameter]], Optimizer]
_MAX_EXACT_NUMEL = 1 << 14  # smaller parameters are measured as they are: their state may be of another kind
_TRIAL_NUMEL = 1 << 13  # elements of the first small parameter; the second has twice as many


class OptimizerStateSize:
    """Size of the state, after a step, of an optimizer that `make` returns for a list of parameters.

    Raises:
        TypeError: `make` returns no optimizer.
    """

    def __init__(self, make: OptimizerFactory) -> None:
        self._make = make
        self.optimizer = make([nn.Parameter(torch.ones(1))])  # an example
        if not isinstance(self.optimizer, Optimizer):
            raise TypeError(
                f"optimizer={make!r} makes {self.optimizer!r}: give a function from parameters to a torch optimizer, such as "
                "partial(torch.optim.AdamW, lr=1e-4)"
            )
        self.rounds_weights = rounds_weights(self.optimizer)  # to bfloat16, so that masters may have that type
        self._state_bytes = cache(self._measure)

    def nbytes(self, shapes: Iterable[Sequence[int]]) -> int:
        """Return the bytes of the state of these parameters, without shared tensors."""
        return sum(sum(self._state_bytes(tuple(shape))[0]) for shape in shapes)

    def shared_bytes(self, shapes: Iterable[Sequence[int]]) -> int:
        """Return the bytes of the tensors that these parameters share."""
        return max((sum(self._state_bytes(tuple(shape))[1]) for shape in shapes), default=0)

    def record_bytes(self, shapes: Iterable[Sequence[int]]) -> int:
        """Return the bytes of the state in a file, where tensors are aligned and shared ones are repeated."""
        parts = [part for shape in shapes for part in self._state_bytes(tuple(shape))]
        return sum(aligned(nbytes, 1) for part in parts for nbytes in part)

    def _measure(self, shape: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return the bytes of the state tensors of one parameter, and of those that all parameters share."""
        small = twice = shape
        if math.prod(shape) > _MAX_EXACT_NUMEL:
            first = [2**power for power in range(1, len(shape))]  # sides that differ
            last = max(_TRIAL_NUMEL // math.prod(first), 2 ** len(shape))
            small, twice = (*first, last), (*first, 2 * last)
        params = [nn.Parameter(torch.ones(sides)) for sides in (small, twice)]
        optimizer = self._make(params)
        for param in params:
            param.grad = torch.ones_like(param)
        optimizer.step()
        first, second = (list(tensors_of(optimizer.state.get(param, {}))) for param in params)
        common = {a.data_ptr() for a in first} & {b.data_ptr() for b in second if b.nbytes}
        pairs = [(a, b) for a, b in zip(first, second, strict=True) if a.data_ptr() not in common]
        shared = {a.data_ptr(): a.nbytes for a in first if a.data_ptr() in common}
        return tuple(_extrapolate_bytes(a, b, small, shape) for a, b in pairs), tuple(shared.values())


def _extrapolate_bytes(one: torch.Tensor, other: torch.Tensor, trial: tuple[int, ...], shape: tuple[int, ...]) -> int:
    """Return the bytes of a tensor for `shape`, given it for `trial` and for twice as many elements."""
    if trial == shape:
        return one.nbytes
    if one.dim() == len(trial) and all(side in (1, whole) for side, whole in zip(one.shape, trial, strict=True)):
        sides = [1 if side == 1 else whole for side, whole in zip(one.shape, shape, strict=True)]
        return one.itemsize * math.prod(sides)
    per_element = (other.numel() - one.numel()) / math.prod(trial)
    return one.itemsize * math.ceil(one.numel() + per_element * (math.prod(shape) - math.prod(trial)))
