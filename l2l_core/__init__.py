"""Layer relay: train a model one layer at a time, equal to plain training, in device memory that does not grow with depth."""

from l2l_core.bounds import Bound as Bound
from l2l_core.config import RelayConfig as RelayConfig
from l2l_core.cuda import CudaDevice as CudaDevice
from l2l_core.device import Device as Device
from l2l_core.emulated import EmulatedDevice as EmulatedDevice
from l2l_core.formula import Machine as Machine
from l2l_core.formula import Shapes as Shapes
from l2l_core.layers import find_layers as find_layers
from l2l_core.memory import DeviceOutOfMemory as DeviceOutOfMemory
from l2l_core.profile import Profile as Profile
from l2l_core.relay import Relay as Relay
from l2l_core.relay import StepResult as StepResult
from l2l_core.simulate import simulate as simulate
from l2l_core.store import LayerStore as LayerStore
from l2l_core.store import NonFiniteError as NonFiniteError
from l2l_core.store import TornStep as TornStep
from l2l_core.trace import Event as Event
from l2l_core.trace import Trace as Trace
