"""Devices: memory with a budget, lanes that copy, threads, files.

May import `trace`.
Begin reading at `device.py` (the interface), `emulated.py`.
"""

from l2l_core.devices.cuda import CudaDevice as CudaDevice
from l2l_core.devices.device import Copy as Copy
from l2l_core.devices.device import Device as Device
from l2l_core.devices.device import Ticket as Ticket
from l2l_core.devices.device import free_bytes as free_bytes
from l2l_core.devices.device import return_freed_memory as return_freed_memory
from l2l_core.devices.device_names import resolve_device as resolve_device
from l2l_core.devices.emulated import EmulatedDevice as EmulatedDevice
from l2l_core.devices.executors import ForkGuard as ForkGuard
from l2l_core.devices.executors import InlineExecutor as InlineExecutor
from l2l_core.devices.executors import NoTorchModes as NoTorchModes
from l2l_core.devices.executors import serial_executor as serial_executor
from l2l_core.devices.executors import sleep_until as sleep_until
from l2l_core.devices.ledger import DeviceOutOfMemory as DeviceOutOfMemory
from l2l_core.devices.ledger import Ledger as Ledger
from l2l_core.devices.stash_store import HostStashStore as HostStashStore
from l2l_core.devices.stash_store import StashSlot as StashSlot
from l2l_core.devices.stash_store import StashStore as StashStore
from l2l_core.devices.tensor_files import explain_full_disk as explain_full_disk
from l2l_core.devices.tensor_files import write_tensors as write_tensors
