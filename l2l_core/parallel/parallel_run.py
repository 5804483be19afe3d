"""Some steps by one way of training over ranks, really run on gloo, beside plain training and closed formulas.

    >>> run_parallel("ZeRO 3", ranks=2)
    ParallelRun(way='ZeRO 3', ranks=2, difference=1.5e-14, ...)

gloo on a CPU shows numerics and bytes, not speed.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch

from l2l_core.parallel.parallel_task import ParallelTask, bytes_of
from l2l_core.parallel.parallel_traffic import settled_tcp_bytes
from l2l_core.parallel.parallel_ways import PERIOD, START, WAYS
from l2l_core.parallel.rank_pool import RankPool

Tensor = torch.Tensor


@dataclass(frozen=True)
class ParallelRun:
    """Some steps by a way of training over ranks.

    Attributes:
        way: its name in `WAYS`.
        ranks: number of ranks.
        difference: largest difference of a weight from plain training on all rows, on any rank.
        moved: largest change of a weight in plain training, to compare with.
        sent_bytes: that a rank sent per step, as the kernel counts them: mean over ranks and the last two steps.
        formula_bytes: the same by closed formula.
        gloo_bytes: the same by gloo's algorithms, with headers.
        weight_bytes: of the parameters that a rank holds between steps, on the rank with most.
        state_bytes: of the optimizer state that a rank holds, on the rank with most.
        model_bytes: of all parameters.
        weights: parameters after the last step, whole, by name.
    """

    way: str
    ranks: int
    difference: float
    moved: float
    sent_bytes: float
    formula_bytes: float
    gloo_bytes: float
    weight_bytes: int
    state_bytes: int
    model_bytes: int
    weights: dict[str, Tensor] = field(repr=False)


def run_parallel(
    way: str, ranks: int = 2, task: ParallelTask | None = None, pool: RankPool | None = None
) -> ParallelRun:
    """Train by a way over some processes on this machine, and alone by plain training; return both compared.

    Args:
        way: one of `WAYS`.
        ranks: number of processes.
        task: model and batch; default a stack of four MLPs in float64.
        pool: of as many ranks; default a new one for this run.

    Raises:
        RankError: a rank failed or was lost; the message has its cause.
        ValueError: the way, the number of ranks or the steps do not fit; the message has the remedy.
    """
    task = task or ParallelTask()
    model, (inputs, _) = task.make_model(), task.make_batch()
    _check(way, ranks, task, len(inputs), pool)
    traffic = WAYS[way].traffic(task, model, ranks, inputs)
    with nullcontext(pool) if pool is not None else RankPool(ranks) as group:
        answers: list[_RankFigures] = group.run(train_rank_by_way, way, task)
    return ParallelRun(
        way,
        ranks,
        difference=max(each.difference for each in answers),
        moved=answers[0].moved,
        sent_bytes=sum(each.sent_bytes for each in answers) / ranks,
        formula_bytes=traffic.formula,
        gloo_bytes=traffic.on_gloo,
        weight_bytes=max(each.weight_bytes for each in answers),
        state_bytes=max(each.state_bytes for each in answers),
        model_bytes=bytes_of(model),
        weights={name: weight for each in answers for name, weight in each.weights.items()},
    )


def _check(way: str, ranks: int, task: ParallelTask, rows: int, pool: RankPool | None) -> None:
    if way not in WAYS:
        raise ValueError(f"way={way!r} is none of {', '.join(map(repr, WAYS))}")
    if task.steps < START + PERIOD:
        raise ValueError(
            f"steps={task.steps}: bytes are counted in the last two, and gradients compressed from the third on; use at least "
            f"{START + PERIOD}"
        )
    if WAYS[way].ranks not in (None, ranks):
        raise ValueError(f"ranks={ranks}: {way!r} is laid out for ranks={WAYS[way].ranks}, use that number")
    if ranks < 2 or rows % ranks:
        raise ValueError(f"ranks={ranks}: use 2 or more, and a batch whose rows, {rows}, divide by them evenly")
    if pool is not None and len(pool.processes) != ranks:
        raise ValueError(f"ranks={ranks}, and the pool has {len(pool.processes)}: give both the same number")


@dataclass(frozen=True)
class _RankFigures:
    """Measurements of one rank."""

    difference: float
    moved: float
    sent_bytes: float
    weight_bytes: int
    state_bytes: int
    weights: dict[str, Tensor]


def train_rank_by_way(rank: int, count: int, way: str, task: ParallelTask) -> _RankFigures:
    """Train a rank by a way, and plainly alone, in a process of the group."""
    prepared = WAYS[way].prepare(task, task.make_model(), count)
    optimizer, (part, parts) = prepared.optimizer, prepared.share
    inputs, targets = (each.chunk(parts)[part] for each in task.make_batch())
    before = 0
    for step in range(task.steps):
        if step == task.steps - PERIOD:
            before, _ = settled_tcp_bytes(count)
        optimizer.zero_grad()
        prepared.backward(inputs, targets)
        optimizer.step()
    sent = settled_tcp_bytes(count)[0] - before
    weights = {name: _whole(param) for name, param in prepared.parameters.items()}
    plain, moved = train_plainly(task)
    state = getattr(optimizer, "optim", optimizer).state  # those of torch.distributed wrap another
    return _RankFigures(
        difference=max(_largest(weight - plain[name]) for name, weight in weights.items()),
        moved=moved,
        sent_bytes=sent / PERIOD,
        weight_bytes=sum(_local(param).nbytes for param in prepared.parameters.values()),
        state_bytes=sum(_local(v).nbytes for each in state.values() for v in each.values() if torch.is_tensor(v)),
        weights=weights if part == 0 else {},
    )


def train_plainly(task: ParallelTask) -> tuple[dict[str, Tensor], float]:
    """Train on all rows in this process; return the weights, and the largest change of one."""
    model, (inputs, targets) = task.make_model(), task.make_batch()
    first = {name: param.detach().clone() for name, param in model.named_parameters()}
    optimizer = task.optimizer(model)
    for _ in range(task.steps):
        optimizer.zero_grad()
        task.loss(model(inputs), targets).backward()
        optimizer.step()
    weights = {name: param.detach() for name, param in model.named_parameters()}
    return weights, max(_largest(weight - first[name]) for name, weight in weights.items())


def _largest(difference: Tensor) -> float:
    return float(difference.abs().max())


def _whole(param: Any) -> Tensor:
    return (param.full_tensor() if hasattr(param, "full_tensor") else param).detach().clone()


def _local(tensor: Any) -> Tensor:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor.detach()
