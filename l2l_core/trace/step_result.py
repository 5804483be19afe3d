"""What a training step gives back."""

from __future__ import annotations

from dataclasses import dataclass

from l2l_core.trace.trace import Trace


@dataclass(frozen=True, slots=True)
class StepResult:
    """What one training step gave.

    Attributes:
        loss: mean loss over the batch.
        seconds: wall time of the step.
        samples: rows of the batch.
        trace: events and memory of the step.
        peak_device_bytes: highest device bytes during the step.
        bytes_loaded, bytes_pushed: weights copied to the device, gradients copied back.
    """

    loss: float
    seconds: float
    samples: int
    trace: Trace
    peak_device_bytes: int
    bytes_loaded: int
    bytes_pushed: int
