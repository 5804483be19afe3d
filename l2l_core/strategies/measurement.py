"""Learn and measure a model for one form of micro-batch: structure, a proof that re-runs give the same bits, costs."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from l2l_core.batches import Objective
from l2l_core.devices import Device
from l2l_core.strategies.fixed_plans import Operations, full_plan
from l2l_core.strategies.plan_memory import fit_costs
from l2l_core.strategies.plan_runner import PlanInputs, PlanResult, PlanRunner, optimizer_bytes
from l2l_core.strategies.stage_costs import StageCosts, measurement_plans
from l2l_core.strategies.stage_structure import StageStructure
from l2l_core.strategies.staged_forward import Tensor
from l2l_core.strategies.structure_tracer import StructureTracer
from l2l_core.surgery import preserve_random_state

_SEED = 0  # of measuring; steps have seeds of their own
_TIMED_RUNS = 2  # runs of each plan, of whose operations the median counts


@dataclass(frozen=True)
class Measurement:
    """What is known of one form of micro-batch.

    Attributes:
        structure: of its stages.
        costs: of the first micro-batch of a step, and of a later one, which finds gradients there.
    """

    structure: StageStructure
    costs: Sequence[StageCosts]


def measure(runner: PlanRunner, micro_batch: Any, divisor: float, several: bool) -> Measurement:
    """Learn one form; `several` says whether steps have more than one micro-batch.

    Raises:
        RuntimeError, TypeError: the model cannot be cut, or does not run again to the same bits.
    """
    structure = runner.trace_structure(StructureTracer, micro_batch, divisor, _SEED)
    count = 2 if several else 1
    work = PlanInputs([micro_batch] * count, [divisor] * count, range(_SEED, _SEED + count), [structure] * count)
    with runner.recording_frames():
        _check_reruns(runner, structure, PlanInputs(work.micro_batches[:1], [divisor], [_SEED], [structure]))
    runner.separate_shared_gradients()
    logs = []
    with runner.recording_frames():
        for operations in measurement_plans(structure.stages):
            runner.model.zero_grad(set_to_none=True)
            with runner.metered() as meter:
                ran = runner.run(operations, work, meter)
            logs.append(ran)
    timed = [
        _run_timed(runner, operations, work)
        for operations in measurement_plans(structure.stages)
        for _ in range(_TIMED_RUNS)
    ]
    costs = [StageCosts(structure, ran.base_bytes[k], constant_bytes=ran.constant_bytes[k]) for k in range(count)]
    for k, each in enumerate(costs):
        fit_costs(each, [ran.logs[k] for ran in logs])
        for ran in timed:
            for done in ran.logs[k]:
                each.record_seconds(done.operation, done.seconds)
    return Measurement(structure, costs)


def _run_timed(runner: PlanRunner, operations: Operations, inputs: PlanInputs) -> PlanResult:
    """Run a plan for its seconds alone."""
    runner.model.zero_grad(set_to_none=True)
    with runner.timed() as meter:
        return runner.run(operations, inputs, meter)


def _check_reruns(runner: PlanRunner, structure: StageStructure, inputs: PlanInputs) -> None:
    """Run every stage twice, and compare what it makes."""
    first: dict[int, dict[int, Tensor]] = {}

    def compare(i: int, made: dict[int, Tensor], again: bool) -> None:
        if not again:
            first[i] = {number: tensor.detach().clone() for number, tensor in made.items()}
        elif any(not _equal_values(tensor, first[i][number]) for number, tensor in made.items()):
            raise RuntimeError(
                f"stage {i} (up to {structure.names[i]}) makes other values when it runs again: it draws random numbers from a "
                "generator of its own, or keeps something between calls. Draw from torch's or Python's generator, and keep "
                "state in buffers"
            )

    runner.on_outputs = compare
    try:
        with runner.metered() as meter:
            runner.run(full_plan(structure.stages), inputs, meter)
    finally:
        runner.on_outputs = None


def _equal_values(one: Tensor, other: Tensor) -> bool:
    return (
        one.shape == other.shape
        and torch.equal(one.isnan(), other.isnan())
        and torch.equal(one.nan_to_num(), other.nan_to_num())
    )


def measure_update(runner: PlanRunner, optimizer: Optimizer) -> tuple[int, int]:
    """Update twice with the gradients that are there; returns the most bytes that the second needs, and those of the state."""
    grads = [param for param in runner.model.parameters() if param.grad is not None]
    kept = [param.grad for param in grads]
    optimizer.step()
    with runner.metered(optimizer) as meter:
        for param, grad in zip(grads, kept, strict=True):
            param.grad = grad.clone()  # type: ignore[union-attr]  # counted
        optimizer.step()
        high = meter.high_water
    return high, optimizer_bytes(optimizer)


@contextmanager
def without_budget(device: Device) -> Iterator[None]:
    """Let a device's ledger book without a limit in the block."""
    limit, device.ledger.limit_bytes = device.ledger.limit_bytes, None
    try:
        yield
    finally:
        device.ledger.limit_bytes = limit


def measure_losses(
    model: nn.Module,
    objective: Objective,
    batches: Sequence[Any],
    perturbed: bool,
    copy_model: Callable[[Any], Any] = copy.deepcopy,
) -> list[float]:
    """Measure losses of a few rows each on a copy in evaluation mode, with weights as they are or shaken."""
    twin = copy_model(model).eval()
    with preserve_random_state(), torch.no_grad():
        if perturbed:
            torch.manual_seed(_SEED)
            for param in twin.parameters():
                param.add_(torch.randn_like(param), alpha=0.02)
        return [float(objective(twin, each)) for each in batches]
