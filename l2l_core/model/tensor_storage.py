"""What a tensor consists of: a sparse one of indices and values, which lie in storages as other tensors do."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from l2l_core._torch import DisableTorchFunctionSubclass

_INDICES = {
    torch.sparse_csr: ("crow_indices", "col_indices"),
    torch.sparse_bsr: ("crow_indices", "col_indices"),
    torch.sparse_csc: ("ccol_indices", "row_indices"),
    torch.sparse_bsc: ("ccol_indices", "row_indices"),
}


def is_sparse(tensor: torch.Tensor) -> bool:
    """Tell whether a tensor consists of indices and values."""
    layout = tensor.layout
    return layout is not torch.strided and (layout is torch.sparse_coo or layout in _INDICES)


def dense_parts(tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """List the dense tensors of which a tensor consists: itself, or indices and values."""
    if not is_sparse(tensor):
        return (tensor,)
    with DisableTorchFunctionSubclass():  # nobody is asked whether it may be read
        tensor = tensor.detach()  # of which it has them without a graph
        if tensor.layout is torch.sparse_coo:
            return tensor._indices(), tensor._values()  # those of an uncoalesced one, too
        return (*(getattr(tensor, name)() for name in _INDICES[tensor.layout]), tensor.values())


def storage_of(tensor: torch.Tensor) -> torch.UntypedStorage:
    """Return where a tensor's numbers are; of a sparse one its values."""
    return dense_parts(tensor)[-1].untyped_storage()


def storage_key(tensor: torch.Tensor) -> int:
    """Return the storage of a tensor's numbers by number, as long as somebody holds it."""
    if tensor.layout is torch.strided:  # first: every operation that is watched comes by here
        return tensor.untyped_storage()._cdata
    return storage_of(tensor)._cdata


def storage_keys(tensors: Iterable[torch.Tensor]) -> list[int]:
    """Return the storages of all pieces of tensors, by number, in order."""
    return [piece.untyped_storage()._cdata for tensor in tensors for piece in dense_parts(tensor)]


def nbytes_of(tensor: torch.Tensor) -> int:
    """Return the bytes that a tensor takes, in all its pieces."""
    return sum(piece.nbytes for piece in dense_parts(tensor))


def equal_values(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Compare two tensors of one device, of any layout, by value: sparse ones place by place as they are stored."""
    if a.layout is not b.layout or a.shape != b.shape:
        return False
    return all(map(torch.equal, dense_parts(a), dense_parts(b)))
