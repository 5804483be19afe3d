"""Pipelines over several ranks: schedules as data, with a check, a text form, slot diagrams and a simulation.

On top of them, the costs of a large transformer on many ranks by formula and simulated, and the search for a layout. May import
`trace`; no file here imports torch. `strategies` chooses what each stage keeps, recomputes and offloads.
Begin reading at `pipeline_plan.py`, then `pipeline_schedules.py`; of the costs, at `layout_cost.py`.
"""

from l2l_core.pipelines.layout_cost import cut_layout as cut_layout
from l2l_core.pipelines.layout_cost import layout_cost as layout_cost
from l2l_core.pipelines.layout_search import LAYOUT_WAYS as LAYOUT_WAYS
from l2l_core.pipelines.layout_search import LayoutSearch as LayoutSearch
from l2l_core.pipelines.layout_search import LayoutWay as LayoutWay
from l2l_core.pipelines.layout_search import WayTable as WayTable
from l2l_core.pipelines.layout_search import all_layouts as all_layouts
from l2l_core.pipelines.layout_search import compare_ways as compare_ways
from l2l_core.pipelines.layout_search import find_layout as find_layout
from l2l_core.pipelines.layout_search import search_layouts as search_layouts
from l2l_core.pipelines.megatron_table import MEGATRON_CLUSTER as MEGATRON_CLUSTER
from l2l_core.pipelines.megatron_table import MEGATRON_ROWS as MEGATRON_ROWS
from l2l_core.pipelines.megatron_table import MegatronRow as MegatronRow
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
from l2l_core.pipelines.rank_layout import MESSAGES as MESSAGES
from l2l_core.pipelines.rank_layout import PARTS as PARTS
from l2l_core.pipelines.rank_layout import LayoutCost as LayoutCost
from l2l_core.pipelines.rank_layout import RankCluster as RankCluster
from l2l_core.pipelines.rank_layout import RankLayout as RankLayout
from l2l_core.pipelines.rank_layout import check_layout as check_layout
from l2l_core.pipelines.transformer_shape import TransformerShape as TransformerShape
from l2l_core.pipelines.transformer_shape import state_bytes as state_bytes
