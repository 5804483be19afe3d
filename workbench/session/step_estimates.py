"""Estimate for a finished step: the memory of in-core training."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from l2l_core import Relay, StepResult
from workbench.readings import batch_bytes, estimate_in_core_bytes
from workbench.session.snapshot_values import LayerRow

_log = logging.getLogger(__name__)


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
