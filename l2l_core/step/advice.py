"""Which setting would make a step fit the device: the last line of an out-of-memory error."""

from __future__ import annotations

from l2l_core.config import RelayConfig
from l2l_core.devices import Ledger
from l2l_core.rules import weight_slots
from l2l_core.trace import format_bytes


def advise(ledger: Ledger, config: RelayConfig, slot_bytes: int, missing_bytes: int) -> str:
    """The first setting whose known saving covers `missing_bytes`, with the number."""
    now = ledger.by_category()
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
