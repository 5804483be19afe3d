"""One pass over the model: a training step, an inference or a rehearsal.

May import `step.micro_batch`, `step.traffic`, `step.graph`, `eps`, `eps.optimizers`, `eps.blocks`, `devices`, `batches`,
`model`, `trace`, `config`, `schedule_rules`.
Begin reading at `loop.py`, the algorithm; then `passes.py`, which assembles a pass.
"""

from l2l_core.step.batch_loss import BatchLoss as BatchLoss
from l2l_core.step.breadth_first import BreadthFirstRuntime as BreadthFirstRuntime
from l2l_core.step.breadth_first import perturb as perturb
from l2l_core.step.extras import StepExtras as StepExtras
from l2l_core.step.extras import host_copy as host_copy
from l2l_core.step.extras import new_state_copied as new_state_copied
from l2l_core.step.failure import defer_interrupts as defer_interrupts
from l2l_core.step.failure import record_failure as record_failure
from l2l_core.step.guards import StateDiffs as StateDiffs
from l2l_core.step.guards import warn_of_tensors_in_left_memory as warn_of_tensors_in_left_memory
from l2l_core.step.micro_batch import CallObserver as CallObserver
from l2l_core.step.micro_batch import LayerCall as LayerCall
from l2l_core.step.outside_gradients import OutsideGradients as OutsideGradients
from l2l_core.step.pass_cache import PassCache as PassCache
from l2l_core.step.pass_cache import PassKind as PassKind
from l2l_core.step.pass_inputs import WEIGHT_DTYPES as WEIGHT_DTYPES
from l2l_core.step.pass_inputs import PassPlan as PassPlan
from l2l_core.step.pass_inputs import PassSpec as PassSpec
from l2l_core.step.pass_inputs import PassTask as PassTask
from l2l_core.step.pass_inputs import RelayParts as RelayParts
from l2l_core.step.passes import PassResult as PassResult
from l2l_core.step.passes import run_forward as run_forward
from l2l_core.step.passes import run_step as run_step
from l2l_core.step.traffic import MeterRecord as MeterRecord
from l2l_core.step.traffic import StaleMeterError as StaleMeterError
from l2l_core.step.verify import InCoreStep as InCoreStep
from l2l_core.step.verify import VerifyReport as VerifyReport
