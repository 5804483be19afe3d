"""Inspection of a model while its layers run: activations, attention, and the predictions at each depth.

May import `step.micro_batch`, `eps.blocks`, `batches`, `model`.
Begin reading at `inspection_result.py`, `inspection.py`, `layer_observer.py`.
"""

from l2l_core.inside.inspection import InspectionPasses as InspectionPasses
from l2l_core.inside.inspection import run_inspection as run_inspection
from l2l_core.inside.inspection_request import InspectionRequest as InspectionRequest
from l2l_core.inside.inspection_request import MicroBatchRows as MicroBatchRows
from l2l_core.inside.inspection_request import check_arguments as check_arguments
from l2l_core.inside.inspection_request import evenly_spaced as evenly_spaced
from l2l_core.inside.inspection_request import find_tokens as find_tokens
from l2l_core.inside.inspection_result import BINS as BINS
from l2l_core.inside.inspection_result import ActivationStats as ActivationStats
from l2l_core.inside.inspection_result import Continuation as Continuation
from l2l_core.inside.inspection_result import Inside as Inside
from l2l_core.inside.inspection_result import LayerObservation as LayerObservation
from l2l_core.inside.inspection_result import LensResult as LensResult
from l2l_core.inside.layer_observer import LayerObserver as LayerObserver
