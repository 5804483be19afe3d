"""How a block lies in its file: its weights, and behind them what the optimizer knows of its parameters.

Weights come first and end with a page, so that a load reads them alone. State is any tensors and plain data that an
optimizer keeps: tensors lie in the file, one after another, and the rest is in the form, which the manifest holds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from l2l_core.eps.blocks import Layout, aligned
from l2l_core.model import Tensors, decode, encode
from l2l_core.shelf.direct_io import round_to_pages

MaybeParamState = Mapping[str, Any] | None  # what an optimizer knows of a parameter


@dataclass(frozen=True, slots=True)
class RecordLayout:
    """Says what lies where in a record.

    Attributes:
        weights_bytes: from the beginning, whole pages.
        nbytes: of all of it, whole pages.
        state: of each parameter what the optimizer knows, as `encode` writes it.
        tensors: by name: where each begins, its type, size and strides.
    """

    weights_bytes: int
    nbytes: int
    state: list[Any]
    tensors: dict[str, list[Any]]

    @staticmethod
    def of(layout: Layout, states: Sequence[MaybeParamState]) -> tuple[RecordLayout, Tensors]:
        """Lay out a block; returns the tensors of its state too, by name.

        Raises:
            ValueError: the optimizer keeps something that is neither tensor nor plain data.
        """
        found: Tensors = {}
        state = [None if each is None else encode(dict(each), str(i), found) for i, each in enumerate(states)]
        weights_bytes = offset = round_to_pages(4 * layout.numel)
        tensors: dict[str, list[Any]] = {}
        for name, tensor in found.items():
            stride = torch.empty_like(tensor, device="meta").stride()
            dtype = str(tensor.dtype).removeprefix("torch.")
            tensors[name] = [offset, dtype, list(tensor.shape), list(stride)]
            offset += aligned(tensor.nbytes, 1)
        return RecordLayout(weights_bytes, round_to_pages(offset), state, tensors), found

    @staticmethod
    def from_plain(plain: Mapping[str, Any]) -> RecordLayout:
        """Make what `plain` gave."""
        return RecordLayout(**plain)

    @property
    def state_bytes(self) -> int:
        """Bytes of the state's tensors."""
        return sum(
            getattr(torch, word).itemsize * torch.Size(size).numel() for _, word, size, _ in self.tensors.values()
        )

    def to_plain(self) -> dict[str, Any]:
        """Describe it for a manifest."""
        return asdict(self)

    def weights(self, flat: torch.Tensor, layout: Layout) -> torch.Tensor:
        """See a record's weights, (layout.numel,) float32."""
        return flat[: 4 * layout.numel].view(torch.float32)

    def read_states(self, flat: torch.Tensor) -> list[dict[str, Any] | None]:
        """See what a record has of the optimizer's state; its tensors are views of `flat`."""
        return [None if each is None else decode(each, lambda name, _: self._view(flat, name)) for each in self.state]

    def write_states(self, flat: torch.Tensor, tensors: Tensors, before: RecordLayout) -> None:
        """Write the state's tensors into a record; some of them may be there, where a record of form `before` has them."""
        if self.tensors != before.tensors:  # places have moved: what is copied to one may lie over another
            start = flat.data_ptr()
            inside = {name for name, t in tensors.items() if start <= t.data_ptr() < start + len(flat)}
            tensors = {name: t.clone() if name in inside else t for name, t in tensors.items()}
        for name, tensor in tensors.items():
            place = self._view(flat, name)
            if place.data_ptr() != tensor.data_ptr():
                place.copy_(tensor)

    def _view(self, flat: torch.Tensor, name: str) -> torch.Tensor:
        offset, word, size, stride = self.tensors[name]
        dtype = getattr(torch, word)
        nbytes = dtype.itemsize * torch.Size(size).numel()
        typed = flat[offset : offset + nbytes].view(dtype)
        return typed.as_strided(size, stride, typed.storage_offset())
