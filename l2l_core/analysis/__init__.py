"""Analysis of traces: phases of a step, its roofline, the lane that limits each phase, waits between workers.

May import `trace`, `schedule_rules`.
Begin reading at `roofline.py`, `phases.py`, `bounds.py`.
"""

from l2l_core.analysis.bounds import find_bounds as find_bounds
from l2l_core.analysis.bounds import find_plan_bounds as find_plan_bounds
from l2l_core.analysis.bounds import micro_batches_to_hide as micro_batches_to_hide
from l2l_core.analysis.phases import Bound as Bound
from l2l_core.analysis.roofline import ALL_PHASES as ALL_PHASES
from l2l_core.analysis.roofline import MIDDLE as MIDDLE
from l2l_core.analysis.roofline import OVERLAPPING as OVERLAPPING
from l2l_core.analysis.roofline import PHASES as PHASES
from l2l_core.analysis.roofline import Roofline as Roofline
from l2l_core.analysis.roofline import VisitWork as VisitWork
from l2l_core.analysis.roofline import roofline as roofline
from l2l_core.analysis.worker_traces import STEP_BEGIN as STEP_BEGIN
from l2l_core.analysis.worker_traces import Traces as Traces
from l2l_core.analysis.worker_traces import Wait as Wait
from l2l_core.analysis.worker_traces import find_waits as find_waits
