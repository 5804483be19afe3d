"""The schedule in numbers, said once: what the loop does, and what replay, forecasts and what-if reckon with."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

MAX_PENDING_GRADIENTS = 3  # gradients pushed and not yet used, in eager updates
SCALE_GROUP = 256  # elements of a parameter that share a scale where gradients travel as whole numbers
PACK_CHUNK = 1 << 18  # elements that are packed or unpacked at a time; whole groups
PACKING_BYTES = 24  # per element of a chunk: what packing has beside the gradient
MIN_CHUNK_BYTES = 1 << 14  # below this, the fixed cost of a copy outweighs what a piece could save


def weight_itemsize(precision: str) -> int:
    """Return the bytes of a weight over the link and on the device."""
    return {"fp32": 4, "bf16": 2}[precision]


def weight_size_ratio(precision: str) -> float:
    """Divide that by the bytes of float32, in which masters and gradients are."""
    return weight_itemsize(precision) / weight_itemsize("fp32")


_CODE_BITS = {"bf16": 16, "int8": 8, "int4": 4}


def packed_numel(format: str | None, numel: int) -> int:
    """Count what the gradient of a parameter takes on the wire in a format of `Compress`, in float32; None: as it is."""
    if format is None:
        return numel
    codes = -(-numel * _CODE_BITS[format] // 32)
    return codes if format == "bf16" else codes + -(-numel // SCALE_GROUP)


def residual_backups(update: str, rollback: bool) -> int | None:
    """Count the blocks whose residuals of the step before are kept meanwhile, the largest ones; None: all of them."""
    return None if rollback or update == "deferred" else MAX_PENDING_GRADIENTS


def weight_slots(ahead: int, resident: int = 0) -> int:
    """Count the layers that the device has room for: the one at work, those that load meanwhile, and those that stay."""
    return ahead + 1 + resident


def kept_layers(keep: int, ahead: int, resident: int) -> int:
    """Count the layers whose graphs can be kept: the last ones of forward, whose weights are still there in backward."""
    return min(keep, weight_slots(ahead, resident))


def kept_layer_count(settings: Mapping[str, Any], layers: int) -> int:
    """Count the layers, of so many, that a step with these settings does not recompute; where they name no `keep`, none is kept.

    The last one is back-propagated from the graph that its forward has left, whatever is kept.
    """
    kept = kept_layers(settings.get("keep", 0), settings.get("ahead", 1), settings.get("resident", 0))
    return min(layers, max(1, kept))


def load_count(layers: int, ahead: int, resident: int) -> int:
    """Count the loads of a training step that visits each of so many layers once, there and back."""
    return layers + max(0, layers - weight_slots(ahead, resident))


def has_link(figures: Mapping[str, Any]) -> bool:
    """Whether copies take time that is not compute's, by what a device states of itself.

    An emulated one without limits copies on the cores that compute, so that nothing is gained by doing both at once.
    """
    limits = ("h2d_bytes_per_s", "d2h_bytes_per_s")
    return any(name not in figures or figures[name] for name in limits) or bool(figures.get("latency_s"))


def gradient_slots(ahead: int, schedule: str = "breadth_first", layers: int = 0) -> int:
    """Count the gradients of layers that the device has room for: one fills while another is being pushed.

    Depth first, those of all layers gather through all micro-batches.
    """
    if schedule == "depth_first":
        return layers
    return 2 if ahead else 1  # without overlap, every push is waited for


def chunks_per_copy(micro_batches: int, ahead: int, stash: str) -> int:
    """Count the pieces in which a layer goes over the link: one per turn, where a stash goes between them."""
    return micro_batches if ahead and stash != "device" else 1


def chunk_bounds(numel: int, itemsize: int, chunks: int) -> list[int]:
    """Cut `numel` elements into at most `pieces` of about the same size: first element of each, and the end."""
    chunks = max(1, min(chunks, numel * itemsize // MIN_CHUNK_BYTES))
    # In whole numbers: loop and replay cut at the same elements.
    return [numel * i // chunks for i in range(chunks + 1)]
