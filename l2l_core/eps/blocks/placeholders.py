"""Placeholders: the data of parameters whose values are not in memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache

import numpy as np
import torch

from l2l_core.eps.blocks.layout import Piece

_PLACEHOLDER = torch.full((), torch.nan)  # without dimensions, as a parameter may be
_STORAGES = {_PLACEHOLDER.untyped_storage()._cdata}  # of placeholders


def nan_placeholder(size: Sequence[int]) -> torch.Tensor:
    """Return a tensor of NaN in this shape, for a parameter without values in memory."""
    return _PLACEHOLDER.expand(tuple(size))


def placeholder(piece: Piece) -> torch.Tensor:
    """Return NaN, or zeros for a piece in bytes, whose dtype may have no NaN."""
    return nan_placeholder(piece.size) if piece.dtype is None else _zeros(replace(piece, offset=0))


@cache  # by form: parameters are recognised by the address of their data
def _zeros(piece: Piece) -> torch.Tensor:
    """Return zeros in the memory of a whole piece, since kernels of quantised layers ignore strides."""
    zeros = torch.from_numpy(np.zeros(piece.stop, np.uint8))  # takes no memory until it is written to
    _STORAGES.add(zeros.untyped_storage()._cdata)
    return piece.view(zeros)


def is_placeholder(param: torch.Tensor) -> bool:
    """Return whether a parameter is such a placeholder."""
    return param.untyped_storage()._cdata in _STORAGES
