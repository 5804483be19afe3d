"""Layer relay: train a model one layer at a time, equal to plain training, in constant device memory."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from l2l_core.batches import Sequences as Sequences
from l2l_core.batches import Views as Views
from l2l_core.config import Compress as Compress
from l2l_core.config import RelayConfig as RelayConfig
from l2l_core.devices import CudaDevice as CudaDevice
from l2l_core.devices import Device as Device
from l2l_core.devices import DeviceOutOfMemory as DeviceOutOfMemory
from l2l_core.devices import EmulatedDevice as EmulatedDevice
from l2l_core.edits import LOOPED_RECIPES as LOOPED_RECIPES
from l2l_core.edits import RECIPES as RECIPES
from l2l_core.edits import ActiveLayers as ActiveLayers
from l2l_core.edits import Branch as Branch
from l2l_core.edits import Delink as Delink
from l2l_core.edits import Depth as Depth
from l2l_core.edits import Drop as Drop
from l2l_core.edits import Duplicate as Duplicate
from l2l_core.edits import Edit as Edit
from l2l_core.edits import Freeze as Freeze
from l2l_core.edits import Freezing as Freezing
from l2l_core.edits import Insert as Insert
from l2l_core.edits import Interpolate as Interpolate
from l2l_core.edits import LayerDrop as LayerDrop
from l2l_core.edits import Looping as Looping
from l2l_core.edits import Loops as Loops
from l2l_core.edits import Move as Move
from l2l_core.edits import Recipe as Recipe
from l2l_core.edits import Replace as Replace
from l2l_core.edits import Schedule as Schedule
from l2l_core.edits import Swap as Swap
from l2l_core.edits import Unfreeze as Unfreeze
from l2l_core.edits import Unroll as Unroll
from l2l_core.edits import WarmupStableDecay as WarmupStableDecay
from l2l_core.eps import LayerStore as LayerStore
from l2l_core.eps import NonFiniteError as NonFiniteError
from l2l_core.eps import TornStep as TornStep
from l2l_core.eps.blocks import Unit as Unit
from l2l_core.model import find_layers as find_layers
from l2l_core.plan import PlanError as PlanError
from l2l_core.plan import StepPlan as StepPlan
from l2l_core.relay import Relay as Relay
from l2l_core.shelf import Disk as Disk
from l2l_core.shelf import FileShelf as FileShelf
from l2l_core.shelf import empty_weights as empty_weights
from l2l_core.step_check import UnequalStepError as UnequalStepError
from l2l_core.trace import Event as Event
from l2l_core.trace import StepResult as StepResult
from l2l_core.trace import Trace as Trace
from l2l_core.workers import Network as Network
from l2l_core.workers import WorkerError as WorkerError
from l2l_core.workers import WorkerLostError as WorkerLostError
from l2l_core.workers import Workers as Workers

if TYPE_CHECKING:  # for type checkers and editors, which do not run `__getattr__`
    from l2l_core.analysis import Bound as Bound
    from l2l_core.analysis import Traces as Traces
    from l2l_core.forecast import Fit as Fit
    from l2l_core.forecast import Forecast as Forecast
    from l2l_core.forecast import ForecastCheck as ForecastCheck
    from l2l_core.forecast import NothingFits as NothingFits
    from l2l_core.forecast import PlannedShelf as PlannedShelf
    from l2l_core.forecast import fit_config as fit_config
    from l2l_core.forecast import forecast_config as forecast_config
    from l2l_core.inside import Inside as Inside
    from l2l_core.optim import MupScaling as MupScaling
    from l2l_core.optim import in_bf16 as in_bf16
    from l2l_core.optim import mup_scaling as mup_scaling
    from l2l_core.simulator import Machine as Machine
    from l2l_core.simulator import Profile as Profile
    from l2l_core.simulator import Shapes as Shapes
    from l2l_core.simulator import simulate as simulate

__version__ = "0.2.0"

# Names from rooms that a step does not need, imported on first use.
_LATE = {
    "Bound": "l2l_core.analysis",
    "Traces": "l2l_core.analysis",
    "Fit": "l2l_core.forecast",
    "Forecast": "l2l_core.forecast",
    "ForecastCheck": "l2l_core.forecast",
    "NothingFits": "l2l_core.forecast",
    "PlannedShelf": "l2l_core.forecast",
    "fit_config": "l2l_core.forecast",
    "forecast_config": "l2l_core.forecast",
    "Inside": "l2l_core.inside",
    "in_bf16": "l2l_core.optim",
    "MupScaling": "l2l_core.optim",
    "mup_scaling": "l2l_core.optim",
    "Machine": "l2l_core.simulator",
    "Profile": "l2l_core.simulator",
    "Shapes": "l2l_core.simulator",
    "simulate": "l2l_core.simulator",
}

_REMOVED = {
    "gradual_stacking": 'Depth({0: 3, 100: 6, 200: 9}, grow="middle", shrink="top")',
    "stacking_by_doubling": 'Depth({0: 3, 100: 6, 200: 12}, grow="top", shrink="top")',
    "growing_by_identity": 'Depth({0: 6, 100: 7, 200: 8}, grow="identity", shrink="top")',
    "dropping_by_influence": 'Depth({100: 5, 200: 4}, shrink="influence")',
}


def __getattr__(name: str) -> Any:
    """Import a name in `_LATE` on first use (PEP 562)."""
    if name in _REMOVED:  # `from l2l_core import ...` would hide the text of an AttributeError
        raise ImportError(f"l2l_core.{name} was removed: use a schedule as {_REMOVED[name]}")
    if name not in _LATE:
        raise AttributeError(f"module 'l2l_core' has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(_LATE[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_LATE})
