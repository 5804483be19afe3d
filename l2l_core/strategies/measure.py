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
from l2l_core.strategies.costs import Costs, probes
from l2l_core.strategies.course import Course, Ran, Work, optimizer_bytes
from l2l_core.strategies.forward import Tensor
from l2l_core.strategies.learning import Learning
from l2l_core.strategies.recipes import Operations, full
from l2l_core.strategies.structure import Structure
from l2l_core.strategies.walk import learn
from l2l_core.surgery import same_random_numbers

_SEED = 0  # of measuring; steps have seeds of their own
_TIMED = 2  # runs of each plan, of whose operations the median counts


@dataclass(frozen=True)
class Known:
    """What is known of one form of micro-batch.

    Attributes:
        structure: of its stages.
        costs: of the first micro-batch of a step, and of a later one, which finds gradients there.
    """

    structure: Structure
    costs: Sequence[Costs]


def measure(course: Course, micro_batch: Any, divisor: float, several: bool) -> Known:
    """Learn one form; `several` says whether steps have more than one micro-batch.

    Raises:
        RuntimeError, TypeError: the model cannot be cut, or does not run again to the same bits.
    """
    structure = course.learn(Learning, micro_batch, divisor, _SEED)
    count = 2 if several else 1
    work = Work([micro_batch] * count, [divisor] * count, range(_SEED, _SEED + count), [structure] * count)
    with course.measuring():
        _check_reruns(course, structure, Work(work.micro_batches[:1], [divisor], [_SEED], [structure]))
    course.keep_apart()
    logs = []
    with course.measuring():
        for operations in probes(structure.stages):
            course.model.zero_grad(set_to_none=True)
            with course.metered() as meter:
                ran = course.run(operations, work, meter)
            logs.append(ran)
    timed = [_run(course, operations, work) for operations in probes(structure.stages) for _ in range(_TIMED)]
    costs = [Costs(structure, ran.bases[k], constants=ran.constants[k]) for k in range(count)]
    for k, each in enumerate(costs):
        learn(each, [ran.logs[k] for ran in logs])
        for ran in timed:
            for done in ran.logs[k]:
                each.time(done.operation, done.seconds)
    return Known(structure, costs)


def _run(course: Course, operations: Operations, work: Work) -> Ran:
    """Run a plan for its seconds alone."""
    course.model.zero_grad(set_to_none=True)
    with course.timed() as meter:
        return course.run(operations, work, meter)


def _check_reruns(course: Course, structure: Structure, work: Work) -> None:
    """Run every stage twice, and compare what it makes."""
    first: dict[int, dict[int, Tensor]] = {}

    def compare(i: int, made: dict[int, Tensor], again: bool) -> None:
        if not again:
            first[i] = {number: tensor.detach().clone() for number, tensor in made.items()}
        elif any(not _is_same(tensor, first[i][number]) for number, tensor in made.items()):
            raise RuntimeError(
                f"stage {i} (up to {structure.names[i]}) makes other values when it runs again: it draws random numbers from a "
                "generator of its own, or keeps something between calls. Draw from torch's or Python's generator, and keep "
                "state in buffers"
            )

    course.on_made = compare
    try:
        with course.metered() as meter:
            course.run(full(structure.stages), work, meter)
    finally:
        course.on_made = None


def _is_same(one: Tensor, other: Tensor) -> bool:
    return (
        one.shape == other.shape
        and torch.equal(one.isnan(), other.isnan())
        and torch.equal(one.nan_to_num(), other.nan_to_num())
    )


def update_costs(course: Course, optimizer: Optimizer) -> tuple[int, int]:
    """Update twice with the gradients that are there; returns the most bytes that the second needs, and those of the state."""
    grads = [param for param in course.model.parameters() if param.grad is not None]
    kept = [param.grad for param in grads]
    optimizer.step()
    with course.metered(optimizer) as meter:
        for param, grad in zip(grads, kept, strict=True):
            param.grad = grad.clone()  # type: ignore[union-attr]  # counted
        optimizer.step()
        high = meter.high
    return high, optimizer_bytes(optimizer)


@contextmanager
def unlimited(device: Device) -> Iterator[None]:
    """Let a device's ledger book without a limit in the block."""
    limit, device.ledger.limit_bytes = device.ledger.limit_bytes, None
    try:
        yield
    finally:
        device.ledger.limit_bytes = limit


def small_losses(
    model: nn.Module,
    objective: Objective,
    small: Sequence[Any],
    shaken: bool,
    copied: Callable[[Any], Any] = copy.deepcopy,
) -> list[float]:
    """Measure losses of a few rows each on a copy in evaluation mode, with weights as they are or shaken."""
    twin = copied(model).eval()
    with same_random_numbers(), torch.no_grad():
        if shaken:
            torch.manual_seed(_SEED)
            for param in twin.parameters():
                param.add_(torch.randn_like(param), alpha=0.02)
        return [float(objective(twin, each)) for each in small]
