"""The recipes: how a pass is put together from its parts, run and taken down. A step, an inference, a rehearsal are these."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from l2l_core.batches import leaves_in, map_tensors
from l2l_core.config import RelayConfig
from l2l_core.eps import LayerStore
from l2l_core.eps.blocks import Unit
from l2l_core.step.breadth_first import BreadthFirstRuntime
from l2l_core.step.depth_first import DepthFirstRuntime
from l2l_core.step.loop import ForwardLoop, TrainLoop
from l2l_core.step.pass_plan import PassPlan
from l2l_core.step.pass_runtime import PassRuntime, PassTask
from l2l_core.step.per_micro_batch import PerMicroBatch
from l2l_core.step.relay_parts import RelayParts
from l2l_core.step.step_checks import StepChecks
from l2l_core.step.traffic import MeterRecord
from l2l_core.step.visit_scheduler import VisitScheduler
from l2l_core.trace import Trace


@dataclass(frozen=True, slots=True)
class PassSpec:
    """What a pass is to do.

    Attributes:
        config: how to run.
        plan: what to do with weights and graphs.
        task: gives the result of a micro-batch, in training its loss.
        micro_batches: as the model takes them.
        seeds: of their random streams.
        check: looks, after each forward, at what nobody in the pass knows of; it may refuse the step.
    """

    config: RelayConfig
    plan: PassPlan
    task: PassTask
    micro_batches: Sequence[Any]
    seeds: Sequence[int]
    check: Callable[[], None] = lambda: None


@dataclass(frozen=True, slots=True)
class PassResult:
    """What a pass has shown.

    Attributes:
        way: the layers in the order in which they were visited.
        metered: what passes of the same kind need not find out again.
        bytes_loaded, bytes_pushed: weights to the device, gradients to the host.
    """

    layer_order: list[Unit]
    metered: MeterRecord
    bytes_loaded: int
    bytes_pushed: int


def run_step(
    parts: RelayParts,
    store: LayerStore,
    spec: PassSpec,
    divisors: Sequence[float],
    trace: Trace,
    replay: MeterRecord | None,
) -> tuple[list[torch.Tensor], PassResult]:
    """Train on micro-batches, from the first load to the last update.

    Args:
        parts: of the relay.
        store: the EPS.
        work: what to do.
        divisors: of the micro-batches' losses.
        trace: gets events and memory.
        replay: what an earlier step has metered; None counts activations operation by operation.

    Returns:
        The scaled losses, which add up to the step's loss.

    Raises:
        Whatever goes wrong; `store.updated` says what has been updated by then, if it cannot be rolled back.
    """
    store.begin(spec.config, trace)
    return _SCHEDULES[spec.config.schedule](parts, store, spec, divisors, trace, replay)


def _run_breadth_first(
    parts: RelayParts,
    store: LayerStore,
    spec: PassSpec,
    divisors: Sequence[float],
    trace: Trace,
    replay: MeterRecord | None,
) -> tuple[list[torch.Tensor], PassResult]:
    with BreadthFirstRuntime(parts, spec.config, spec.plan, trace, replay) as stage:
        order = VisitScheduler(
            stage.make_forwards(spec.micro_batches, spec.task, spec.seeds), parts.layers, spec.plan.layer_order
        )
        apart = PerMicroBatch(parts.shell, order.visit_counts, store.reducer.per_micro_batch)
        slots, shell = stage.make_gradients(store, apart)
        forward = ForwardLoop(stage.ctx, order, spec.plan, stage.prefetch)
        checks = StepChecks(stage.ctx, parts.shell, parts.layer_only_params(), apart, spec.check)
        losses = TrainLoop(forward, store, slots, shell, apart, checks, divisors).train()
        stage.ctx.recompute_check.check_pending()  # before deferred updates: a recompute that differed has trained nothing yet
        store.finish()
        assert not any(visit.calls for visit in order.visits), "a call was not back-propagated"
        stage.stash.drain()
        stage.meter.sample()
        stage.ctx.influence.write_stats()
    return losses, _result_of(stage, order.layer_order)


def _run_depth_first(
    parts: RelayParts,
    store: LayerStore,
    spec: PassSpec,
    divisors: Sequence[float],
    trace: Trace,
    replay: MeterRecord | None,
) -> tuple[list[torch.Tensor], PassResult]:
    with DepthFirstRuntime(parts, spec.config, spec.plan, trace, replay) as stage:
        losses = stage.train(store, spec.task, spec.micro_batches, spec.seeds, divisors, spec.check)
        store.finish()
        stage.stash.drain()
        stage.meter.sample()
        stage.influence.write_stats()
    return losses, _result_of(stage, stage.layer_order)


_SCHEDULES = {"breadth_first": _run_breadth_first, "depth_first": _run_depth_first}


def run_forward(
    parts: RelayParts,
    spec: PassSpec,
    trace: Trace,
    replay: MeterRecord | None,
    prepare: Callable[[BreadthFirstRuntime], None] = lambda stage: None,
) -> tuple[list[Any], PassResult]:
    """Run the forward of micro-batches alone; gradients must be disabled.

    Args:
        parts, work, trace, replay: as for `run_step`.
        prepare: is let at the weights on the device before the pass begins.

    Returns:
        The results of the micro-batches, on the host.
    """
    with BreadthFirstRuntime(parts, spec.config, spec.plan, trace, replay) as stage:
        prepare(stage)
        order = VisitScheduler(
            stage.make_forwards(spec.micro_batches, spec.task, spec.seeds), parts.layers, spec.plan.layer_order
        )
        ForwardLoop(stage.ctx, order, spec.plan, stage.prefetch).run_inference()
        results = []
        for forward in order.forwards:  # one after another: together they need not fit on the device
            result, forward.result = forward.result, None
            stage.stash.fetch([t for t in leaves_in(result) if isinstance(t, torch.Tensor)], forward.k)
            results.append(map_tensors(result, _to_host))
            del result
        return results, _result_of(stage, order.layer_order)


def _result_of(runtime: PassRuntime, layer_order: list[Unit]) -> PassResult:
    return PassResult(layer_order, runtime.meter.record, runtime.loads.nbytes, runtime.pushes.nbytes)


def _to_host(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().to("cpu", copy=True)
