"""Memory that a step could still take, of a device or of the host."""

from __future__ import annotations

import psutil

from l2l_core.devices.device import Device

_USABLE_SHARE = 0.9  # of memory without a budget: fragments, libraries and other processes take the rest


def free_bytes(device: Device | None) -> int:
    """Return the bytes that are usable on a device, whatever its budget; on the host for None or a host device."""
    free = device.free_bytes() if device is not None else None
    return int(_USABLE_SHARE * (psutil.virtual_memory().available if free is None else free))
