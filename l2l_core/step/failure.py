"""Failures and interrupts of a pass."""

from __future__ import annotations

import logging
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from l2l_core.devices import DeviceOutOfMemory
from l2l_core.trace import StepFailure, Trace

logger = logging.getLogger("l2l_core")


def record_failure(trace: Trace, error: BaseException) -> None:
    """Mark the trace as failed by `error`; after a failed allocation, add the bytes requested and booked."""
    name = type(error).__name__
    if not isinstance(error, DeviceOutOfMemory):
        trace.mark_failed(StepFailure(trace.now(), name))
        return
    booked = error.bytes_by_category
    failed_s, requested, missing = error.raised_s - trace.began_s, error.requested_bytes, error.missing_bytes
    failure = StepFailure(failed_s, name, requested, error.requested_for, sum(booked.values()), missing)
    trace.mark_failed(failure, booked)


@contextmanager
def defer_interrupts() -> Iterator[None]:
    """Raise KeyboardInterrupt for Ctrl-C (or a kernel interrupt) at the end of the block; for a second one at once."""
    if threading.current_thread() is not threading.main_thread():
        yield  # signals reach the main thread only
        return
    before = signal.getsignal(signal.SIGINT)
    pressed = False

    def handler(signum: int, frame: Any) -> None:
        nonlocal pressed
        if pressed:
            raise KeyboardInterrupt
        pressed = True
        logger.warning("interrupt: the present step or inference finishes first; interrupt again to stop at once")

    signal.signal(signal.SIGINT, handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    if pressed:  # not in `finally`, where it would replace an error of the block
        raise KeyboardInterrupt
