"""Training over several ranks, really run on gloo: pipelines whose stages may recompute and offload.

May import `strategies`, `pipelines`, `workers`, `step.traffic`, `devices`, `batches`, `model`, `trace`, `config`.
Begin reading at `pipeline_run.py`, then `rank_pipeline.py`, `pipeline_cut.py`, `pipeline_stage.py`.
"""

from l2l_core.parallel.pipeline_cut import PipelineCut as PipelineCut
from l2l_core.parallel.pipeline_job import PipelineJob as PipelineJob
from l2l_core.parallel.pipeline_run import PipelineRun as PipelineRun
from l2l_core.parallel.pipeline_run import run_pipeline as run_pipeline
from l2l_core.parallel.rank_pipeline import Pipeline as Pipeline
from l2l_core.parallel.rank_pipeline import RankReport as RankReport
from l2l_core.parallel.rank_pool import RankError as RankError
from l2l_core.parallel.rank_pool import RankPool as RankPool
from l2l_core.parallel.rank_pool import launched_rank as launched_rank
