"""Bytes that a forward saves for backward, by rows and length of the batch, measured on fake tensors.

The bytes are those of the storages that autograd holds at the end of the forward, each counted once, without parameters and
buffers. Fake tensors have shapes and no memory.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from l2l_core._torch import FakeTensorMode

ForwardFn = Callable[[nn.Module, int, int], Any]  # model, rows, length; the result holds the graph


def activation_bytes(model: nn.Module, forward: ForwardFn, rows: int, length: int) -> int:
    """Run a forward and return the bytes that it saves.

    Example:
        >>> from l2l_core.strategies import activation_bytes
        >>> activation_bytes(Block(), lambda block, rows, length: block(torch.randn(rows, length, 16)), rows=2, length=8)
        3072
    """
    excluded = {t.untyped_storage()._cdata for t in (*model.parameters(), *model.buffers())}
    saved: dict[int, torch.UntypedStorage] = {}  # held until the end, so that keys are unique

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in excluded:
            saved[storage._cdata] = storage
        return tensor.detach()  # the tensor itself would form a cycle: node, saved output, node

    with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        forward(model, rows, length)
    return sum(storage.nbytes() for storage in saved.values())


def activation_map(
    make: Callable[[], nn.Module], forward: ForwardFn, rows: Sequence[int], lengths: Sequence[int]
) -> dict[tuple[int, int], int]:
    """Return the saved bytes for every number of rows and every length, without the memory for them.

    Args:
        make: builds the model; its parameters are fake.
        forward: runs the model on tensors that it makes itself.

    Raises:
        DataDependentOutputException: raised by fake tensors if the model reads their values.

    Example:
        >>> from l2l_core.strategies import activation_map
        >>> def forward(block, rows, length):
        ...     return block(torch.randn(rows, length, 16))
        >>> activation_map(Block, forward, rows=[1, 2], lengths=[8, 1_000_000])  # without the memory for them
        {(1, 8): 1536, (1, 1000000): 192000000, (2, 8): 3072, (2, 1000000): 384000000}
    """
    with FakeTensorMode():
        model = make()
        return {(n, t): activation_bytes(model, forward, n, t) for n in rows for t in lengths}
