"""One pass over the model; everything in it dies with the pass.

May import `step.micro_batch`, `step.traffic`, `step.graph`, `eps`, `surgery`, `devices`, `batches`, `model`, `trace`.
Begin reading at `loop.py`, the algorithm; then `stage.py`.
"""

from l2l_core.step.interrupt import interrupts_wait as interrupts_wait
from l2l_core.step.learned import Known as Known
from l2l_core.step.learned import KnownInPart as KnownInPart
from l2l_core.step.learned import Layers as Layers
from l2l_core.step.loop import Loop as Loop
from l2l_core.step.loop import TrainLoop as TrainLoop
from l2l_core.step.stage import Parts as Parts
from l2l_core.step.stage import Stage as Stage
from l2l_core.step.stage import Task as Task
from l2l_core.step.verify import VerifyReport as VerifyReport
from l2l_core.step.verify import compare_step as compare_step
