"""Where work runs: memory with a budget, lanes that copy, threads, files.

May import `trace`.
Begin reading at `device.py` (the verbs), `emulated.py`.
"""

from l2l_core.devices.cuda import CudaDevice as CudaDevice
from l2l_core.devices.device import Copy as Copy
from l2l_core.devices.device import Device as Device
from l2l_core.devices.device import Ticket as Ticket
from l2l_core.devices.disk import is_full as is_full
from l2l_core.devices.disk import no_room as no_room
from l2l_core.devices.disk import write_tensors as write_tensors
from l2l_core.devices.emulated import EmulatedDevice as EmulatedDevice
from l2l_core.devices.free_memory import free_bytes as free_bytes
from l2l_core.devices.ledger import DeviceOutOfMemory as DeviceOutOfMemory
from l2l_core.devices.ledger import Ledger as Ledger
from l2l_core.devices.named import resolve_device as resolve_device
from l2l_core.devices.process import Process as Process
from l2l_core.devices.threads import Hands as Hands
from l2l_core.devices.threads import InTurn as InTurn
from l2l_core.devices.threads import Job as Job
from l2l_core.devices.threads import Unseen as Unseen
from l2l_core.devices.threads import serial_thread as serial_thread
from l2l_core.devices.threads import sleep_until as sleep_until
from l2l_core.devices.waiting import HostRoom as HostRoom
from l2l_core.devices.waiting import Spot as Spot
from l2l_core.devices.waiting import WaitingRoom as WaitingRoom
