"""Pipelines over several ranks: schedules as data, with a check, a text form, slot diagrams and a simulation.

May import `trace`; no file here imports torch. `strategies` chooses what each stage keeps, recomputes and offloads.
Begin reading at `pipeline_plan.py`, then `pipeline_schedules.py`.
"""

from l2l_core.pipelines.pipeline_check import check_pipeline as check_pipeline
from l2l_core.pipelines.pipeline_plan import PipelineAction as PipelineAction
from l2l_core.pipelines.pipeline_plan import PipelineError as PipelineError
from l2l_core.pipelines.pipeline_plan import PipelinePlan as PipelinePlan
from l2l_core.pipelines.pipeline_schedules import SCHEDULES as SCHEDULES
from l2l_core.pipelines.pipeline_schedules import dual_pipe_v as dual_pipe_v
from l2l_core.pipelines.pipeline_schedules import gpipe as gpipe
from l2l_core.pipelines.pipeline_schedules import interleaved as interleaved
from l2l_core.pipelines.pipeline_schedules import looped_breadth_first as looped_breadth_first
from l2l_core.pipelines.pipeline_schedules import one_forward_one_backward as one_forward_one_backward
from l2l_core.pipelines.pipeline_schedules import relay_over_ranks as relay_over_ranks
from l2l_core.pipelines.pipeline_schedules import varuna as varuna
from l2l_core.pipelines.pipeline_schedules import zero_bubble_h1 as zero_bubble_h1
from l2l_core.pipelines.pipeline_schedules import zero_bubble_v as zero_bubble_v
from l2l_core.pipelines.pipeline_simulation import PipelineSimulation as PipelineSimulation
from l2l_core.pipelines.pipeline_simulation import RankSpeeds as RankSpeeds
from l2l_core.pipelines.pipeline_simulation import StageCost as StageCost
from l2l_core.pipelines.pipeline_simulation import TimedAction as TimedAction
from l2l_core.pipelines.pipeline_simulation import simulate_pipeline as simulate_pipeline
