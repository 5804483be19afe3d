"""Attention maps of a running layer, recorded from its calls of PyTorch, which compute as usual.

Fused attention returns no map, so the map of one row is computed beside it from the same queries and keys. Recognized are
`scaled_dot_product_attention` and `multi_head_attention_forward` of `torch.nn.functional`, and every softmax over the last
dimension of (rows, heads, queries, keys) if the layer has multiplied matrices to a result of (queries, keys) before: so the
softmax over features in linear attention is excluded.

Not recognized is code that PyTorch does not dispatch (flash-attn, `flex_attention`, compiled layers).
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Sequence
from functools import partial
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
    """Context manager that records the attention maps of a layer: of one row, for its first queries and keys."""

    def __init__(self, rows: int | None, row: int, positions: int) -> None:
        super().__init__()
        self._rows, self._row, self._positions = rows, row, positions
        self._matmul_shapes: set[tuple[int, ...]] = set()  # last two dimensions of results
        self.maps: list[torch.Tensor] = []  # (heads, queries, keys), float32, on the host
        self.missing_reason = ""  # of the last map that is not among them

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        # PyTorch disables the mode in here, so computations of maps, and those in `func`, are not recorded.
        result = func(*args, **kwargs)
        if func is functional.scaled_dot_product_attention:
            # Autocast would lower the precision of the map.
            with torch.autocast(result.device.type, enabled=False):
                weights = partial(_scaled_dot_product_weights, self._row, self._positions, *args, **kwargs)
                self._record_map(result.shape, weights)
        elif func is functional.multi_head_attention_forward:
            maps = _multi_head_weights(result[0], args, kwargs)
            if maps is not None:
                self._record_map(maps.shape, lambda: maps[self._row])
        elif func in _MATMULS and isinstance(result, torch.Tensor) and result.ndim > 2:
            self._matmul_shapes.add(tuple(result.shape[-2:]))
        elif (
            func in _SOFTMAXES and _is_over_last_dim(result, args, kwargs) and result.shape[-2:] in self._matmul_shapes
        ):
            self._record_map(result.shape, lambda: result[self._row])
        return result

    def _record_map(self, shape: Sequence[int], compute_map: Callable[[], torch.Tensor]) -> None:
        """Keep the corner of a map, (heads, queries, keys), of an attention with the shape (rows, heads, queries, keys)."""
        if len(shape) != 4:
            return
        if shape[0] != self._rows:
            self.missing_reason = (
                f"this layer computes an attention whose result has the shape {tuple(shape)}, and the micro-batch has "
                f"{self._rows} row(s): its first dimension is not the rows, so the part of one row is unknown"
            )
            return
        # After the check: a result of another shape may not have this row.
        corner = compute_map().detach()[:, : self._positions, : self._positions]
        # A copy: a view would keep the whole map alive, and the layer may overwrite it.
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
    """Return the weights of `scaled_dot_product_attention` for one row, (heads, queries, keys).

    As in PyTorch's documentation, without dropout; a query without any key has weights of 0.
    """
    rows = max(len(query), len(key))  # either may be broadcast
    # First queries only, but all keys, since the softmax is over the keys: (heads, queries or keys, features).
    q, k = (each.expand(rows, -1, -1, -1)[row].float() for each in (query[:, :, :positions], key))
    if enable_gqa:
        k = k.repeat_interleave(q.shape[0] // k.shape[0], dim=0)
    scores = (q @ k.transpose(-2, -1)) * (1 / math.sqrt(q.shape[-1]) if scale is None else scale)
    if is_causal:  # aligned to the first query and key, as in PyTorch
        scores = scores.masked_fill(~torch.ones_like(scores, dtype=torch.bool).tril(), -math.inf)
    if attn_mask is not None:
        full = attn_mask.expand(rows, *query.shape[1:3], key.shape[2])[row, :, :positions]
        scores = scores.masked_fill(~full, -math.inf) if full.dtype is torch.bool else scores + full
    return scores.softmax(-1).masked_fill((scores == -math.inf).all(-1, keepdim=True), 0.0)


def _multi_head_weights(output: torch.Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor | None:
    """Return the maps of all rows from PyTorch's own function, called again with `need_weights`.

    With weights it computes NaN for a query without any key. If the layer's own output is finite, these weights were 0.
    """
    call = inspect.signature(functional.multi_head_attention_forward).bind(*args, **kwargs)
    call.arguments.update(need_weights=True, average_attn_weights=False)
    maps = functional.multi_head_attention_forward(*call.args, **call.kwargs)[1]
    if maps is None or not output.isfinite().all():
        return maps
    return maps.masked_fill(maps.isnan().all(-1, keepdim=True), 0.0)


def _is_over_last_dim(result: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    dim = kwargs.get("dim", args[1] if len(args) > 1 else None)
    return isinstance(result, torch.Tensor) and result.ndim == 4 and dim in (-1, 3)
