"""What worker processes do in tests of pipelines: they train a kind of the zoo together, and plainly alone."""

import itertools
import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from oracle import InCore
from torch import Tensor
from zoo import BY_NAME

from l2l_core import RelayConfig
from l2l_core.parallel import Pipeline, PipelineJob
from l2l_core.pipelines import SCHEDULES, simulate_pipeline
from l2l_core.strategies import Lab, mixed_plan, stage_chain
from l2l_core.strategies.pipeline_treatments import treatment

ADAMW = partial(torch.optim.AdamW, lr=1e-3)
SEED, STEPS = 3, 2


@dataclass(frozen=True)
class PipelineCase:
    """A kind of the zoo in a pipeline of so many micro-batches, with v stages on each rank."""

    kind: str
    plan: str = "1F1B"
    micro_batches: int = 4
    v: int = 1
    schedule: str | None = None
    letters: str | None = None  # of every layer, and of the loss: keep, recompute, offload
    options: dict[str, Any] = field(default_factory=dict, hash=False)

    def __str__(self) -> str:
        return "-".join(filter(None, (self.kind, self.plan, self.schedule, self.letters)))

    def job(self, rows: int = 0) -> PipelineJob:
        kind = BY_NAME[self.kind]
        batch = kind.make_batch(rows or 2 * self.micro_batches, 0)
        settings = {"loss": kind.loss, "layers": kind.layers, "loss_over": kind.loss_over, "seed": SEED}
        return PipelineJob.of(kind.make_model(), batch, self.micro_batches, **settings)


def pipeline_of(case: PipelineCase, count: int, job: PipelineJob) -> Pipeline:
    plan = SCHEDULES[case.plan](count, case.micro_batches, case.v)
    options = dict(case.options)
    if case.letters is not None:
        bounds, treatments = options["bounds"], []
        for first, stop in zip(bounds, [*bounds[1:], len(case.letters)], strict=True):
            treatments.append(mixed_plan(case.letters[first:stop]))
        options["treatments"] = treatments
    return Pipeline(job, plan, schedule=case.schedule, **options)


def train_in_pipeline(rank: int, count: int, case: PipelineCase) -> dict[str, Any]:
    """Train both ways for some steps; return losses, the names that differ, and what was measured."""
    kind = BY_NAME[case.kind]
    plain = kind.make_model()
    in_core = InCore(kind, plain, ADAMW(plain.parameters()), RelayConfig(micro_batches=case.micro_batches, seed=SEED))
    expected = [in_core.step(kind.make_batch(2 * case.micro_batches, 0)) for _ in range(STEPS)]
    job = case.job()
    pipeline = pipeline_of(case, count, job)
    own = pipeline.parameters()
    optimizer = ADAMW([param for param in own.values() if param.requires_grad])
    losses = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        losses.append(pipeline.step())
        optimizer.step()
    right = dict(plain.named_parameters()) | dict(plain.named_buffers())
    mine: dict[str, Tensor] = {**own, **pipeline.buffers()}
    cut = pipeline.cut
    return {
        "losses": losses,
        "expected": expected,
        "names": sorted(own),
        "differ": [name for name, tensor in mine.items() if not torch.equal(tensor, right[name])],
        "report": pipeline.report,
        "messages": [(cut.message_bytes(stage), cut.gradient_bytes(stage)) for stage in range(cut.stages)],
        "every": sorted(name for name, _ in plain.named_parameters()),
    }


def gradients_in_order(rank: int, count: int, case: PipelineCase, order: Sequence[int]) -> list[str]:
    """Compare gradients with plain training that adds micro-batches in this order; return the names that differ."""
    job = case.job()
    plain = BY_NAME[case.kind].make_model()
    for k in order:
        torch.manual_seed(job.seed_of(0, k))
        random.seed(job.seed_of(0, k))
        (job.objective(plain, job.micro_batches[k]) / job.divisors[k]).backward()
    pipeline = pipeline_of(case, count, job)
    pipeline.step()
    right = dict(plain.named_parameters())
    return [name for name, param in pipeline.parameters().items() if not torch.equal(param.grad, right[name].grad)]


def refused(rank: int, count: int, case: PipelineCase, rows: int = 0) -> str:
    """Return the message of the error that the case raises."""
    try:
        pipeline_of(case, count, case.job(rows)).step()
    except (RuntimeError, TypeError, ValueError) as error:
        return str(error)
    raise AssertionError(f"{case} was not refused")


def foreseen_bytes(rank: int, count: int, case: PipelineCase) -> tuple[int, int]:
    """Return the bytes that the simulation foresees on this rank between actions, and offloaded."""
    kind = BY_NAME[case.kind]
    batch = kind.make_batch(2 * case.micro_batches, 0)
    lab = Lab(kind.make_model(), batch, loss=kind.loss, layers=kind.layers, micro_batches=case.micro_batches)
    bounds, chain = [*case.options["bounds"], len(lab.layers) + 1], lab.cost_model.chain()
    costs = []
    for first, stop in itertools.pairwise(bounds):
        cost = treatment(stage_chain(chain, first, stop), mixed_plan(case.letters[first:stop]), "").cost
        costs.append(replace(cost, forward_extra_bytes=0, backward_extra_bytes=0))
    simulated = simulate_pipeline(SCHEDULES[case.plan](count, case.micro_batches, case.v), costs)
    return simulated.peak_bytes[rank], costs[rank].host_bytes
