"""Estimates for a finished step: its compute in floating-point operations, and the memory of in-core training."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch

from l2l_core import Relay, StepResult, Trace
from l2l_core.batches import Batch, leaves_in
from l2l_core.schedule_rules import kept_layer_count
from workbench.readings import batch_bytes, estimate_in_core_bytes
from workbench.session.snapshot_values import LayerRow

_log = logging.getLogger(__name__)

FLOP_FORMULA = (
    "FLOP are an estimate: per parameter and token 2 forward and 6 in backward with recompute (2 less where a parameter is "
    "frozen, 2 less in the last layer and the shell, which are not recomputed), nothing for attention's own products."
)


def count_flop(relay: Relay, batch: Batch, trace: Trace, samples: int) -> int:
    """Estimate the floating-point operations of a finished step, by `FLOP_FORMULA`.

    Args:
        relay: the relay after the step.
        batch: batch of the step.
        trace: trace of the step; skipped layers do not count.
        samples: rows of the batch.
    """
    ran = {event.layer for event in trace.events_since(0)[0] if event.kind == "forward"}
    layers = [layer for layer in relay.stack if layer.key in ran]
    shell = relay.shell
    operations = 2 * shell.num_params + 2 * (shell.num_params + shell.num_trained)
    kept = kept_layer_count(trace.settings, len(layers))
    learns = shell.num_trained > 0  # whether anything at or before this layer is trained, so that backward reaches it
    for layer in layers:
        learns = learns or layer.num_trained > 0
        operations += 2 * layer.num_params
        if learns:
            again = 0 if layer in layers[-kept:] else 2 * layer.num_params
            operations += again + 2 * (layer.num_params + layer.num_trained)
    return operations * count_tokens(batch, samples)


def count_tokens(batch: Batch, samples: int) -> int:
    """Return the number of elements of the first 2-D integer tensor, such as `input_ids`; `samples` if there is none."""
    for leaf in leaves_in(batch):
        if isinstance(leaf, torch.Tensor) and leaf.ndim == 2 and not leaf.is_floating_point() and len(leaf) == samples:
            return leaf.numel()
    return samples


class InCoreEstimate:
    """Device bytes of in-core training of a relay's model, recomputed only when its inputs change.

    Args:
        relay: the relay that makes the steps.
    """

    def __init__(self, relay: Relay) -> None:
        self._relay = relay
        self._inputs: object = None  # inputs of the last estimate
        self._nbytes: int | None = None  # the last estimate

    def estimate(self, result: StepResult, layers: Sequence[LayerRow]) -> int | None:
        """Return the device bytes that in-core training would need for the same step; None if they cannot be estimated."""
        trained = self._relay.shell.num_trained, *((layer.key, layer.num_trained) for layer in layers)
        inputs = self._relay.config, result.samples, batch_bytes(result.trace), trained
        if inputs == self._inputs:
            return self._nbytes
        self._inputs, self._nbytes = inputs, None
        try:
            self._nbytes = estimate_in_core_bytes(self._relay, result.trace)
        except Exception:  # the step is done, so a failed estimate must not stop the run
            _log.exception("the memory of in-core training cannot be estimated")
        return self._nbytes
