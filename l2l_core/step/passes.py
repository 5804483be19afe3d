"""Passes assembled from their parts: a training step, and a forward pass."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from l2l_core.batches import leaves_in, map_tensors
from l2l_core.eps import LayerStore
from l2l_core.eps.blocks import Unit
from l2l_core.plan import StepPlan
from l2l_core.step.batch_loss import BatchLoss
from l2l_core.step.breadth_first import BreadthFirstRuntime
from l2l_core.step.depth_first import DepthFirstRuntime
from l2l_core.step.loop import ForwardExecutor, StepExecutor
from l2l_core.step.pass_inputs import PassSpec, RelayParts
from l2l_core.step.pass_runtime import PassRuntime
from l2l_core.step.step_checks import PerMicroBatch, StepChecks
from l2l_core.step.traffic import MeterRecord
from l2l_core.trace import Trace


@dataclass(frozen=True, slots=True)
class PassResult:
    """Measurements of a pass."""

    layer_order: list[Unit]  # by visit
    metered: MeterRecord  # for later passes of the same kind
    plan: StepPlan | None = None  # of a step that a schedule ran


def run_step(
    parts: RelayParts,
    store: LayerStore,
    spec: PassSpec,
    divisors: Sequence[float],
    trace: Trace,
    replay: MeterRecord | None,
) -> tuple[list[torch.Tensor], PassResult]:
    """Run a training step, from the first load to the last update; return the scaled losses of the micro-batches.

    If it raises and cannot be rolled back, `store.updated` has the layers that were updated. The micro-batches' losses divided
    by `divisors` add up to the step's loss. Without a record to `replay`, the step is metered.
    """
    store.begin(spec.config, trace)
    given = spec.config.schedule
    assert isinstance(given, str | StepPlan), f"{given} was not called to make the plan of the step"
    if given == "depth_first":
        with DepthFirstRuntime(parts, spec, trace, replay) as depth_first:
            losses = depth_first.train(store, divisors)
            _finish_step(depth_first, store)
            depth_first.influence.write_stats()
        return losses, _result_of(depth_first, depth_first.layer_order)
    with BreadthFirstRuntime(parts, spec, trace, replay) as runtime:
        per_micro_batch = PerMicroBatch(parts.shell, store.reducer.per_micro_batch)
        slots, shell = runtime.make_gradients(store, per_micro_batch)
        checks = StepChecks(runtime.ctx, parts, per_micro_batch, runtime.check_forward)
        of_batch = spec.batch_loss
        load, trains = (
            (None, True)
            if of_batch is None
            else (partial(_load_batch_loss, runtime, of_batch), of_batch.trains_parameters)
        )
        executor = StepExecutor(
            runtime.ctx,
            runtime.make_forwards(),
            parts.layers,
            runtime.weight_slots,
            store,
            slots,
            shell,
            per_micro_batch,
            checks,
            divisors,
            load,
            trains,
        )
        schedule = given if isinstance(given, StepPlan) else runtime.make_schedule()
        executor.run(schedule.train())
        runtime.ctx.recompute_check.check_pending()  # before deferred updates, so that a wrong recompute trains nothing
        assert not any(visit.calls for visit in executor.visits), "a call was not back-propagated"
        _finish_step(runtime, store)
        runtime.ctx.influence.write_stats()
        ran = StepPlan(schedule.settings, tuple(executor.actions), schedule.name)
    return executor.losses, PassResult(executor.layer_order, runtime.meter.record, ran)


def _load_batch_loss(runtime: PassRuntime, batch_loss: BatchLoss) -> Callable[[Sequence[Any]], torch.Tensor]:
    return partial(batch_loss.compute, batch=runtime.load_batch())


def _finish_step(runtime: PassRuntime, store: LayerStore) -> None:
    store.finish()
    runtime.stash.drain()
    runtime.meter.sample()


def run_forward(
    parts: RelayParts,
    spec: PassSpec,
    trace: Trace,
    replay: MeterRecord | None,
    prepare: Callable[[BreadthFirstRuntime], None] = lambda runtime: None,
) -> tuple[list[Any], PassResult]:
    """Run the forward pass alone; return the results of the micro-batches on the host, or the batch's loss alone.

    Gradients must be disabled. `prepare` is called when the shell is on the device.
    """
    with BreadthFirstRuntime(parts, spec, trace, replay) as runtime:
        prepare(runtime)
        executor = ForwardExecutor(runtime.ctx, runtime.make_forwards(), parts.layers, runtime.weight_slots)
        executor.run(runtime.make_schedule().infer())
        if spec.batch_loss is not None:
            loss = executor.compute_batch_loss(partial(_load_batch_loss, runtime, spec.batch_loss))
            return [loss.cpu()], _result_of(runtime, executor.layer_order)
        results = []
        for forward in executor.forwards:  # one by one: all results may not fit on the device
            result, forward.result = forward.result, None
            runtime.stash.fetch([t for t in leaves_in(result) if isinstance(t, torch.Tensor)], forward.k)
            results.append(map_tensors(result, lambda tensor: tensor.detach().to("cpu", copy=True)))
            del result
        return results, _result_of(runtime, executor.layer_order)


def _result_of(runtime: PassRuntime, layer_order: list[Unit]) -> PassResult:
    return PassResult(layer_order, runtime.meter.record)
