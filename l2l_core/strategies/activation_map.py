"""What a forward saves for backward, by rows and length of the batch: on fake tensors, which have shapes and no memory.

The bytes are those of the storages that autograd holds at the end of the forward, parameters and buffers left out, each once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from l2l_core._torch import FakeTensorMode

ForwardFn = Callable[[nn.Module, int, int], Any]  # the model, rows, length; what it returns holds the graph


class SavedStorages:
    """Storages that autograd has saved.

    Invariant: they are held until the end, so none is taken for another.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model_storages = {t.untyped_storage()._cdata for t in (*model.parameters(), *model.buffers())}
        self._storages: dict[int, torch.UntypedStorage] = {}

    @property
    def nbytes(self) -> int:
        """Their bytes."""
        return sum(storage.nbytes() for storage in self._storages.values())

    def pack(self, tensor: torch.Tensor) -> torch.Tensor:
        """Autograd saves a tensor."""
        storage = tensor.untyped_storage()
        if storage._cdata not in self._model_storages:
            self._storages[storage._cdata] = storage
        return tensor.detach()  # itself would be a cycle: node, saved output, node


@contextmanager
def record_saved(model: nn.Module) -> Iterator[SavedStorages]:
    """Note what autograd saves in the block."""
    saved = SavedStorages(model)
    with torch.autograd.graph.saved_tensors_hooks(saved.pack, lambda tensor: tensor):
        yield saved


def activation_bytes(model: nn.Module, forward: ForwardFn, rows: int, length: int) -> int:
    """Run a forward and return the bytes that it saves."""
    with torch.enable_grad(), record_saved(model) as saved:
        out = forward(model, rows, length)
        nbytes = saved.nbytes
        del out
    return nbytes


def activation_map(
    make: Callable[[], nn.Module], forward: ForwardFn, rows: Sequence[int], lengths: Sequence[int]
) -> dict[tuple[int, int], int]:
    """Return the bytes that are saved for every number of rows and every length, without memory for any.

    Args:
        make: builds the model; its parameters are fake.
        forward: runs it, on tensors that it makes itself.

    Raises:
        DataDependentOutputException: of fake tensors; the model asks for values, which fake tensors lack.
    """
    with FakeTensorMode():
        model = make()
        return {(n, t): activation_bytes(model, forward, n, t) for n in rows for t in lengths}
