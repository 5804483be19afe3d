"""Sizes and counts of the schedule, shared by the engine, the simulator, forecasts and what-if."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

MAX_PENDING_GRADIENTS = 3  # pushed gradients that may wait for their update, with eager updates
SCALE_GROUP = 256  # elements that share a scale, in integer gradient formats
PACK_CHUNK = 1 << 18  # elements packed or unpacked at a time; a multiple of SCALE_GROUP
PACKING_BYTES = 24  # temporary bytes per element of a chunk
MIN_CHUNK_BYTES = 1 << 14  # below this, the fixed cost of a copy outweighs the gain of a smaller piece
_WEIGHT_BYTES = {"fp32": 4, "bf16": 2}
_CODE_BITS = {"bf16": 16, "int8": 8, "int4": 4}


def weight_itemsize(precision: str) -> int:
    """Return the bytes of a weight on the link and on the device."""
    return _WEIGHT_BYTES[precision]


def weight_size_ratio(precision: str) -> float:
    """Return `weight_itemsize` relative to float32, the type of masters and gradients."""
    return weight_itemsize(precision) / weight_itemsize("fp32")


def packed_numel(format: str | None, numel: int) -> int:
    """Return the size of a parameter's gradient on the link, in float32 elements; `format` is that of `Compress`, or None."""
    if format is None:
        return numel
    codes = -(-numel * _CODE_BITS[format] // 32)
    return codes if format == "bf16" else codes + -(-numel // SCALE_GROUP)


def residual_backups(update: str, rollback: bool) -> int | None:
    """Return how many blocks, the largest ones, keep their old residuals during a step; None for all."""
    return None if rollback or update != "eager" else MAX_PENDING_GRADIENTS


def weight_slots(ahead: int, resident: int = 0) -> int:
    """Return the number of weight slots: for the layer that computes, those that are loaded, and `resident` more."""
    return ahead + 1 + resident


def kept_layers(keep: int, ahead: int, resident: int) -> int:
    """Return how many layers can keep their graphs: the last ones of forward, whose weights are still in their slots."""
    return min(keep, weight_slots(ahead, resident))


def kept_layer_count(settings: Mapping[str, Any], layers: int) -> int:
    """Return how many of `layers` layers a step with these settings does not recompute; the last one never is."""
    kept = kept_layers(settings.get("keep", 0), settings.get("ahead", 1), settings.get("resident", 0))
    return min(layers, max(1, kept))


def has_link(figures: Mapping[str, Any]) -> bool:
    """Whether copies can overlap with compute, by the figures of a device.

    An emulated device without limits copies on the cores that compute, so that overlap gains nothing.
    """
    limits = ("h2d_bytes_per_s", "d2h_bytes_per_s")
    return any(name not in figures or figures[name] for name in limits) or bool(figures.get("latency_s"))


def gradient_slots(ahead: int, schedule: object = "breadth_first", layers: int = 0) -> int:
    """Return the number of gradient slots: one per layer depth first, otherwise one or two."""
    if schedule == "depth_first":
        return layers
    return 2 if ahead else 1  # one is filled while the other is pushed; without overlap, every push is waited for


def chunks_per_copy(micro_batches: int, ahead: int, stash: str) -> int:
    """Return the number of chunks of a layer's copy: one per turn if a stash is copied between them."""
    return micro_batches if ahead and stash != "device" else 1


def chunk_bounds(numel: int, itemsize: int, chunks: int) -> list[int]:
    """Split `numel` elements into at most `chunks` pieces of similar size; return the bounds, the first 0, the last `numel`."""
    chunks = max(1, min(chunks, numel * itemsize // MIN_CHUNK_BYTES))
    # Integer arithmetic, so that engine and simulator split at the same elements.
    return [numel * i // chunks for i in range(chunks + 1)]
