"""What a step would need without a relay, told anew only when something is different that it depends on."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from l2l_core import Relay, StepResult
from workbench.readings import batch_bytes, estimate_in_core_bytes
from workbench.session.snapshot_values import LayerRow

_log = logging.getLogger(__name__)


class InCoreEstimate:
    """Device bytes of in-core training of a relay's model, step by step.

    Args:
        relay: whose steps these are.
    """

    def __init__(self, relay: Relay) -> None:
        self._relay = relay
        self._inputs: object = None  # what the need was last told for
        self._nbytes: int | None = None  # and what it was

    def estimate(self, result: StepResult, layers: Sequence[LayerRow]) -> int | None:
        """Estimate the device bytes that in-core training would need for such a step; None where that cannot be told."""
        trained = self._relay.shell.num_trained, *((layer.key, layer.num_trained) for layer in layers)
        like = self._relay.config, result.samples, batch_bytes(result.trace), trained
        if like == self._inputs:
            return self._nbytes
        self._inputs, self._nbytes = like, None
        try:
            self._nbytes = estimate_in_core_bytes(self._relay, result.trace)
        except Exception:  # the step is done whatever is thought of it
            _log.exception("what in-core training would need cannot be told")
        return self._nbytes
