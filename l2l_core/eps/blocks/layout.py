"""Parameters side by side in one flat buffer: where each lies, and how to see them through any such buffer.

A layer travels as flat buffers, so a load is one copy. Offsets are aligned like fresh allocations (some kernels choose
their path, and so their rounding, by alignment), and strides are kept (a channels-last weight stays channels-last).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from weakref import WeakValueDictionary

import torch

_INTERNED: WeakValueDictionary[tuple[tuple[Piece, ...], int], Layout] = WeakValueDictionary()
_ALIGN_BYTES = 64  # as PyTorch aligns what it allocates on the CPU


@dataclass(frozen=True, slots=True)
class Piece:
    """Is the place in a flat buffer of a tensor, or of a range of its elements; offset and strides in elements.

    Attributes:
        first: where the range begins among the tensor's elements, in the order in which these lie in memory.
    """

    offset: int
    size: tuple[int, ...]
    stride: tuple[int, ...]
    first: int = 0

    def view(self, flat: torch.Tensor) -> torch.Tensor:
        """View this piece of `flat`: (numel,) -> `size`."""
        # `as_strided` counts from the storage's beginning, and `flat` may be a range of a slot
        return flat.as_strided(self.size, self.stride, flat.storage_offset() + self.offset)


@dataclass(frozen=True, slots=True, weakref_slot=True)
class Layout:
    """Gives several tensors of one dtype places in a flat buffer of `numel` elements, of which `used` are theirs.

    Of equal ones that `of` and `only` give there is one: layers that are alike find each other's views by it, at every visit.
    """

    pieces: tuple[Piece, ...]
    numel: int
    used: int

    @staticmethod
    def of(tensors: Sequence[torch.Tensor]) -> Layout:
        """Lay `tensors` out one after another, each aligned."""
        pieces, offset = [], 0
        for tensor in tensors:
            pieces.append(Piece(offset, tuple(tensor.shape), _dense_strides(tensor)))
            offset = aligned(offset + tensor.numel(), tensor.element_size())
        return Layout(tuple(pieces), offset, sum(tensor.numel() for tensor in tensors))._interned()

    def select(self, indices: Sequence[int]) -> Layout:
        """Lay only the tensors with these indices out one after another, each aligned; dtype float32."""
        if len(indices) == len(self.pieces):
            return self
        pieces, offset = [], 0
        for old in (self.pieces[i] for i in indices):
            pieces.append(Piece(offset, old.size, old.stride))
            offset = aligned(offset + math.prod(old.size))
        return Layout(tuple(pieces), offset, sum(math.prod(piece.size) for piece in pieces))._interned()

    def _interned(self) -> Layout:
        return _INTERNED.setdefault((self.pieces, self.numel), self)

    def __hash__(self) -> int:
        return hash((self.numel, self.used, len(self.pieces)))

    def slice(self, start: int, stop: int) -> Layout:
        """Lay out what is in elements `start` to `stop` of the buffer: tensors as they are, and of others rows of elements."""
        pieces = [_slice_piece(piece, start, stop) for piece in self.pieces]
        return Layout(tuple(pieces), max(0, stop - start), sum(math.prod(piece.size) for piece in pieces))

    def views(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """View every piece of `flat`: (numel,)."""
        return [piece.view(flat) for piece in self.pieces]


def _slice_piece(piece: Piece, start: int, stop: int) -> Piece:
    end = piece.offset + math.prod(piece.size)
    first, last = max(piece.offset, start), min(end, stop)
    if (first, last) == (piece.offset, end):
        return Piece(piece.offset - start, piece.size, piece.stride)
    return Piece(first - start, (last - first,), (1,), first - piece.offset) if first < last else Piece(0, (0,), (1,))


def aligned(numel: int, element_size: int = 4) -> int:
    """Round `numel` up, so that the next tensor starts on an aligned address."""
    step = _ALIGN_BYTES // element_size
    return -(-numel // step) * step


def _dense_strides(tensor: torch.Tensor) -> tuple[int, ...]:
    """Give strides that keep the tensor's order of dimensions, and have neither gaps nor overlaps."""
    # PyTorch's own rule, on the meta device, where no memory is taken
    return tuple(torch.empty_like(tensor, device="meta", memory_format=torch.preserve_format).stride())
