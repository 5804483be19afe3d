"""Layout of a block's record in its file: weights, then the optimizer state of its parameters.

Weights fill whole pages, so that a load reads them alone. Tensors of the optimizer state follow one another in the file; its
plain data is in `RecordLayout`, which the manifest holds.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from l2l_core.eps import Masters
from l2l_core.eps.blocks import Block, Layout, aligned
from l2l_core.model import Tensors, decode, encode
from l2l_core.shelf.direct_io import round_to_pages

MaybeParamState = Mapping[str, Any] | None  # optimizer state of a parameter


@dataclass(frozen=True, slots=True)
class RecordLayout:
    """Positions of weights and state tensors in a record.

    Attributes:
        weights_bytes: bytes of the weights, whole pages.
        nbytes: bytes of the record, whole pages.
        state: optimizer state of each parameter, as returned by `encode`.
        tensors: offset, type, size and strides of each state tensor, by name.
    """

    weights_bytes: int
    nbytes: int
    state: list[Any]
    tensors: dict[str, list[Any]]

    @staticmethod
    def of(layout: Layout, states: Sequence[MaybeParamState]) -> tuple[RecordLayout, Tensors]:
        """Return the layout for a block, and the tensors of its optimizer state by name.

        Raises:
            ValueError: the state contains a value that is neither a tensor nor plain data.
        """
        state_tensors: Tensors = {}
        state = [None if each is None else encode(dict(each), str(i), state_tensors) for i, each in enumerate(states)]
        weights_bytes = offset = round_to_pages(4 * layout.numel)
        tensors: dict[str, list[Any]] = {}
        for name, tensor in state_tensors.items():
            stride = torch.empty_like(tensor, device="meta").stride()
            dtype = str(tensor.dtype).removeprefix("torch.")
            tensors[name] = [offset, dtype, list(tensor.shape), list(stride)]
            offset += aligned(tensor.nbytes, 1)
        return RecordLayout(weights_bytes, round_to_pages(offset), state, tensors), state_tensors

    @property
    def state_bytes(self) -> int:
        """Bytes of the state tensors."""
        return sum(
            getattr(torch, word).itemsize * torch.Size(size).numel() for _, word, size, _ in self.tensors.values()
        )

    def weights(self, flat: torch.Tensor, layout: Layout) -> torch.Tensor:
        """Return the weights of a record, a view of shape (layout.numel,), float32."""
        return flat[: 4 * layout.numel].view(torch.float32)

    def read_states(self, flat: torch.Tensor) -> list[dict[str, Any] | None]:
        """Return the optimizer state in a record; its tensors are views of `flat`."""
        return [None if each is None else decode(each, lambda name, _: self._view(flat, name)) for each in self.state]

    def write_states(self, flat: torch.Tensor, tensors: Tensors, before: RecordLayout) -> None:
        """Write the state tensors into a record; some may already lie in it, at their positions in the layout `before`."""
        if self.tensors != before.tensors:  # positions have moved, so a copy might overwrite another tensor
            start = flat.data_ptr()
            inside = {name for name, t in tensors.items() if start <= t.data_ptr() < start + len(flat)}
            tensors = {name: t.clone() if name in inside else t for name, t in tensors.items()}
        for name, tensor in tensors.items():
            target = self._view(flat, name)
            if target.data_ptr() != tensor.data_ptr():
                target.copy_(tensor)

    def _view(self, flat: torch.Tensor, name: str) -> torch.Tensor:
        offset, word, size, stride = self.tensors[name]
        dtype = getattr(torch, word)
        nbytes = dtype.itemsize * torch.Size(size).numel()
        typed = flat[offset : offset + nbytes].view(dtype)
        return typed.as_strided(size, stride, typed.storage_offset())


@contextmanager
def bind_record(
    masters: Masters, block: Block, layout: RecordLayout, flat: torch.Tensor
) -> Iterator[list[MaybeParamState]]:
    """Make a block and its optimizer state views of a record in memory, in a block of code.

    Yields:
        A list that receives the optimizer state of each parameter at the end.
    """
    params, state = masters.params_of(block), masters.optimizer.state
    states: list[MaybeParamState] = []
    block.bind(layout.weights(flat, block.layout), params)
    state.update((p, each) for p, each in zip(params, layout.read_states(flat), strict=True) if each is not None)
    try:
        yield states
    finally:
        block.unbind(params)
        states += [state.pop(param, None) for param in params]
