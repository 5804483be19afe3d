"""Devices by PyTorch's names for them."""

from __future__ import annotations

import torch

from l2l_core.devices.cuda import CudaDevice
from l2l_core.devices.device import Device
from l2l_core.devices.emulated import EmulatedDevice


def resolve_device(device: str | torch.device | Device) -> Device:
    """Return the device called "auto" (a GPU if available), "cpu" (emulated, without limits), or "cuda[:n]".

    Raises:
        ValueError: no such device on this machine.
        TypeError: neither a name nor a Device.
    """
    if isinstance(device, Device):
        return device
    if isinstance(device, torch.device):
        device = "cpu" if device.type == "cpu" else str(device)
    if not isinstance(device, str):
        raise TypeError(f"device={device!r}: give 'auto', 'cpu', 'cuda', 'cuda:n' or a Device")
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cpu":
        return EmulatedDevice()
    if device.split(":")[0] == "cuda":
        return CudaDevice(device)
    raise ValueError(f"device={device!r} does not exist: give 'auto', 'cpu', 'cuda', 'cuda:n' or a Device")
