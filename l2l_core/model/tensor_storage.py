"""Storages, bytes and equality of tensors of any layout; sparse and nested tensors consist of dense parts."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from l2l_core._torch import DisableTorchFunctionSubclass

_INDICES = {
    torch.sparse_csr: ("crow_indices", "col_indices"),
    torch.sparse_bsr: ("crow_indices", "col_indices"),
    torch.sparse_csc: ("ccol_indices", "row_indices"),
    torch.sparse_bsc: ("ccol_indices", "row_indices"),
}


def is_sparse(tensor: torch.Tensor) -> bool:
    """Return whether a tensor consists of indices and values."""
    layout = tensor.layout
    return layout is not torch.strided and (layout is torch.sparse_coo or layout in _INDICES)


def dense_parts(tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return the dense parts of a tensor: the tensor itself, or indices and values, or offsets and values."""
    if tensor.layout is torch.jagged:
        nested: Any = tensor.detach()
        return nested.offsets(), nested.values()
    if not is_sparse(tensor):
        return (tensor,)
    with DisableTorchFunctionSubclass():  # guarded tensors are read without their check
        tensor = tensor.detach()  # so that the parts have no graph
        if tensor.layout is torch.sparse_coo:
            return tensor._indices(), tensor._values()  # these work uncoalesced, too
        return (*(getattr(tensor, name)() for name in _INDICES[tensor.layout]), tensor.values())


def storage_of(tensor: torch.Tensor) -> torch.UntypedStorage:
    """Return the storage of a tensor, for a sparse tensor that of its values."""
    return dense_parts(tensor)[-1].untyped_storage()


def storage_key(tensor: torch.Tensor) -> int:
    """Return an identifier of `storage_of(tensor)`, unique while the storage is alive."""
    if tensor.layout is torch.strided:  # the fast path, taken at every intercepted operation
        return tensor.untyped_storage()._cdata
    return storage_of(tensor)._cdata


def storage_keys(tensors: Iterable[torch.Tensor]) -> list[int]:
    """Return the identifiers of the storages of all dense parts of `tensors`, in order."""
    return [piece.untyped_storage()._cdata for tensor in tensors for piece in dense_parts(tensor)]


def version_of(tensor: torch.Tensor) -> int:
    """Return a number that changes with in-place changes; 0 for an inference tensor, which has none and may not change."""
    try:  # asked for every argument of every layer call, and `is_inference` takes ten times as long
        return tensor._version
    except RuntimeError:
        return 0


def nbytes_of(tensor: torch.Tensor) -> int:
    """Return the bytes of all dense parts of a tensor."""
    return sum(piece.nbytes for piece in dense_parts(tensor))


def equal_values(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Return whether two tensors on one device have equal values; sparse tensors are compared as they are stored."""
    if a.layout is not b.layout or a.shape != b.shape:
        return False
    return all(map(torch.equal, dense_parts(a), dense_parts(b)))
