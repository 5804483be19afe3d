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
from l2l_core.step.apart import Apart
from l2l_core.step.checks import Checks
from l2l_core.step.depth_first import DepthFirst
from l2l_core.step.ground import Ground, Task
from l2l_core.step.loop import ForwardLoop, TrainLoop
from l2l_core.step.order import Order
from l2l_core.step.parts import Parts
from l2l_core.step.plan import Plan
from l2l_core.step.stage import Stage
from l2l_core.step.traffic import Metered
from l2l_core.trace import Trace


@dataclass(frozen=True, slots=True)
class Work:
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
    plan: Plan
    task: Task
    micro_batches: Sequence[Any]
    seeds: Sequence[int]
    check: Callable[[], None] = lambda: None


@dataclass(frozen=True, slots=True)
class Ran:
    """What a pass has shown.

    Attributes:
        way: the layers in the order in which they were visited.
        metered: what passes of the same kind need not find out again.
        bytes_loaded, bytes_pushed: weights to the device, gradients to the host.
    """

    way: list[Unit]
    metered: Metered
    bytes_loaded: int
    bytes_pushed: int


def run_step(
    parts: Parts, store: LayerStore, work: Work, divisors: Sequence[float], trace: Trace, replay: Metered | None
) -> tuple[list[torch.Tensor], Ran]:
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
    store.begin(work.config, trace)
    return _SCHEDULES[work.config.schedule](parts, store, work, divisors, trace, replay)


def _breadth_first(
    parts: Parts, store: LayerStore, work: Work, divisors: Sequence[float], trace: Trace, replay: Metered | None
) -> tuple[list[torch.Tensor], Ran]:
    with Stage(parts, work.config, work.plan, trace, replay) as stage:
        order = Order(stage.forwards(work.micro_batches, work.task, work.seeds), parts.layers, work.plan.order)
        apart = Apart(parts.shell, order.visits_of, store.reducer.keeps_apart)
        slots, shell = stage.gradients(store, apart)
        forward = ForwardLoop(stage.run, order, work.plan, stage.prefetch)
        checks = Checks(stage.run, parts.shell, parts.inside(), apart, work.check)
        losses = TrainLoop(forward, store, slots, shell, apart, checks, divisors).train()
        stage.run.recomputes.settle()  # before deferred updates: a recompute that differed has trained nothing yet
        store.finish()
        assert not any(visit.calls for visit in order.visits), "a call was not back-propagated"
        stage.stash.drain()
        stage.meter.sample()
        stage.run.influence.tell()
    return losses, _ran(stage, order.way)


def _depth_first(
    parts: Parts, store: LayerStore, work: Work, divisors: Sequence[float], trace: Trace, replay: Metered | None
) -> tuple[list[torch.Tensor], Ran]:
    with DepthFirst(parts, work.config, work.plan, trace, replay) as stage:
        losses = stage.train(store, work.task, work.micro_batches, work.seeds, divisors, work.check)
        store.finish()
        stage.stash.drain()
        stage.meter.sample()
        stage.influence.tell()
    return losses, _ran(stage, stage.way)


_SCHEDULES = {"breadth_first": _breadth_first, "depth_first": _depth_first}


def run_forward(
    parts: Parts,
    work: Work,
    trace: Trace,
    replay: Metered | None,
    prepare: Callable[[Stage], None] = lambda stage: None,
) -> tuple[list[Any], Ran]:
    """Run the forward of micro-batches alone; gradients must be disabled.

    Args:
        parts, work, trace, replay: as for `run_step`.
        prepare: is let at the weights on the device before the pass begins.

    Returns:
        The results of the micro-batches, on the host.
    """
    with Stage(parts, work.config, work.plan, trace, replay) as stage:
        prepare(stage)
        order = Order(stage.forwards(work.micro_batches, work.task, work.seeds), parts.layers, work.plan.order)
        ForwardLoop(stage.run, order, work.plan, stage.prefetch).forward()
        results = []
        for forward in order.forwards:  # one after another: together they need not fit on the device
            result, forward.result = forward.result, None
            stage.stash.fetch([t for t in leaves_in(result) if isinstance(t, torch.Tensor)], forward.k)
            results.append(map_tensors(result, _to_host))
            del result
        return results, _ran(stage, order.way)


def _ran(stage: Ground, way: list[Unit]) -> Ran:
    return Ran(way, stage.meter.latest, stage.loads.nbytes, stage.pushes.nbytes)


def _to_host(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().to("cpu", copy=True)
