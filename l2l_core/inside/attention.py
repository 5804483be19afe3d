"""Attention maps of a layer that runs: what it asks of PyTorch is overheard, and nothing of it is computed in another way.

A fused attention gives no map out, so the map is computed beside it, from the same queries and keys, for one row alone. Seen
are `scaled_dot_product_attention` and `multi_head_attention_forward` of `torch.nn.functional`, and every softmax over the last
dimension of (rows, heads, queries, keys).

What it is not: a look into code that PyTorch cannot see (flash-attn, `flex_attention`, compiled layers).
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional
from torch.overrides import TorchFunctionMode

_SOFTMAXES = {functional.softmax, torch.softmax, torch.Tensor.softmax, torch.special.softmax}


class AttentionMaps(TorchFunctionMode):
    """In force while a layer runs.

    Args:
        row: whose maps are kept.
        positions: how many of the queries and keys, the first ones.

    Attributes:
        found: maps so far, (heads, queries, keys), float32, on the host.
    """

    def __init__(self, row: int, positions: int) -> None:
        super().__init__()
        self._row, self._positions = row, positions
        self.found: list[torch.Tensor] = []

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if func is functional.scaled_dot_product_attention:
            with torch.autocast(result.device.type, enabled=False):
                self._take(_scaled(self._row, self._positions, *args, **kwargs))
        elif func is functional.multi_head_attention_forward:
            self._take(_multi_head(self._row, args, kwargs))
        elif func in _SOFTMAXES and _is_over_keys(result, args, kwargs):
            self._take(result[self._row])
        return result

    def _take(self, attention: torch.Tensor | None) -> None:
        """Keep the corner of a map, (heads, queries, keys)."""
        if attention is not None:
            corner = attention.detach()[:, : self._positions, : self._positions]
            self.found.append(corner.to("cpu", torch.float32, copy=True))


def _scaled(
    row: int,
    positions: int,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor | None:
    """The weights that `scaled_dot_product_attention` gives the values of one row, (heads, queries, keys).

    As PyTorch documents them, without dropout. None where there are no rows and heads apart.
    """
    if query.ndim != 4:
        return None
    q, k = query[row, :, :positions].float(), key[row].float()  # (heads, queries, features), (heads, keys, features)
    if enable_gqa:
        k = k.repeat_interleave(q.shape[0] // k.shape[0], dim=0)
    scores = (q @ k.transpose(-2, -1)) * (1 / math.sqrt(q.shape[-1]) if scale is None else scale)
    if is_causal:
        scores = scores.masked_fill(~torch.ones_like(scores, dtype=torch.bool).tril(), -math.inf)
    if attn_mask is not None:
        full = attn_mask.expand(*query.shape[:2], query.shape[2], key.shape[2])[row, :, :positions]
        scores = scores.masked_fill(~full, -math.inf) if full.dtype is torch.bool else scores + full
    return scores.softmax(-1)


def _multi_head(row: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor | None:
    """The maps of one row as PyTorch's own function gives them, when it is asked for them."""
    given = inspect.signature(functional.multi_head_attention_forward).bind(*args, **kwargs)
    given.arguments.update(need_weights=True, average_attn_weights=False)
    maps = functional.multi_head_attention_forward(*given.args, **given.kwargs)[1]
    return maps[row] if maps is not None and maps.ndim == 4 else None


def _is_over_keys(result: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    dim = kwargs.get("dim", args[1] if len(args) > 1 else None)
    return isinstance(result, torch.Tensor) and result.ndim == 4 and dim in (-1, 3)
