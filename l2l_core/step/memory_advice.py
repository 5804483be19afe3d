"""Which setting would make a pass fit the device, from what is known in the middle of it: the last line of an error.

What it is not: tried. When a step has failed, a relay tries settings (`l2l_core/forecast/what_fits.py`) and says what it
found instead. This is what there is to say of inference, and where nothing can be tried.
"""

from __future__ import annotations

from l2l_core.config import RelayConfig
from l2l_core.devices import Ledger
from l2l_core.schedule_rules import weight_slots
from l2l_core.trace import format_bytes


def suggest_remedy(ledger: Ledger, config: RelayConfig, slot_bytes: int, min_bytes: int, missing_bytes: int) -> str:
    """Name the first setting whose known saving covers what is missing, with the number.

    Args:
        ledger: of the device.
        config: present settings.
        slot_bytes: of a layer's weights.
        least_bytes: that weights and gradients take whatever the settings.
        missing_bytes: at this moment; what else the pass would ask for is not known.
    """
    if ledger.limit_bytes is not None and min_bytes > ledger.limit_bytes:
        return (
            "Remedy: no settings help, since the shell, one layer and their gradients alone take "
            f"{format_bytes(min_bytes)}. Make big parts of the shell layers of their own (layers=[...]), or give the "
            "device more than that."
        )
    now = ledger.by_category()
    stays_bytes = slot_bytes * config.resident + (now.get("activations", 0) if config.keep else 0)
    relayed = "" if config.schedule == "breadth_first" else ", schedule='breadth_first'"
    if stays_bytes and stays_bytes >= missing_bytes:
        return (
            f"Remedy: RelayConfig(resident=0, keep=0{relayed}) lets no further weights and no graphs stay on the device "
            f"({format_bytes(stays_bytes)} so far, with the activations at work)."
        )
    stash_bytes = now.get("stash", 0)
    if config.stash == "device" and stash_bytes >= missing_bytes:
        return f"Remedy: RelayConfig(stash='host') keeps the stash ({format_bytes(stash_bytes)} so far) on the host."
    saved_bytes = slot_bytes * weight_slots(config.ahead)  # `ahead` weight slots and the second gradient slot
    if config.ahead > 0 and saved_bytes >= missing_bytes:
        return (
            f"Remedy: RelayConfig(ahead=0) needs {config.ahead} weight slot(s) and one gradient slot less "
            f"({format_bytes(saved_bytes)}); loads are then no longer hidden under compute."
        )
    activations = now.get("activations", 0)
    if activations > 0:
        return (
            f"Remedy: smaller micro-batches need less for activations ({format_bytes(activations)} so far): try "
            f"RelayConfig(micro_batches={2 * config.micro_batches}), or give the device {format_bytes(missing_bytes)} more."
        )
    return (
        "Remedy: the weights alone are too large. Make big parts of the shell layers of their own (layers=[...]), or give "
        f"the device {format_bytes(missing_bytes)} more."
    )
