"""The tokens of a micro-batch: where they are, and the same micro-batch with others in their place."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from l2l_core.batches import BatchRows, leaves_in, map_tensors

_INTEGER_TYPES = (torch.uint8, torch.int16, torch.int32, torch.int64)


def find_tokens(micro_batch: Any) -> torch.Tensor | None:
    """Find the tokens, (rows, positions): ``input_ids`` of a mapping, or else the first tensor of whole numbers of that kind."""
    named = micro_batch.get("input_ids") if isinstance(micro_batch, Mapping) else None
    for leaf in [named, *leaves_in(micro_batch)]:
        if isinstance(leaf, torch.Tensor) and leaf.ndim == 2 and leaf.dtype in _INTEGER_TYPES:
            return leaf
    return None


def select_row(micro_batch: Any, row: int) -> Any:
    """Cut one row out of a micro-batch."""
    return BatchRows(micro_batch).select([slice(row, row + 1)])[0]


def with_tokens(micro_batch: Any, tokens: torch.Tensor) -> Any:
    """Return the micro-batch with other tokens; all else is shared with it."""
    old = find_tokens(micro_batch)
    return map_tensors(micro_batch, lambda tensor: tokens if tensor is old else tensor)
