"""Training in a pipeline of real processes on this machine.

`run_pipeline` starts the ranks, trains some steps there on copies, and returns losses, gradients, weights and measurements. Under
torchrun it trains on the ranks of the launcher, or a program makes its rank's `Pipeline` itself (`rank_pipeline.py`).

    >>> job = PipelineJob.of(model, batch, micro_batches=4)
    >>> run = run_pipeline(job, one_forward_one_backward(2, 4))
    >>> run.losses, run.ranks[0].sent_bytes, run.ranks[0].trace
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from l2l_core.parallel.pipeline_job import PipelineJob
from l2l_core.parallel.rank_pipeline import Pipeline, RankReport
from l2l_core.parallel.rank_pool import RankPool, ranks_for
from l2l_core.parallel.rank_trace import RankProfile, profiled_rank
from l2l_core.pipelines import PipelinePlan
from l2l_core.trace import Event

Tensor = torch.Tensor
MakeOptimizer = Callable[[list[nn.Parameter]], Optimizer]


@dataclass(frozen=True)
class PipelineRun:
    """Steps in a pipeline of real processes.

    Attributes:
        way: name of the plan.
        losses: by step, the mean over the batch.
        gradients: of the last step, by name of parameter.
        state: parameters and buffers after the last step, by name; each from a rank whose stage has it.
        ranks: measurements of the last step.

    Example:
        See `run_pipeline`.
    """

    way: str
    losses: list[float]
    gradients: dict[str, Tensor]
    state: dict[str, Tensor]
    ranks: list[RankReport]


def run_pipeline(
    job: PipelineJob,
    plan: PipelinePlan,
    steps: int = 1,
    optimizer: MakeOptimizer | None = None,
    pool: RankPool | None = None,
    **options: Any,
) -> PipelineRun:
    """Train some steps in a pipeline of processes on this machine, on copies of the model.

    Within `launched_rank` every rank calls it, and it trains on the ranks of the launcher. The last step is profiled, for the
    messages and the update in its trace (`rank_trace.py`).

    Args:
        job: model and batch; what it holds is pickled, so that a loss is a function in a module.
        plan: the schedule.
        steps: number of steps on the same batch.
        optimizer: makes one from a list of parameters; by default weights stay as they are.
        pool: of as many ranks as the plan has; default a new one for this run.
        options: of `Pipeline`.

    Raises:
        RankError: a rank failed or was lost; the message has its cause.

    Example:
        >>> from l2l_core.parallel import PipelineJob, run_pipeline
        >>> from l2l_core.pipelines import one_forward_one_backward
        >>> net = nn.Sequential(*(nn.Linear(16, 16) for _ in range(4)), nn.Linear(16, 4))  # of classes that ranks can import
        >>> job = PipelineJob.of(net, batch, micro_batches=4, loss=nn.CrossEntropyLoss())
        >>> run = run_pipeline(job, one_forward_one_backward(2, 4), steps=2)  # without an optimizer the weights stay
        >>> run.losses[0] == run.losses[1], len(run.gradients)
        (True, 10)
        >>> [report.sent_bytes for report in run.ranks]
        [512, 512]
    """
    with ranks_for(len(plan.ranks), pool) as ranks:
        answers = ranks.run(train_rank, job, plan, steps, optimizer, options)
    losses = next(answer.losses for answer in answers if answer.losses)
    gradients, state = {}, {}
    for answer in answers:
        gradients |= answer.gradients
        state |= answer.state
    return PipelineRun(plan.name, losses, gradients, state, [answer.report for answer in answers])


@dataclass(frozen=True)
class RankResult:
    """Result of one rank: losses on the rank of the last stage, own gradients and state, and measurements."""

    losses: list[float]
    gradients: dict[str, Tensor]
    state: dict[str, Tensor]
    report: RankReport


def train_rank(
    rank: int,
    count: int,
    job: PipelineJob,
    plan: PipelinePlan,
    steps: int,
    optimizer: MakeOptimizer | None,
    options: Any,
) -> RankResult:
    """Train a rank's part for some steps, in a process of the group."""
    pipeline = Pipeline(job, plan, **options)
    own = pipeline.parameters()
    update = optimizer([param for param in own.values() if param.requires_grad]) if optimizer else None
    losses = []
    for step in range(steps):
        for param in own.values():
            param.grad = None
        with profiled_rank() if step == steps - 1 else nullcontext() as profile:
            losses.append(pipeline.step())
            trace = pipeline.report.trace
            if update is not None:
                began_s = trace.now()
                update.step()
                trace.add(Event("compute", "update", began_s, trace.now()))
        if profile is not None:
            for event in RankProfile(profile, trace.began_s).messages():
                trace.add(event)
    gradients = {name: param.grad for name, param in own.items() if param.grad is not None}
    state = {name: param.detach() for name, param in own.items()} | pipeline.buffers()
    return RankResult([loss for loss in losses if loss is not None], gradients, state, pipeline.report)
