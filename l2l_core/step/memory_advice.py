"""Settings that would make a pass fit the device: the last line of an out-of-memory error.

The advice is computed from bookings, not tried. After a failed training step a relay tries settings instead
(`l2l_core/forecast/what_fits.py`); this is for inference, and where no trial is possible.
"""

from __future__ import annotations

from l2l_core.config import RelayConfig
from l2l_core.devices import Ledger
from l2l_core.schedule_rules import weight_slots
from l2l_core.trace import format_bytes


def suggest_remedy(ledger: Ledger, config: RelayConfig, slot_bytes: int, min_bytes: int, missing_bytes: int) -> str:
    """Return the first setting that saves at least the missing bytes, with the number of bytes.

    Args:
        ledger: of the device.
        config: present settings.
        slot_bytes: bytes of a layer's weights.
        min_bytes: bytes of weights and gradients under any settings.
        missing_bytes: bytes missing now; the rest of the pass may need more.
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
