"""Ways to train over ranks: against plain training, and bytes that the kernel counts against those foreseen."""

import math
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from crew import Crew
from crew_ways import SLOW_TASK, SMALL_TASK, SQUARE_TASK, all_reduces_counted, mean_square

from l2l_core.parallel import (
    WAYS,
    ParallelRun,
    ParallelTask,
    PipelineJob,
    PipelineRun,
    WayRank,
    run_parallel,
    run_pipeline,
)
from l2l_core.parallel.parallel_traffic import all_reduce_bytes
from l2l_core.parallel.rank_trace import RankProfile
from l2l_core.pipelines import one_forward_one_backward

EXACT = ["data parallel", "ZeRO 1", "ZeRO 2", "ZeRO 3", "ZeRO 3, CPU offload", "tensor parallel", "3D, 2 x 2 x 2"]
STATE_IS_SHARED = EXACT[1:]
ON_ANY = [name for name, way in WAYS.items() if way.ranks is None]


def plain_weights(task: ParallelTask) -> dict[str, torch.Tensor]:
    model, (inputs, targets) = task.make_model(), task.make_batch()
    optimizer = torch.optim.AdamW(model.parameters(), lr=task.learning_rate)
    for _ in range(task.steps):
        optimizer.zero_grad()
        (model(inputs) - targets).square().mean().backward()
        optimizer.step()
    return dict(model.named_parameters())


def check(run: ParallelRun, task: ParallelTask) -> None:
    plain = plain_weights(task)
    assert run.weights.keys() == plain.keys()
    largest = max(float((run.weights[name] - weight).detach().abs().max()) for name, weight in plain.items())
    assert largest <= run.difference < (1e-12 if run.way in EXACT else 2 * run.moved)
    assert run.sent_bytes == run.gloo_bytes >= run.formula_bytes
    assert run.model_bytes == sum(weight.nbytes for weight in plain.values())
    shared = pytest.approx(1 / len(run.ranks), rel=0.01)
    assert run.state_bytes / 2 / run.model_bytes == (shared if run.way in STATE_IS_SHARED else pytest.approx(1, 0.01))
    is_split = run.way in STATE_IS_SHARED and run.way != "ZeRO 1"
    assert run.weight_bytes / run.model_bytes == (shared if is_split else 1)
    for rank, report in enumerate(run.ranks):
        check_trace(rank, report, len(run.ranks))


def check_trace(rank: int, report: WayRank, count: int) -> None:
    """Lanes, layers and memory of a rank's last step."""
    trace = report.trace
    assert (trace.worker.rank, trace.worker.count, trace.step) == (rank, count, 3)
    assert min(event.start_s for event in trace.events) >= 0
    for events in trace.lanes.values():
        assert all(one.stop_s <= other.start_s + 1e-9 for one, other in pairwise(events))
    compute = trace.lanes["compute"]
    first, last = ([event.layer for event in compute if event.kind == kind] for kind in ("forward", "backward"))
    own = [*dict.fromkeys(first)]  # waits cut events into parts
    assert len(own) >= 2 and [*dict.fromkeys(reversed(last))] == own and compute[-1].kind == "update"
    held = trace.memory[0].bytes_by_category
    assert (held["weights"], held["optimizer"], held["gradients"]) == (report.weight_bytes, report.state_bytes, 0)
    assert trace.memory[-1].bytes_by_category["gradients"] == report.weight_bytes
    assert min(each for sample in trace.memory for each in sample.bytes_by_category.values()) >= 0
    assert report.peak_bytes == trace.peak_bytes("device") > report.weight_bytes + report.state_bytes


@pytest.mark.parametrize("way", ON_ANY)
def test_two_ranks_train_as_plain_training(way: str, two: Crew) -> None:
    check(run_parallel(way, 2, pool=two), ParallelTask())


def traffic(run: ParallelRun | PipelineRun) -> list[dict[str, int]]:
    """Bytes of tensors in messages, by kind, of each rank."""
    events = [[event for lane in ("gather", "reduce") for event in rank.trace.lanes[lane]] for rank in run.ranks]
    return [{kind: sum(e.nbytes for e in each if e.kind == kind) for kind in {e.kind for e in each}} for each in events]


def test_traces_have_the_messages_of_their_way(two: Crew) -> None:
    """An all-reduce of all gradients; a shard of every layer, gathered twice, and whole gradients reduced."""
    run = run_parallel("data parallel", pool=two)
    assert traffic(run) == [{"exchange": run.model_bytes}] * 2
    batch = sum(each.nbytes for each in ParallelTask().make_batch())
    others = [rank.trace.memory[0].bytes_by_category["other"] - batch for rank in run.ranks]
    # The buckets of DDP and some small tensors; a thread of gloo may still hold the buckets of the first step.
    assert all(0 <= each % run.model_bytes < 1000 and each < 2.1 * run.model_bytes for each in others)
    run = run_parallel("ZeRO 3", pool=two)
    assert traffic(run) == [{"gather": run.model_bytes, "exchange": run.model_bytes}] * 2


def test_waits_for_a_slow_rank_are_no_compute(two: Crew) -> None:
    waiting, slow = (rank.trace for rank in run_parallel("ZeRO 3", 2, SLOW_TASK, two).ranks)
    assert slow.busy_s("compute") > 0.1
    assert waiting.exposed_s("gather") > 0.07 and waiting.span_s - waiting.busy_s("compute") > 0.07


def test_pipelines_have_messages_and_updates_in_their_traces(two: Crew) -> None:
    job = PipelineJob.of(SMALL_TASK.make_model(), SMALL_TASK.make_batch(), 2, loss=mean_square, layers=("0", "1", "2"))
    adamw = partial(torch.optim.AdamW, lr=1e-3)
    run = run_pipeline(job, one_forward_one_backward(2, 2), steps=2, optimizer=adamw, pool=two)
    sent = [rank.sent_bytes for rank in run.ranks]
    assert traffic(run) == [{"send": one, "receive": other} for one, other in (sent, sent[::-1])] and min(sent) > 0
    assert all(rank.trace.lanes["compute"][-1].kind == "update" for rank in run.ranks)


@pytest.mark.slow
@pytest.mark.parametrize("way", ON_ANY)
def test_four_ranks_train_as_plain_training(way: str, four: Crew) -> None:
    check(run_parallel(way, 4, pool=four), ParallelTask())


def int8(values: torch.Tensor) -> torch.Tensor:
    blocks = values.view(-1, 256)
    scales = (blocks.abs().amax(1, keepdim=True) / 127).float().double()
    return ((blocks / scales).round() * scales).flatten()


def largest(values: torch.Tensor) -> torch.Tensor:
    smallest = values.abs().sort(descending=True).values[math.ceil(0.01 * len(values)) - 1]
    return torch.where(values.abs() >= smallest, values, 0.0)


@pytest.mark.parametrize(
    ("way", "compressed"), [("int8 gradients", int8), ("top-k gradients, 1 %", largest)], ids=["int8", "top-k"]
)
def test_compressed_gradients_equal_their_definition(way: str, compressed: Callable, two: Crew) -> None:
    """To the bit; each rank adds the part that it has not sent to its next gradients."""
    task, parts = SQUARE_TASK, [each.chunk(2) for each in SQUARE_TASK.make_batch()]
    model = task.make_model()
    params, unsent = list(model.parameters()), [torch.tensor(0.0)] * 2
    optimizer = torch.optim.AdamW(params, lr=task.learning_rate)
    for _ in range(task.steps):
        total = torch.tensor(0.0)
        for rank, (inputs, targets) in enumerate(zip(*parts, strict=True)):
            gradients = torch.autograd.grad((model(inputs) - targets).square().mean(), params)
            values = torch.cat([each.flatten() for each in gradients]) + unsent[rank]
            sent = compressed(values)
            unsent[rank], total = values - sent, total + sent
        for param, gradient in zip(params, (total / 2).split(256), strict=True):
            param.grad = gradient.view_as(param)
        optimizer.step()
    run = run_parallel(way, 2, task, two)
    assert run.sent_bytes == run.gloo_bytes
    for name, param in model.named_parameters():
        assert torch.equal(run.weights[name], param), name


def test_messages_of_the_step_before_are_not_in_a_trace() -> None:
    """Though the callback of one may end within the step, when gloo's thread gets to run."""

    def message(start_s: float, stop_s: float) -> Any:
        begin_ns = time.time_ns()
        return SimpleNamespace(
            start_ns=lambda: begin_ns + round(1e9 * start_s),
            end_ns=lambda: begin_ns + round(1e9 * stop_s),
            name=lambda: "gloo:all_reduce",
            shapes=lambda: [[100]],
            dtypes=lambda: ["double"],
        )

    events = [message(-0.6, 0.1), message(0.2, 0.4), message(0.3, 0.5)]
    recorded = SimpleNamespace(kineto_results=SimpleNamespace(events=lambda: events))
    profile = RankProfile(recorded, time.perf_counter())
    times = [(event.start_s, event.stop_s) for event in profile.messages()]
    assert sum(times, ()) == pytest.approx((0.2, 0.4, 0.4, 0.5), abs=0.02)
    assert sum(profile.waits(), ()) == pytest.approx((0.2, 0.5), abs=0.02)


@pytest.mark.slow
def test_eight_ranks_train_in_three_dimensions() -> None:
    """In processes of the run itself."""
    check(run_parallel("3D, 2 x 2 x 2", 8), ParallelTask())


def test_other_models_train_too(two: Crew) -> None:
    """And the remedy of the refusal below is this."""
    with pytest.raises(ValueError, match="choose 'ZeRO 3', which shards any layer"):
        run_parallel("tensor parallel", 2, SMALL_TASK, two)
    run, plain = run_parallel("ZeRO 3", 2, SMALL_TASK, two), plain_weights(SMALL_TASK)
    assert run.difference < 1e-12 and run.sent_bytes == run.gloo_bytes
    assert all(torch.allclose(run.weights[name], weight, atol=1e-12) for name, weight in plain.items())


def test_an_all_reduce_sends_what_is_foreseen(two: Crew) -> None:
    sizes = (400, 400_000, 8_000_000)
    for counted in two.run(all_reduces_counted, sizes):
        assert counted == [all_reduce_bytes(nbytes, 2).on_gloo for nbytes in sizes]


def test_refusals_have_a_remedy(two: Crew) -> None:
    with pytest.raises(ValueError, match="'ZeRO 4' is none of 'data parallel'"):
        run_parallel("ZeRO 4", 2, pool=two)
    with pytest.raises(ValueError, match="use at least 4"):
        run_parallel("ZeRO 3", 2, replace(SMALL_TASK, steps=3), two)
    with pytest.raises(ValueError, match="a batch whose rows, 4, divide by them"):
        run_parallel("ZeRO 3", 3, SMALL_TASK, two)
    with pytest.raises(ValueError, match="give both the same number"):
        run_parallel("ZeRO 3", 4, SMALL_TASK, two)
    with pytest.raises(ValueError, match="'3D, 2 x 2 x 2' is laid out for ranks=8, use that number"):
        run_parallel("3D, 2 x 2 x 2", 2, pool=two)


def test_other_models_in_three_dimensions_are_refused_with_a_remedy(two: Crew) -> None:
    model, batch = SMALL_TASK.make_model(), SMALL_TASK.make_batch()
    with pytest.raises(ValueError, match=r"run_pipeline\(PipelineJob.of\(model, ...\), plan\)"):
        WAYS["3D, 2 x 2 x 2"].traffic(SMALL_TASK, model, 8, batch[0])
    job = PipelineJob.of(model, batch, 2, loss=mean_square, layers=SMALL_TASK.layers)
    assert run_pipeline(job, one_forward_one_backward(2, 2), pool=two).losses
