"""Failures and interrupts of a pass, and settings that would make it fit the device."""

from __future__ import annotations

import logging
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from l2l_core.config import RelayConfig
from l2l_core.devices import DeviceOutOfMemory, Ledger
from l2l_core.schedule_rules import weight_slots
from l2l_core.trace import StepFailure, Trace, format_bytes

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


def suggest_remedy(ledger: Ledger, config: RelayConfig, slot_bytes: int, min_bytes: int, missing_bytes: int) -> str:
    """Return the first setting that saves at least the missing bytes, for the last line of an out-of-memory error.

    It is computed from bookings. After a failed training step a relay tries settings instead
    (`l2l_core/forecast/what_fits.py`); this is for inference, and where no trial is possible. Weights and gradients take
    `min_bytes` under any settings, a layer's weights `slot_bytes`. The rest of the pass may need more than `missing_bytes`.
    """
    if ledger.limit_bytes is not None and min_bytes > ledger.limit_bytes:
        return (
            "Remedy: no settings help, since the shell, one layer and their gradients alone take "
            f"{format_bytes(min_bytes)}. Make large modules of the shell layers as well (layers=[...]), or give the "
            "device more than that."
        )
    now = ledger.by_category()
    activations, stash_bytes = now.get("activations", 0), now.get("stash", 0)
    resident_bytes = slot_bytes * config.resident + (activations if config.keep else 0)
    if resident_bytes and resident_bytes >= missing_bytes:
        schedule = "" if config.schedule == "breadth_first" else ", schedule='breadth_first'"
        return (
            f"Remedy: RelayConfig(resident=0, keep=0{schedule}) keeps no further weights and no graphs on the device "
            f"({format_bytes(resident_bytes)} so far, including activations in use)."
        )
    if config.stash == "device" and stash_bytes >= missing_bytes:
        return f"Remedy: RelayConfig(stash='host') keeps the stash ({format_bytes(stash_bytes)} so far) on the host."
    saved_bytes = slot_bytes * weight_slots(config.ahead)  # `ahead` weight slots and the second gradient slot
    if config.ahead > 0 and saved_bytes >= missing_bytes:
        return (
            f"Remedy: RelayConfig(ahead=0) needs {config.ahead} weight slot(s) and one gradient slot less "
            f"({format_bytes(saved_bytes)}); loads then no longer overlap with compute."
        )
    if activations > 0:
        return (
            f"Remedy: smaller micro-batches need less for activations ({format_bytes(activations)} so far): try "
            f"RelayConfig(micro_batches={2 * config.micro_batches}), or give the device {format_bytes(missing_bytes)} more."
        )
    return (
        "Remedy: the weights alone are too large. Make large modules of the shell layers as well (layers=[...]), or give "
        f"the device {format_bytes(missing_bytes)} more."
    )
