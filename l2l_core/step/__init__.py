"""One pass over the model; everything in it dies with the pass.

May import `step.micro_batch`, `step.traffic`, `step.graph`, `eps`, `surgery`, `devices`, `batches`, `model`, `trace`.
Begin reading at `loop.py`, the algorithm; then `run.py`, which puts a pass together.
"""

from l2l_core.step.failure import note_failure as note_failure
from l2l_core.step.ground import Task as Task
from l2l_core.step.interrupt import interrupts_wait as interrupts_wait
from l2l_core.step.learned import Kind as Kind
from l2l_core.step.learned import Layers as Layers
from l2l_core.step.learned import Learned as Learned
from l2l_core.step.parts import Parts as Parts
from l2l_core.step.plan import Plan as Plan
from l2l_core.step.run import Ran as Ran
from l2l_core.step.run import Work as Work
from l2l_core.step.run import run_forward as run_forward
from l2l_core.step.run import run_step as run_step
from l2l_core.step.stage import Stage as Stage
from l2l_core.step.traffic import Metered as Metered
from l2l_core.step.traffic import NewHabit as NewHabit
from l2l_core.step.verify import InCore as InCore
from l2l_core.step.verify import VerifyReport as VerifyReport
