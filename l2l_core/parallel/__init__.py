"""Training over several ranks, really run on gloo: pipelines whose stages may recompute and offload, and torch's other ways.

May import `strategies`, `pipelines`, `workers`, `step.traffic`, `devices`, `batches`, `model`, `trace`, `config`.
Begin reading at `pipeline_run.py`, then `rank_pipeline.py`, `pipeline_cut.py`, `pipeline_stage.py`; for the other ways at
`parallel_run.py`, then `parallel_ways.py`.
"""

from l2l_core.parallel.parallel_run import ParallelRun as ParallelRun
from l2l_core.parallel.parallel_run import WayRank as WayRank
from l2l_core.parallel.parallel_run import run_parallel as run_parallel
from l2l_core.parallel.parallel_task import ParallelTask as ParallelTask
from l2l_core.parallel.parallel_traffic import settled_tcp_bytes as settled_tcp_bytes
from l2l_core.parallel.parallel_ways import WAYS as WAYS
from l2l_core.parallel.pipeline_cut import PipelineCut as PipelineCut
from l2l_core.parallel.pipeline_job import PipelineJob as PipelineJob
from l2l_core.parallel.pipeline_run import PipelineRun as PipelineRun
from l2l_core.parallel.pipeline_run import run_pipeline as run_pipeline
from l2l_core.parallel.rank_pipeline import Pipeline as Pipeline
from l2l_core.parallel.rank_pipeline import RankReport as RankReport
from l2l_core.parallel.rank_pool import RankError as RankError
from l2l_core.parallel.rank_pool import RankPool as RankPool
from l2l_core.parallel.rank_pool import launched_rank as launched_rank
