"""Some steps by one way of training over ranks, really run on gloo, beside plain training and closed formulas.

    >>> run_parallel("ZeRO 3", ranks=2)
    ParallelRun(way='ZeRO 3', difference=1.5e-14, ...)

gloo on a CPU shows numerics and bytes, not speed. The trace of each rank is that of its last step (`rank_trace.py`).
"""

from __future__ import annotations

import gc
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from l2l_core.model import resolve_layers
from l2l_core.parallel.parallel_task import ParallelTask, bytes_of
from l2l_core.parallel.parallel_traffic import settled_tcp_bytes
from l2l_core.parallel.parallel_ways import PERIOD, START, WAYS
from l2l_core.parallel.rank_pool import RankPool, ranks_for
from l2l_core.parallel.rank_trace import LayerMarks, RankProfile, profiled_rank
from l2l_core.trace import Trace, WorkerInfo

Tensor = torch.Tensor


@dataclass(frozen=True)
class WayRank:
    """Measurements of one rank.

    Attributes:
        rank: its number.
        sent_bytes: that it sent per step, as the kernel counts them: mean over the last two.
        weight_bytes: of the parameters that it holds between steps.
        state_bytes: of the optimizer state that it holds.
        peak_bytes: largest sum of all tensors in its last step.
        trace: events and memory of its last step; waits for messages are no compute.

    Example:
        See `run_parallel`.
    """

    rank: int
    sent_bytes: float
    weight_bytes: int
    state_bytes: int
    peak_bytes: int
    trace: Trace = field(repr=False)


@dataclass(frozen=True)
class ParallelRun:
    """Some steps by a way of training over ranks.

    Attributes:
        way: its name in `WAYS`.
        ranks: measurements of each rank, with its trace.
        difference: largest difference of a weight from plain training on all rows, on any rank.
        moved: largest change of a weight in plain training, to compare with.
        sent_bytes: that a rank sent per step, as the kernel counts them: mean over ranks and the last two steps.
        formula_bytes: the same by closed formula.
        gloo_bytes: the same by gloo's algorithms, with headers.
        weight_bytes: of the parameters that a rank holds between steps, on the rank with most.
        state_bytes: of the optimizer state that a rank holds, on the rank with most.
        model_bytes: of all parameters.
        weights: parameters after the last step, whole, by name.

    Example:
        See `run_parallel`.
    """

    way: str
    ranks: list[WayRank] = field(repr=False)
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
    way: str, ranks: int | None = None, task: ParallelTask | None = None, pool: RankPool | None = None
) -> ParallelRun:
    """Train by a way over some processes on this machine, and alone by plain training; return both compared.

    Within `launched_rank` every rank calls it, and it trains on the ranks of the launcher.

    Args:
        way: one of `WAYS`.
        ranks: number of processes; default those of the pool or the launcher, else 2.
        task: model and batch; default a stack of four MLPs in float64.
        pool: of as many ranks; default a new one for this run.

    Raises:
        RankError: a rank failed or was lost; the message has its cause.
        ValueError: the way, the number of ranks or the steps do not fit; the message has the remedy.

    Example:
        >>> from l2l_core.parallel import ParallelTask, run_parallel
        >>> run = run_parallel("ZeRO 3", ranks=2, task=ParallelTask(learning_rate=1e-2))
        >>> run.difference < 1e-9, run.weight_bytes < run.model_bytes  # as plain training; each rank holds a part
        (True, True)
        >>> len(run.ranks)
        2
    """
    task = task or ParallelTask()
    model, (inputs, _) = task.make_model(), task.make_batch()
    if ranks is None:
        ranks = len(pool.processes) if pool else dist.get_world_size() if dist.is_initialized() else 2
    _check(way, ranks, task, len(inputs))
    traffic = WAYS[way].traffic(task, model, ranks, inputs)
    with ranks_for(ranks, pool) as group:
        answers: list[_WayResult] = group.run(train_rank_by_way, way, task)
    reports = [answer.report for answer in answers]
    return ParallelRun(
        way,
        reports,
        difference=max(each.difference for each in answers),
        moved=answers[0].moved,
        sent_bytes=sum(each.sent_bytes for each in reports) / ranks,
        formula_bytes=traffic.formula,
        gloo_bytes=traffic.on_gloo,
        weight_bytes=max(each.weight_bytes for each in reports),
        state_bytes=max(each.state_bytes for each in reports),
        model_bytes=bytes_of(model),
        weights={name: weight for each in answers for name, weight in each.weights.items()},
    )


def _check(way: str, ranks: int, task: ParallelTask, rows: int) -> None:
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


@dataclass(frozen=True)
class _WayResult:
    """Weights of one rank against plain training, and its measurements."""

    difference: float
    moved: float
    weights: dict[str, Tensor]
    report: WayRank


def train_rank_by_way(rank: int, count: int, way: str, task: ParallelTask) -> _WayResult:
    """Train a rank by a way, and plainly alone, in a process of the group."""
    with profiled_rank() as recorded:  # from the beginning, so that all bytes are counted
        model = task.make_model()
        layers = resolve_layers(model, task.layers)
        prepared = WAYS[way].prepare(task, model, count)
        del model
        optimizer, (part, parts) = prepared.optimizer, prepared.share
        inputs, targets = (each.chunk(parts)[part] for each in task.make_batch())
        before = 0
        for step in range(task.steps - 1):
            if step == task.steps - PERIOD:
                before, _ = settled_tcp_bytes(count)
            optimizer.zero_grad()
            prepared.backward(inputs, targets)
            optimizer.step()
        optimizer.zero_grad()
        gc.collect()  # what cycles keep of earlier steps
        marks = LayerMarks(layers, lambda: _bytes_of(each.grad for each in prepared.parameters.values()))
        marks.mark("shell")
        prepared.backward(inputs, targets)
        marks.mark("update", "")
        optimizer.step()
        marks.mark("end", "")
    sent_bytes = (settled_tcp_bytes(count)[0] - before) / PERIOD
    state = getattr(optimizer, "optim", optimizer).state  # those of torch.distributed wrap another
    held = {
        "weights": _bytes_of(prepared.parameters.values()),
        "optimizer": _bytes_of(value for each in state.values() for value in each.values() if torch.is_tensor(value)),
    }
    profiled = RankProfile(recorded, marks.began_s)
    trace = Trace.of(
        [*marks.compute(profiled.waits()), *profiled.messages()],
        marks.memory(profiled.allocated(), held),
        step=task.steps - 1,
        device="gloo",
        names={name: name for name in layers},
        worker=WorkerInfo(rank, count, began_s=marks.began_s),
    )
    weights = {name: _whole(param) for name, param in prepared.parameters.items()}
    plain, moved = train_plainly(task)
    return _WayResult(
        max(_largest(weight - plain[name]) for name, weight in weights.items()),
        moved,
        weights if part == 0 else {},
        WayRank(rank, sent_bytes, held["weights"], held["optimizer"], trace.peak_bytes("device"), trace),
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


def _bytes_of(tensors: Iterable[Any]) -> int:
    """Return the bytes of the parts that this rank holds."""
    return sum((each.to_local() if hasattr(each, "to_local") else each).nbytes for each in tensors if each is not None)
