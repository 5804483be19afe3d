"""What the trace of a step that failed says of its end."""

from __future__ import annotations

from l2l_core.devices import DeviceOutOfMemory
from l2l_core.trace import StepFailure, Trace


def record_failure(trace: Trace, error: BaseException) -> None:
    """Mark the trace as that of a step that failed; of an allocation without room, with what it asked for."""
    name = type(error).__name__
    if not isinstance(error, DeviceOutOfMemory):
        trace.mark_failed(StepFailure(trace.now(), name))
        return
    held = error.bytes_by_category
    failed = StepFailure(
        error.raised_s - trace.began_s,
        name,
        error.requested_bytes,
        error.requested_for,
        sum(held.values()),
        error.missing_bytes,
    )
    trace.mark_failed(failed, held)
