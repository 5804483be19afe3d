"""Measurement of a model for one form of micro-batch: structure, a test that reruns give equal bits, and costs."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from l2l_core.batches import Objective
from l2l_core.devices import Device
from l2l_core.model import preserve_random_state
from l2l_core.strategies.fixed_plans import full_plan, periodic_plan, plain_plan
from l2l_core.strategies.plan import F0, FALL, FCK, B, Operation, Operations
from l2l_core.strategies.plan_memory import fit_costs
from l2l_core.strategies.plan_runner import PlanInputs, PlanRunner, optimizer_bytes
from l2l_core.strategies.plan_verification import equal_or_nan
from l2l_core.strategies.stage_costs import StageCosts, cost_kind
from l2l_core.strategies.stage_structure import StageStructure
from l2l_core.strategies.staged_forward import Tensor

_SEED = 0  # of measurements; steps have other seeds
_TIMED_RUNS = 2  # runs of each plan; the median of each operation counts


def measure(runner: PlanRunner, micro_batch: Any, divisor: float, several: bool) -> list[StageCosts]:
    """Return the costs of the first micro-batch of a step, and of a later one if it has several.

    Raises:
        RuntimeError, TypeError: the model cannot be divided into stages, or a rerun gives other bits.
    """
    structure = runner.trace_structure(micro_batch, divisor, _SEED)
    plans = _measurement_plans(structure.stages)

    def repeat(count: int) -> PlanInputs:
        return PlanInputs([micro_batch] * count, [divisor] * count, range(_SEED, _SEED + count), [structure] * count)

    count = 2 if several else 1
    with runner.recording_frames():
        _check_reruns(runner, structure, repeat(1))
    runner.separate_shared_gradients()
    metered, timed = [], []
    for plan in plans:
        runner.model.zero_grad(set_to_none=True)
        with runner.recording_frames(), runner.metered() as meter:
            metered.append(runner.run(plan, repeat(count), meter))
    for plan in [plan for plan in plans for _ in range(_TIMED_RUNS)]:
        runner.model.zero_grad(set_to_none=True)
        with runner.timed() as meter:
            timed.append(runner.run(plan, repeat(count), meter))
    last = metered[-1]
    costs = [StageCosts(structure, last.base_bytes[k], constant_bytes=last.constant_bytes[k]) for k in range(count)]
    for k, each in enumerate(costs):
        fit_costs(each, [result.logs[k] for result in metered])
        for result in timed:
            for done in result.logs[k]:
                kind, i = done.operation
                each.seconds[cost_kind(kind), i].append(done.seconds)
    return costs


def _measurement_plans(n: int) -> tuple[Operations, ...]:
    """Return plans that together have every kind of operation on every stage, and show the tensors that outlive a stage."""
    twice = [Operation(FCK, i) for i in range(n - 1)] + [Operation(FALL, n - 1), Operation(B, n - 1)]
    for i in reversed(range(n - 1)):
        twice += [Operation(F0, i), Operation(FALL, i), Operation(B, i)]
    return plain_plan(n), full_plan(n), tuple(twice), periodic_plan(n, max(1, n - 1))


def _check_reruns(runner: PlanRunner, structure: StageStructure, inputs: PlanInputs) -> None:
    """Run every stage twice and compare the outputs."""
    first: dict[int, dict[int, Tensor]] = {}

    def compare(i: int, outputs: dict[int, Tensor], is_rerun: bool) -> None:
        if not is_rerun:
            first[i] = {number: tensor.detach().clone() for number, tensor in outputs.items()}
        elif not all(equal_or_nan(tensor, first[i][number]) for number, tensor in outputs.items()):
            raise RuntimeError(
                f"stage {i} (up to {structure.names[i]}) makes other values when it runs again: it draws random numbers from a "
                "private generator, or keeps state between calls. Draw from torch's or Python's generator, and keep state in "
                "buffers"
            )

    runner.on_outputs = compare
    try:
        with runner.metered() as meter:
            runner.run(full_plan(structure.stages), inputs, meter)
    finally:
        runner.on_outputs = None


def measure_update(runner: PlanRunner, optimizer: Optimizer) -> tuple[int, int]:
    """Update twice with the present gradients; return the peak bytes of the second update, and those of the state."""
    grads = [(param, param.grad) for param in runner.model.parameters() if param.grad is not None]
    optimizer.step()
    with runner.metered(optimizer) as meter:
        for param, grad in grads:
            param.grad = grad.clone()  # so that the meter counts it
        optimizer.step()
        return meter.high_water, optimizer_bytes(optimizer)


@contextmanager
def without_budget(device: Device) -> Iterator[None]:
    """Remove the limit of a device's ledger inside the block."""
    limit, device.ledger.limit_bytes = device.ledger.limit_bytes, None
    try:
        yield
    finally:
        device.ledger.limit_bytes = limit


def measure_losses(model: nn.Module, objective: Objective, batches: Sequence[Any], perturbed: bool) -> list[float]:
    """Measure losses of small batches on a copy in evaluation mode, with the weights as they are or perturbed.

    Example:
        >>> from l2l_core.strategies import measure_losses
        >>> def objective(model, micro_batch):
        ...     inputs, targets = micro_batch
        ...     return nn.functional.cross_entropy(model(inputs), targets)
        >>> measure_losses(model, objective, [batch], perturbed=False)
        [1.371777892112732]
    """
    twin = copy.deepcopy(model).eval()
    with preserve_random_state(), torch.no_grad():
        if perturbed:
            torch.manual_seed(_SEED)
            for param in (p for p in twin.parameters() if p.requires_grad or p.dtype == torch.float32):  # else codes
                param.add_(torch.randn_like(param), alpha=0.02)
        return [float(objective(twin, each)) for each in batches]
