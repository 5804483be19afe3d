"""What a session can do about a step that does not fit its device: settings that were found to fit, or a line of code."""

from __future__ import annotations

from l2l_core import DeviceOutOfMemory, EmulatedDevice, Relay
from workbench.session.snapshot_values import Remedy


def find_remedy(error: BaseException, relay: Relay) -> Remedy | None:
    """Return what the relay found out when its device was full; None for any other error, or if nothing could be tried."""
    full = error if isinstance(error, DeviceOutOfMemory) else error.__cause__  # that of a TornStep
    if not isinstance(full, DeviceOutOfMemory) or full.least_bytes is None:
        return None
    return Remedy(dict(full.settings), full.least_bytes, _larger_device_code(relay, full.least_bytes))


def _larger_device_code(relay: Relay, nbytes: int) -> str:
    """A device like the relay's, but for its memory; copied, it makes a relay over the same model that fits."""
    if not isinstance(relay.device, EmulatedDevice):
        return ""
    figures = {**relay.device.figures(), "memory_bytes": nbytes}
    words = ", ".join(f"{name}={value!r}" for name, value in figures.items() if value)
    return f"device = EmulatedDevice({words})"
