"""Layouts of parameters in flat buffers, gradients in them, and tensors assembled from pieces.

A layer travels as flat buffers, so a load is one copy. Offsets are aligned like fresh allocations, since some kernels choose
their path, and so their rounding, by alignment. Strides are kept: a channels-last weight stays channels-last.

Weights travel whole; gradients and their buffers contain only trained parameters. A step fixes these at its beginning, so a later
change of `requires_grad` does not affect its gradients.

Frozen parameters of other dtypes than the master's lie in a buffer of bytes, each with its dtype.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any
from weakref import WeakValueDictionary

import torch

_INTERNED: WeakValueDictionary[tuple[tuple[Piece, ...], int], Layout] = WeakValueDictionary()
_MAX_FLAT_NORM = 1 << 18  # elements; in larger buffers, sums of squares in float32 are more accurate by parameter
_ALIGN_BYTES = 64  # as PyTorch aligns what it allocates on the CPU


@dataclass(frozen=True, slots=True)
class Piece:
    """Place of a tensor, or of a range of its elements, in a flat buffer; offset and strides in elements.

    Attributes:
        first: index of the range's first element in the tensor, in memory order.
        dtype: of the tensor, in a buffer of bytes, where `offset` counts bytes; else None.
    """

    offset: int
    size: tuple[int, ...]
    stride: tuple[int, ...]
    first: int = 0
    dtype: torch.dtype | None = None

    @property
    def stop(self) -> int:
        """Offset of the end of the piece."""
        return self.offset + math.prod(self.size) * (1 if self.dtype is None else self.dtype.itemsize)

    def view(self, flat: torch.Tensor) -> torch.Tensor:
        """Return this piece of `flat` as a view: (numel,) -> `size`."""
        if self.dtype is not None:
            own = flat[self.offset : self.stop].view(self.dtype)
            return own.as_strided(self.size, self.stride, own.storage_offset())
        # `as_strided` counts from the start of the storage, and `flat` may be a range of a slot
        return flat.as_strided(self.size, self.stride, flat.storage_offset() + self.offset)


@dataclass(frozen=True, slots=True, weakref_slot=True)
class Layout:
    """Places of several tensors in a flat buffer of `numel` elements of one dtype, or of bytes.

    `used` are the elements of the tensors, without padding.

    Equal results of `of` and `select` are one object, so that equal layers share cached views.
    """

    pieces: tuple[Piece, ...]
    numel: int
    used: int

    @staticmethod
    def of(tensors: Sequence[torch.Tensor]) -> Layout:
        """Place `tensors` one after another, each aligned."""
        pieces, offset = [], 0
        for tensor in tensors:
            pieces.append(Piece(offset, tuple(tensor.shape), _dense_strides(tensor)))
            offset = aligned(offset + tensor.numel(), tensor.element_size())
        return Layout(tuple(pieces), offset, sum(tensor.numel() for tensor in tensors))._interned()

    @staticmethod
    def of_bytes(tensors: Sequence[torch.Tensor]) -> Layout:
        """Place `tensors` of any dtypes one after another in a buffer of bytes, each aligned; those of one memory once."""
        pieces, offset, places = [], 0, dict[tuple[Any, ...], Piece]()
        for tensor in tensors:
            form = tuple(tensor.shape), _dense_strides(tensor), tensor.dtype
            memory = (tensor.data_ptr(), *form)
            if not tensor.numel() or memory not in places:
                places[memory] = Piece(offset, form[0], form[1], dtype=tensor.dtype)
                offset = aligned(places[memory].stop, 1)
            pieces.append(places[memory])
        used = sum(math.prod(piece.size) for piece in dict.fromkeys(pieces))
        return Layout(tuple(pieces), offset, used)._interned()

    @property
    def in_bytes(self) -> bool:
        """True for a buffer of bytes."""
        return bool(self.pieces) and self.pieces[0].dtype is not None

    @property
    def nbytes(self) -> int:
        """Bytes of a buffer in float32, or of bytes."""
        return self.numel * (1 if self.in_bytes else 4)

    def select(self, indices: Sequence[int]) -> Layout:
        """Place only the tensors with these indices, each aligned; dtype float32."""
        assert not (indices and self.in_bytes), "parameters in a buffer of bytes are not trained"
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
        """Return the layout of elements `start` to `stop` of the buffer: whole tensors keep their shape, cut ones become 1-D."""
        pieces = [_slice_piece(piece, start, stop) for piece in self.pieces]
        return Layout(tuple(pieces), max(0, stop - start), sum(math.prod(piece.size) for piece in pieces))

    def views(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """Return every piece as a view of `flat`: (numel,)."""
        return [piece.view(flat) for piece in self.pieces]

    def separate_views(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """Return every piece as a tensor in the memory of `flat`, on the host, with a separate storage.

        `torch.save` writes whole storages, and `safetensors` refuses tensors that share one.
        """
        if self.in_bytes:
            return [_separate_view(piece, flat.detach()) for piece in self.pieces]
        numbers = (
            flat.detach().view(torch.int16) if flat.dtype == torch.bfloat16 else flat.detach()
        )  # NumPy has no bfloat16
        values = numbers.numpy()
        ranges = (values[piece.offset : piece.offset + math.prod(piece.size)] for piece in self.pieces)
        return [
            torch.from_numpy(each).view(flat.dtype).as_strided(piece.size, piece.stride)
            for each, piece in zip(ranges, self.pieces, strict=True)
        ]


def _separate_view(piece: Piece, flat: torch.Tensor) -> torch.Tensor:
    """Return a piece of a buffer of bytes with a separate storage."""
    assert piece.dtype is not None
    own = torch.from_numpy(flat.numpy()[piece.offset : piece.stop])
    return own.view(piece.dtype).as_strided(piece.size, piece.stride)


def _slice_piece(piece: Piece, start: int, stop: int) -> Piece:
    end = piece.offset + math.prod(piece.size)
    first, last = max(piece.offset, start), min(end, stop)
    if (first, last) == (piece.offset, end):
        return Piece(piece.offset - start, piece.size, piece.stride)
    return Piece(first - start, (last - first,), (1,), first - piece.offset) if first < last else Piece(0, (0,), (1,))


def aligned(numel: int, element_size: int = 4) -> int:
    """Round `numel` up so that the next tensor starts at an aligned address."""
    step = _ALIGN_BYTES // element_size
    return -(-numel // step) * step


def is_absent(piece: Piece, whole: Piece) -> bool:
    """Return whether a piece contains nothing of its tensor."""
    return piece.size == (0,) and whole.size != (0,)


def assemble(into: torch.Tensor, wanted: Piece, whole: Piece, pieces: Iterable[tuple[Piece, torch.Tensor]]) -> None:
    """Fill a piece of a tensor from other pieces of it, held by several workers or in several files.

    `into` has the size and strides of `wanted`, `whole` those of the tensor. `pieces` cover `wanted`; a whole tensor may have
    other strides.
    """
    begin = wanted.first
    flat, missing = _flatten(into, wanted, whole), into.numel()
    for piece, values in pieces:
        start = max(begin, piece.first)
        stop = min(begin + math.prod(wanted.size), piece.first + math.prod(piece.size))
        if start >= stop:
            continue
        if wanted.size == piece.size == whole.size:
            into.copy_(values)
        else:
            rows = _flatten(values, piece, whole)
            flat[start - begin : stop - begin].copy_(rows[start - piece.first : stop - piece.first])
        missing -= stop - start
    assert missing == 0, f"{missing} of {into.numel()} elements are in no piece, or in several"


def assemble_new(wanted: Piece, whole: Piece, pieces: Iterable[tuple[Piece, torch.Tensor]]) -> torch.Tensor:
    """Return a piece of a tensor, assembled as by `assemble` in new memory, with the dtype of the pieces."""
    pieces = list(pieces)
    into = torch.empty_strided(wanted.size, wanted.stride, dtype=pieces[0][1].dtype)
    assemble(into, wanted, whole, pieces)
    return into


def _flatten(values: torch.Tensor, piece: Piece, whole: Piece) -> torch.Tensor:
    """Return the elements of a piece in memory order, (n,)."""
    if piece.size == whole.size and values.stride() != whole.stride:  # read from a file
        values = torch.empty_strided(whole.size, whole.stride, dtype=values.dtype).copy_(values)
    return values.as_strided((values.numel(),), (1,))


def _dense_strides(tensor: torch.Tensor) -> tuple[int, ...]:
    """Return strides that keep the tensor's order of dimensions, without gaps or overlaps."""
    # PyTorch's own rule, on the meta device, which allocates nothing
    return tuple(torch.empty_like(tensor, device="meta", memory_format=torch.preserve_format).stride())


@dataclass(frozen=True, slots=True)
class TrainedParameters:
    """The trained parameters of a block.

    Attributes:
        flags: for every parameter of the block, True if it is trained.
        indices: of the trained parameters.
        layout: places of their gradients in a flat buffer.
    """

    flags: tuple[bool, ...]
    indices: tuple[int, ...]
    layout: Layout

    @staticmethod
    def of(layout: Layout, flags: Sequence[bool]) -> TrainedParameters:
        """Return the trained parameters of a block with this layout."""
        indices = tuple(i for i, trained in enumerate(flags) if trained)
        return TrainedParameters(tuple(flags), indices, layout.select(indices))

    @property
    def numel(self) -> int:
        """Elements of a gradient buffer, padding included."""
        return self.layout.numel


@dataclass(frozen=True)
class BlockGradient:
    """Gradient of a block, or a part of it.

    Invariant: elements that are not covered are garbage.

    Attributes:
        flat: buffer of the gradient, (numel,).
        trained: parameters with a place in the buffer.
        covers: for each of these, True if the gradient is present.
    """

    flat: torch.Tensor
    trained: TrainedParameters
    covers: tuple[bool, ...]

    def views(self) -> dict[int, torch.Tensor]:
        """Return the gradients that are present, by index of the parameter in the block."""
        return {i: view for (i, view), has in zip(self.all_views.items(), self.covers, strict=True) if has}

    @cached_property
    def all_views(self) -> dict[int, torch.Tensor]:
        """The place of every trained parameter's gradient, present or not, by index in the block."""
        return dict(zip(self.trained.indices, self.trained.layout.views(self.flat), strict=True))

    def __reduce__(self) -> Any:
        return BlockGradient, (self.flat, self.trained, self.covers)  # without the cached views of this buffer

    def tensors(self) -> list[torch.Tensor]:
        """Return the gradient without garbage: a small full buffer in one tensor, others by parameter."""
        is_full = self.trained.layout.used == self.flat.numel() <= _MAX_FLAT_NORM and all(self.covers)
        return [self.flat] if is_full else list(self.views().values())

    def add(self, other: BlockGradient) -> BlockGradient:
        """Add another gradient of the same block in place; return the sum."""
        mine, added = self.views(), other.views()
        for place, view in self.all_views.items():
            if place in added:
                # A copy, not an addition to zero: -0.0 + 0.0 is 0.0
                view.add_(added[place]) if place in mine else view.copy_(added[place])
        return BlockGradient(self.flat, self.trained, tuple(i in mine or i in added for i in self.trained.indices))

    def without(self, indices: Sequence[int]) -> BlockGradient:
        """Return the gradient without the parameters of these indices, in the same buffer."""
        mine = self.views()
        return BlockGradient(
            self.flat, self.trained, tuple(i in mine and i not in indices for i in self.trained.indices)
        )
