"""Tensors whose values are held in pieces, by several workers or in several files: put together, and cut anew.

A piece is the whole tensor, or a range of its elements in the order in which they lie in memory.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch

from l2l_core.eps.blocks.layout import Piece


def is_absent(piece: Piece, whole: Piece) -> bool:
    """Tell whether nothing of a tensor is in a piece of it."""
    return piece.size == (0,) and whole.size != (0,)


def assemble(into: torch.Tensor, wanted: Piece, whole: Piece, pieces: Iterable[tuple[Piece, torch.Tensor]]) -> None:
    """Give a piece of a tensor its values, out of other pieces of it.

    Args:
        into: of the size and strides of `wanted`.
        wanted: what of the tensor it is.
        whole: size and strides of the tensor.
        held: pieces that cover what is wanted, and their values; those of the whole tensor may have other strides.
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
    """Make a piece of a tensor, in memory of its own, out of other pieces; as `assemble`, of their type."""
    pieces = list(pieces)
    into = torch.empty_strided(wanted.size, wanted.stride, dtype=pieces[0][1].dtype)
    assemble(into, wanted, whole, pieces)
    return into


def _flatten(values: torch.Tensor, piece: Piece, whole: Piece) -> torch.Tensor:
    """View the elements of a piece in the order in which they lie in memory, (n,)."""
    if piece.size == whole.size and values.stride() != whole.stride:  # as files have them
        values = torch.empty_strided(whole.size, whole.stride, dtype=values.dtype).copy_(values)
    return values.as_strided((values.numel(),), (1,))
