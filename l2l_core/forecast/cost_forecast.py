"""Forecast of a step from its costs, measured or by formula, with the schedule of `simulate`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from l2l_core.config import RelayConfig
from l2l_core.forecast.block_inventory import Inventory
from l2l_core.forecast.forecast import Forecast, WorkerForecast
from l2l_core.forecast.gradient_buffer_bytes import gradient_buffer_bytes, worker_gradient_buffer_bytes
from l2l_core.forecast.memory_timeline import MemoryTimeline
from l2l_core.forecast.profile_transforms import extrapolate_profile
from l2l_core.forecast.shelf_costs import ShelfCosts, ShelfForecast
from l2l_core.forecast.step_limits import DepthBudget, hiding_micro_batches, largest_depth
from l2l_core.schedule_rules import weight_itemsize
from l2l_core.simulator import COPY_LANES, Cluster, Profile, simulate_step
from l2l_core.trace import Trace, format_bytes


@dataclass(frozen=True, slots=True)
class ForecastCosts:
    """Costs of a step."""

    profile: Profile  # of a few micro-batches, with the stash alone in its host memory
    representatives: Sequence[int]  # for each micro-batch of the step, the micro-batch of the profile with its costs
    overhead_s: float  # time of a step outside of its events
    host_bytes: Mapping[str, int]  # bytes on the host besides stash and gradients, by category
    pooled_bytes: int  # gradient buffers that exist already
    layer_host_bytes: Mapping[str, int]  # masters, optimizer state and casts of each layer, by key
    basis: str  # description of the source
    inventory: Inventory | None = None  # needed for several workers
    shelf: ShelfCosts | None = None  # has masters and optimizer state, which are then in neither of the mappings

    def peak_bytes(self, place: str) -> int:
        """Return the peak of the step's bytes in a place: everything on the device, the stash on the host."""
        return MemoryTimeline(self.profile).rise(place, self.representatives, {}).peak


def add_shelf_costs(shelf: ShelfCosts, costs: ForecastCosts) -> ForecastCosts:
    """Move masters and optimizer state of a step from host memory to files."""
    host = {name: nbytes for name, nbytes in costs.host_bytes.items() if name not in ("weights", "optimizer")}
    return replace(costs, host_bytes=host, layer_host_bytes=dict.fromkeys(costs.layer_host_bytes, 0), shelf=shelf)


def forecast_costs(
    costs: ForecastCosts,
    config: RelayConfig,
    figures: Mapping[str, Any],
    host_limit_bytes: int | None = None,
    cluster: Cluster = Cluster(count=1),  # noqa: B008 - frozen
) -> Forecast:
    """Forecast a step from its costs, on a device with these figures and a host with `host_limit_bytes`, or without limit."""
    step = simulate_costs(costs, config, figures, cluster)
    trace, memory_bytes, shelf = step.trace, figures.get("memory_bytes"), step.shelf
    fixed_bytes = sum(step.fixed_host_bytes.values()) + (shelf.unused_bytes if shelf else 0)
    budget = DepthBudget(memory_bytes, host_limit_bytes, fixed_bytes, step.layer_bytes)
    depths = [largest_depth(costs.profile, costs.representatives, budget)]
    if costs.shelf and shelf:
        depths.append(costs.shelf.max_depth(shelf.scratch_bytes))
    speeds = [(lane, figures.get(f"{lane}_bytes_per_s")) for lane in COPY_LANES]
    link = [f"{lane} {format_bytes(speed)}/s" if speed else f"{lane} as measured" for lane, speed in speeds]
    return Forecast(
        seconds=trace.span_s + costs.overhead_s + cluster.overhead_s,
        trace=trace,
        # Of the few micro-batches: the search makes steps of other sizes from them.
        hiding_micro_batches=hiding_micro_batches(costs.profile, config, figures, costs.shelf),
        largest_depth=min((depth for depth in depths if depth is not None), default=None),
        config=config,
        basis=f"{costs.basis}; link: {', '.join(link)}",
        memory_bytes=memory_bytes,
        host_limit_bytes=host_limit_bytes,
        worker=step.worker,
        shelf=shelf,
    )


class SimulatedCosts(NamedTuple):
    """A simulated step."""

    trace: Trace
    fixed_host_bytes: Mapping[str, int]  # bytes on the host besides the stash, by category
    layer_bytes: Mapping[str, int]  # of these, those of each layer
    worker: WorkerForecast | None = None
    shelf: ShelfForecast | None = None


def simulate_costs(
    costs: ForecastCosts, config: RelayConfig, figures: Mapping[str, Any], cluster: Cluster
) -> SimulatedCosts:
    """Simulate the step of a forecast, on this cluster's worker."""
    if cluster.count > 1:
        return _simulate_worker(costs, config, figures, cluster)
    profile, backend = extrapolate_profile(costs.profile, costs.representatives), None
    if costs.shelf is not None:
        backend, figures = costs.shelf.make_virtual_backend(), {**figures, **costs.shelf.figures()}
    trace = simulate_step(profile, config, figures, Cluster(count=1), shelf=backend).trace
    # The EPS keeps its buffers in a pool: those of earlier steps exist, needed or not.
    gradients = max(gradient_buffer_bytes(profile, trace), costs.pooled_bytes)
    kept = {key: layer.push_bytes for key, layer in costs.profile.layers.items()} if config.update != "eager" else {}
    layer_bytes = {key: nbytes + kept.get(key, 0) for key, nbytes in costs.layer_host_bytes.items()}
    fixed = {**costs.host_bytes, "gradients": gradients}
    if costs.shelf is None or backend is None:
        return SimulatedCosts(_add_host_bytes(trace, fixed), fixed, layer_bytes)
    pools = {"weights": backend.load_pool.peak_bytes, "optimizer": backend.record_pool.peak_bytes}
    fixed |= {**pools, "stash": backend.stash.buffer_bytes}
    shelf = costs.shelf.summarize(backend, trace)
    return SimulatedCosts(_add_host_bytes(trace, fixed), fixed, layer_bytes, shelf=shelf)


def _simulate_worker(
    costs: ForecastCosts, config: RelayConfig, figures: Mapping[str, Any], cluster: Cluster
) -> SimulatedCosts:
    """Simulate the step of one of several workers, which holds shards of blocks and buffers to gather them."""
    assert costs.inventory is not None, "costs by formula have no inventory of blocks"
    inventory, rank = costs.inventory, cluster.rank
    profile, shards = extrapolate_profile(costs.profile, costs.representatives), inventory.shard(cluster.count)
    trace, gathered, sent = simulate_step(profile, config, figures, cluster, shards)
    held = inventory.worker_bytes(shards, rank)
    buffers = weight_itemsize(config.precision) * sum(numel * count for numel, count in gathered.items())
    gradients = worker_gradient_buffer_bytes(profile, trace, shards)
    fixed = {**costs.host_bytes, **held, "weights": held["weights"] + buffers, "gradients": gradients}
    deferred = config.update != "eager"
    layer_bytes = {
        key: nbytes + deferred * sum(4 * shard.gradient_numels[rank] for shard in shards[key])
        for key, nbytes in inventory.worker_layer_bytes(shards, rank).items()
    }
    worker = WorkerForecast(cluster, held, buffers, dict(sent))
    return SimulatedCosts(_add_host_bytes(trace, fixed), fixed, layer_bytes, worker)


def _add_host_bytes(trace: Trace, fixed: Mapping[str, int]) -> Trace:
    """Return the trace with all bytes on the host, not only those of the stash."""
    memory = []
    for sample in trace.memory:
        if sample.place == "host":
            held = {**fixed, **sample.bytes_by_category}
            sample = replace(sample, bytes_by_category={name: n for name, n in held.items() if n})
        memory.append(sample)
    header = {name: getattr(trace, name) for name in ("step", "device", "names", "settings", "worker")}
    return Trace.of(trace.events_since(0)[0], memory, **header)
