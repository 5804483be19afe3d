"""Matrices of a layer split over ranks, as in Megatron-LM (arXiv 1909.08053), and the bytes of its all-reduces."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn

from l2l_core.parallel.parallel_traffic import WireBytes, all_reduce_bytes


def split_matrices(layer: nn.Module, mesh: Any) -> None:
    """Split an MLP over ranks, `up` by columns and `down` by rows: its forward needs one all-reduce.

    Raises:
        ValueError: the layer has no such parts.
    """
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    up_and_down(layer)
    parallelize_module(layer, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})


def up_and_down(layer: nn.Module) -> tuple[nn.Linear, nn.Linear]:
    """Return the two matrices of an MLP."""
    parts = dict(layer.named_children())
    up, down = parts.get("up"), parts.get("down")
    if not isinstance(up, nn.Linear) or not isinstance(down, nn.Linear):
        raise ValueError(
            f"tensor parallelism splits the linear modules `up` and `down` of each layer, and {type(layer).__name__} has "
            f"{', '.join(parts) or 'no parts'}: give them these names, or choose 'ZeRO 3', which shards any layer"
        )
    return up, down


def split_traffic(layers: Sequence[nn.Module], value_bytes: int, count: int, is_first: bool) -> WireBytes:
    """Return the bytes of forward and backward through layers whose matrices are split.

    Args:
        layers: in their order.
        value_bytes: of one column of a layer's input, over all rows.
        count: number of ranks.
        is_first: the input of the first layer is data and needs no gradient.
    """
    parts = [up_and_down(layer) for layer in layers]
    widths = [down.out_features for _, down in parts] + [up.in_features for up, _ in parts[is_first:]]
    return sum((all_reduce_bytes(value_bytes * width, count) for width in widths), WireBytes())
