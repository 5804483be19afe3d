"""Aliases: tensors in the memory of a weight, which follow its updates in plain training, and not when weights move."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from itertools import chain

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.weak import WeakTensorKeyDictionary

from l2l_core.eps.blocks.placeholders import is_placeholder
from l2l_core.model import storage_key

_TIE_WEIGHTS = (
    "To tie weights, make them one parameter (head.weight = embedding.weight), whose gradient is the sum of both; else give one "
    "a copy (a.data = a.data.clone())"
)
_READ_THE_PARAMETER = (
    "Read the parameter itself where the buffer is read; or give the buffer a copy, which does not follow it (.clone())"
)


# Parameter -> storages that held its values before, and in which other tensors still are.
_LEFT = WeakTensorKeyDictionary()


@contextmanager
def leaving_storages(params: Iterable[torch.Tensor]) -> Iterator[None]:
    """Move the values of parameters to other memory in the block; note storages that other tensors still have."""
    left = [(param, StorageWeakRef(param.untyped_storage())) for param in params]
    yield
    for param, storage in left:
        # Only where it is needed: PyTorch cannot swap a parameter that has a weak reference.
        if alive := [each for each in (*(_LEFT.pop(param, None) or ()), storage) if not each.expired()]:
            _LEFT[param] = alive


def left_storages(param: torch.Tensor) -> list[int]:
    """Return the identifiers of storages that a parameter's values have left, and that some tensor still has."""
    return [each.cdata for each in _LEFT.get(param) or () if not each.expired()]


def refuse_shared_values(names: Mapping[torch.Tensor, str]) -> None:
    """Raise ValueError if a trained parameter has values in common with another parameter or a buffer, given by name.

    Parameters may lie side by side in one memory.
    """
    by_storage: dict[int, list[torch.Tensor]] = {}
    for tensor in names:
        if tensor.layout is torch.strided and tensor.numel() and not is_placeholder(tensor):
            by_storage.setdefault(storage_key(tensor), []).append(tensor)
    for one, other in chain.from_iterable(map(_pairs_in_one_place, by_storage.values())):
        if (one.requires_grad or other.requires_grad) and _have_values_in_common(one, other):
            kinds = ["parameter" if isinstance(each, nn.Parameter) else "buffer" for each in (one, other)]
            raise ValueError(
                f"{kinds[0]} {names[one]} and {kinds[1]} {names[other]} are two tensors over the same values in memory (a.data = "
                "b.data?): in plain training each update changes both, and a relay would keep them apart. "
                f"{_READ_THE_PARAMETER if 'buffer' in kinds else _TIE_WEIGHTS}"
            )


def _pairs_in_one_place(tensors: Iterable[torch.Tensor]) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield the pairs of tensors over one storage whose ranges of bytes overlap."""
    before: list[torch.Tensor] = []
    for tensor in sorted(tensors, key=_byte_range):
        start, _ = _byte_range(tensor)
        before = [each for each in before if _byte_range(each)[1] > start]
        yield from ((each, tensor) for each in before)
        before.append(tensor)


def _have_values_in_common(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors whose ranges overlap share an element: columns of one matrix, for one, do not."""
    (start, stop), (other_start, other_stop) = map(_byte_range, (one, other))
    if one.dtype != other.dtype:
        return True
    first = min(one.storage_offset(), other.storage_offset())
    size = (max(stop, other_stop) - min(start, other_start)) // one.element_size()
    taken = torch.zeros(size, dtype=torch.bool)
    taken.as_strided(one.shape, one.stride(), one.storage_offset() - first).fill_(True)
    return bool(taken.as_strided(other.shape, other.stride(), other.storage_offset() - first).any())


def _byte_range(tensor: torch.Tensor) -> tuple[int, int]:
    """Return the first byte of a tensor's elements in its storage, and the one after the last."""
    start = int(tensor.storage_offset())
    last = start + sum((count - 1) * stride for count, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return start * tensor.element_size(), (last + 1) * tensor.element_size()
