"""Attention maps of a layer that runs: what it asks of PyTorch is overheard, and nothing of it is computed in another way.

A fused attention gives no map out, so the map is computed beside it, from the same queries and keys, for one row alone. Seen
are `scaled_dot_product_attention` and `multi_head_attention_forward` of `torch.nn.functional`, and every softmax over the last
dimension of (rows, heads, queries, keys), if the layer has multiplied matrices to queries and keys of these numbers before: a
softmax over features, as linear attention has, is none of keys.

What it is not: a look into code that PyTorch cannot see (flash-attn, `flex_attention`, compiled layers).
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.nn import functional
from torch.overrides import TorchFunctionMode

_MATMULS = {
    torch.matmul,
    torch.bmm,
    torch.baddbmm,
    torch.einsum,
    torch.Tensor.matmul,
    torch.Tensor.__matmul__,
    torch.Tensor.bmm,
    torch.Tensor.baddbmm,
}
_SOFTMAXES = {functional.softmax, torch.softmax, torch.Tensor.softmax, torch.special.softmax}


class AttentionMaps(TorchFunctionMode):
    """Notes the attention maps of a layer while it is in force; use it as a context manager.

    Args:
        rows: how many there are.
        row: whose maps are kept.
        positions: how many of the queries and keys, the first ones.

    Attributes:
        found: maps so far, (heads, queries, keys), float32, on the host.
        why_not: why the last map that is not among them was not taken.
    """

    def __init__(self, rows: int, row: int, positions: int) -> None:
        super().__init__()
        self._rows, self._row, self._positions = rows, row, positions
        self._matmul_shapes: set[tuple[int, ...]] = set()  # the last two dimensions of each
        self.maps: list[torch.Tensor] = []
        self.missing_reason = ""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        # In here PyTorch has put the mode away: what is computed for a map, or within `func`, is not overheard again.
        result = func(*args, **kwargs)
        if func is functional.scaled_dot_product_attention:
            # Autocast would multiply in low precision what `_scaled` has made float32.
            with torch.autocast(result.device.type, enabled=False):
                self._record_map(
                    result.shape, lambda: _scaled_dot_product_weights(self._row, self._positions, *args, **kwargs)
                )
        elif func is functional.multi_head_attention_forward:
            maps = _multi_head_weights(result[0], args, kwargs)
            if maps is not None:
                self._record_map(maps.shape, lambda: maps[self._row])
        elif func in _MATMULS and isinstance(result, torch.Tensor) and result.ndim > 2:
            self._matmul_shapes.add(tuple(result.shape[-2:]))
        elif (
            func in _SOFTMAXES
            and _is_over_last_dim(result, args, kwargs)
            and tuple(result.shape[-2:]) in self._matmul_shapes
        ):
            self._record_map(result.shape, lambda: result[self._row])
        return result

    def _record_map(self, shape: Sequence[int], compute_map: Callable[[], torch.Tensor]) -> None:
        """Keep the corner of a map, (heads, queries, keys), of an attention of four dimensions, whose first is to be the rows."""
        if len(shape) != 4:
            return
        if shape[0] != self._rows:
            self.missing_reason = (
                f"this layer computes an attention whose result has the shape {tuple(shape)}, and the micro-batch has "
                f"{self._rows} row(s): its first dimension is not the rows, so which part belongs to one row cannot be told"
            )
            return
        # Only now: in a result of another shape there need not be a row of this number.
        corner = compute_map().detach()[:, : self._positions, : self._positions]
        # A copy: a view would keep the whole map alive, and the layer may go on to write to it.
        self.maps.append(corner.to("cpu", torch.float32, copy=True))


def _scaled_dot_product_weights(
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
) -> torch.Tensor:
    """The weights that `scaled_dot_product_attention` gives the values of one row, (heads, queries, keys).

    As PyTorch documents them, without dropout; a query that sees no key gives a weight of 0 to each.
    """
    rows = max(len(query), len(key))  # one of them may be the same for all
    # Of the queries the first ones, but all keys: the softmax of a query is over all of them.
    q, k = (
        each.expand(rows, -1, -1, -1)[row].float() for each in (query[:, :, :positions], key)
    )  # (heads, either, features)
    if enable_gqa:
        k = k.repeat_interleave(q.shape[0] // k.shape[0], dim=0)
    scores = (q @ k.transpose(-2, -1)) * (1 / math.sqrt(q.shape[-1]) if scale is None else scale)
    if is_causal:  # counted from the first query and key, as PyTorch does: the first queries alone see the same keys
        scores = scores.masked_fill(~torch.ones_like(scores, dtype=torch.bool).tril(), -math.inf)
    if attn_mask is not None:
        full = attn_mask.expand(rows, *query.shape[1:3], key.shape[2])[row, :, :positions]
        scores = scores.masked_fill(~full, -math.inf) if full.dtype is torch.bool else scores + full
    return scores.softmax(-1).masked_fill((scores == -math.inf).all(-1, keepdim=True), 0.0)


def _multi_head_weights(output: torch.Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor | None:
    """The maps of all rows as PyTorch's own function gives them, when it is asked for them.

    Asked for maps, it takes a way on which a query that sees no key makes NaN. If the layer's own output is finite, no NaN was
    among its weights, and these were 0.
    """
    given = inspect.signature(functional.multi_head_attention_forward).bind(*args, **kwargs)
    given.arguments.update(need_weights=True, average_attn_weights=False)
    maps = functional.multi_head_attention_forward(*given.args, **given.kwargs)[1]
    if maps is None or not output.isfinite().all():
        return maps
    return maps.masked_fill(maps.isnan().all(-1, keepdim=True), 0.0)


def _is_over_last_dim(result: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    dim = kwargs.get("dim", args[1] if len(args) > 1 else None)
    return isinstance(result, torch.Tensor) and result.ndim == 4 and dim in (-1, 3)
