"""What may be missing in a recompute: which operations hand on a value that nobody has made, and how it is made up for.

A tensor is held here by a weak reference to its storage, and by numbers: who held it would be one who may read it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from l2l_core._torch import DisableTorchDispatch, storage_of_weak_ptr
from l2l_core.model import key_of
from l2l_core.step.micro_batch.recomputes import Sum

_aten = torch.ops.aten
PRODUCTS = frozenset(
    (
        _aten.mm.default,
        _aten.addmm.default,
        _aten.bmm.default,
        _aten.baddbmm.default,
        _aten.convolution.default,
    )
)
# What gives a new tensor element by element, and draws nothing: from the same operands always the same.
HAND_ON = frozenset(
    (
        _aten.add.Tensor,
        _aten.sub.Tensor,
        _aten.mul.Tensor,
        _aten.div.Tensor,
        _aten._to_copy.default,
        _aten.clone.default,
    )
)
# What reads no values: views, and what looks at shapes alone.
READ_NOTHING = frozenset(
    (
        _aten.view.default,
        _aten._unsafe_view.default,
        _aten.t.default,
        _aten.transpose.int,
        _aten.permute.default,
        _aten.unsqueeze.default,
        _aten.squeeze.dim,
        _aten.expand.default,
        _aten.slice.Tensor,
        _aten.select.int,
        _aten.empty_like.default,
        _aten.zeros_like.default,
        _aten.ones_like.default,
        _aten.rand_like.default,
        _aten.new_empty.default,
        _aten.new_zeros.default,
    )
)


class Form(NamedTuple):
    """What a tensor is like, but for its values."""

    size: torch.Size
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    device: torch.device

    @staticmethod
    def of(tensor: torch.Tensor) -> Form:
        return Form(tensor.size(), tensor.stride(), tensor.storage_offset(), tensor.dtype, tensor.device)

    def empty(self) -> torch.Tensor:
        return torch.empty_strided(self.size, self.stride, dtype=self.dtype, device=self.device)

    def over(self, storage: torch.UntypedStorage) -> torch.Tensor:
        """Return a tensor that lies there."""
        empty = torch.empty(0, dtype=self.dtype, device=self.device)
        return empty.set_(storage, self.offset, self.size, self.stride)  # type: ignore[call-overload]


class Part(NamedTuple):
    """What an operation reads of what is missing, in numbers: who held the tensor would keep it."""

    key: int
    form: Form

    @staticmethod
    def of(tensor: torch.Tensor) -> Part:
        return Part(key_of(tensor), Form.of(tensor))


class Missing(NamedTuple):
    """A tensor whose values are missing, or follow from such, and how it is made."""

    ref: StorageWeakRef
    form: Form
    func: Any
    args: list[Any]
    kwargs: dict[str, Any]


def make_up(missing: Sequence[Missing]) -> None:
    """Compute what is missing, in the order in which it was made, where anybody still has it."""
    values: dict[int, torch.Tensor] = {}
    with torch.no_grad(), torch.autocast("cpu", enabled=False):  # casts were made before
        for each in missing:
            args = [values[arg.key].as_strided(*arg.form[:3]) if isinstance(arg, Part) else arg for arg in each.args]
            values[each.ref.cdata] = value = each.func(*args, **each.kwargs)
            if not each.ref.expired():
                storage = storage_of_weak_ptr(each.ref.cdata)
                each.form.over(storage).copy_(value)


def marks_of(tensor: torch.Tensor) -> list[Sum]:
    """Return numbers that tell a tensor from another one, be it by a bit of one element, or the same values in other places.

    In the first every row and every column has a weight of its own: sums of rows and columns stay the same where rows are
    exchanged by a product with a permutation, or signs in pairs. The second adds up the bits of each row, since a change in the
    last place is lost among the many that the first adds.
    """
    values = torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor.detach()
    if not values.numel():
        return [0.0]
    values = values.reshape(-1, values.shape[-1] if values.dim() else 1).contiguous()
    dtype = torch.float64 if values.dtype == torch.float64 else torch.float32
    # Not a product with a vector: in what order that adds may depend on where the tensor lies. Not in double precision, which
    # makes a copy first.
    rows = (values * _weights(values.shape[1], 1.0, dtype)).sum(1)
    by_place = (rows * _weights(len(rows), math.sqrt(2), torch.float64)).sum()
    by_bits = (values.view(_word_of(values)).sum(1, dtype=torch.int64) * _odd(len(values))).sum()
    return [float(by_place), int(by_bits)]


def _word_of(values: torch.Tensor) -> torch.dtype:
    """Return the widest integers that rows consist of where they lie."""
    width = math.gcd(8, values.element_size() * math.gcd(values.shape[1], values.storage_offset()))
    return {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}[width]


@lru_cache(maxsize=64)
def _weights(count: int, step: float, dtype: torch.dtype) -> torch.Tensor:
    with DisableTorchDispatch():  # they stay, and belong to no micro-batch
        return (step * torch.arange(1, count + 1, dtype=torch.float64)).cos().to(dtype)


@lru_cache(maxsize=64)
def _odd(count: int) -> torch.Tensor:
    """Weights modulo 2**64, by which no number that is not 0 becomes 0."""
    with DisableTorchDispatch():
        return (torch.arange(1, count + 1) * 0x1E3779B97F4A7C15) | 1
