"""What a session can do about a step that cannot run: settings with which it can, or a line of code."""

from __future__ import annotations

from l2l_core import DeviceOutOfMemory, EmulatedDevice, Relay
from workbench.session.values import Remedy


def remedy_of(error: BaseException, relay: Relay) -> Remedy | None:
    """Return what the relay found out when its device was full, or what lets all layers stay; None if nothing is known."""
    config, layers = relay.config, len(relay.stack)
    if isinstance(error, ValueError) and config.schedule == "depth_first":
        needed = {"keep": max(int(config.keep), layers), "resident": max(config.resident, layers - config.ahead - 1)}
        return Remedy(needed, 0) if needed != {"keep": config.keep, "resident": config.resident} else None
    full = error if isinstance(error, DeviceOutOfMemory) else error.__cause__  # that of a TornStep
    if not isinstance(full, DeviceOutOfMemory) or full.least_bytes is None:
        return None
    return Remedy(dict(full.settings), full.least_bytes, _code(relay, full.least_bytes))


def _code(relay: Relay, nbytes: int) -> str:
    """A device like the relay's, but for its memory; copied, it makes a relay over the same model that fits."""
    if not isinstance(relay.device, EmulatedDevice):
        return ""
    figures = {**relay.device.figures(), "memory_bytes": nbytes}
    words = ", ".join(f"{name}={value!r}" for name, value in figures.items() if value)
    return f"device = EmulatedDevice({words})"
