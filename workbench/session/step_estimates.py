"""What a step computes, in floating-point operations: an estimate from numbers of parameters and of tokens."""

from __future__ import annotations

import torch

from l2l_core import Relay, Trace
from l2l_core.batches import Batch, leaves_in
from l2l_core.schedule_rules import kept_layer_count

FLOP_FORMULA = (
    "FLOP are an estimate: per parameter and token 2 forward and 6 in backward with recompute (2 less where a parameter is "
    "frozen, 2 less in the last layer and the shell, which are not recomputed), nothing for attention's own products."
)


def count_flop(relay: Relay, batch: Batch, trace: Trace, samples: int) -> int:
    """Count the floating-point operations of a finished step, as `costs_by_formula` of the forecast does.

    Args:
        relay: after the step.
        batch: of the step.
        trace: of the step; layers that sat it out do not count.
        samples: rows of the batch.
    """
    ran = {event.layer for event in trace.events_since(0)[0] if event.kind == "forward"}
    layers = [layer for layer in relay.stack if layer.key in ran]
    shell = relay.shell
    operations = 2 * shell.num_params + 2 * (shell.num_params + shell.num_trained)
    kept = kept_layer_count(trace.settings, len(layers))
    learns = shell.num_trained > 0  # whether something at or before this layer is trained, so that backward comes here
    for layer in layers:
        learns = learns or layer.num_trained > 0
        operations += 2 * layer.num_params
        if learns:
            again = 0 if layer in layers[-kept:] else 2 * layer.num_params
            operations += again + 2 * (layer.num_params + layer.num_trained)
    return operations * count_tokens(batch, samples)


def count_tokens(batch: Batch, samples: int) -> int:
    """Count the positions of the first table of whole numbers, as `input_ids` is; rows if there is none."""
    for leaf in leaves_in(batch):
        if isinstance(leaf, torch.Tensor) and leaf.ndim == 2 and not leaf.is_floating_point() and len(leaf) == samples:
            return leaf.numel()
    return samples
