"""From costs, measured or by formula, to a forecast. The schedule is `simulate`'s: this is no second model of the relay."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from l2l_core.config import RelayConfig
from l2l_core.forecast.block_inventory import Inventory
from l2l_core.forecast.forecast import Forecast, WorkerForecast
from l2l_core.forecast.gradient_buffer_bytes import gradient_buffer_bytes, worker_gradient_buffer_bytes
from l2l_core.forecast.memory_timeline import MemoryTimeline
from l2l_core.forecast.profile_extrapolation import extrapolate_profile
from l2l_core.forecast.shelf_costs import ShelfCosts, ShelfForecast
from l2l_core.forecast.step_limits import DepthBudget, hiding_micro_batches, largest_depth
from l2l_core.schedule_rules import weight_itemsize
from l2l_core.simulator import COPY_LANES, Cluster, Profile
from l2l_core.simulator import simulate_step as replayed_step
from l2l_core.trace import MemorySample, Trace, format_bytes


@dataclass(frozen=True, slots=True)
class ForecastCosts:
    """What a forecast is made of.

    Attributes:
        profile: of a few micro-batches; its host memory is the stash alone.
        stands: which of them stands for each micro-batch of the step.
        around_s: seconds of a step outside of its events.
        host: bytes on the host besides stash and gradients, by category.
        pooled_bytes: gradient buffers that are there already.
        layer_host_bytes: masters, optimizer state and such of each layer, by key.
        basis: in words.
        holdings: what the EPS has of every block, where that is known; without it nothing can be said of workers.
        shelf: files in which masters and state are; then `host` and `layer_host_bytes` have none of them.
    """

    profile: Profile
    representatives: Sequence[int]
    overhead_s: float
    host_bytes: Mapping[str, int]
    pooled_bytes: int
    layer_host_bytes: Mapping[str, int]
    basis: str
    inventory: Inventory | None = None
    shelf: ShelfCosts | None = None

    def peak_bytes(self, place: str) -> int:
        """Return the bytes that the step itself takes of a place at its peak: all on the device, on the host the stash."""
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
    """Make the forecast of a step from its costs.

    Args:
        costs: measured, or by formula.
        config: of the step; its number of micro-batches is that of `costs.stands`.
        figures: of the device, as in `Device.figures`.
        host_limit_bytes: what the host has; None for no limit.
        fleet: of workers that each make such a step.
    """
    replay = _simulate(costs, config, figures, cluster)
    trace, memory_bytes = _add_host_bytes(replay), figures.get("memory_bytes")
    spare = replay.shelf.unused_bytes if replay.shelf else 0
    budgets = DepthBudget(
        memory_bytes, host_limit_bytes, spare + sum(replay.fixed_host_bytes.values()), replay.layer_bytes
    )
    return Forecast(
        seconds=trace.span_s + costs.overhead_s + cluster.overhead_s,
        trace=trace,
        # of the few micro-batches and not of the stretched step: both make steps of other sizes from them
        hiding_micro_batches=hiding_micro_batches(costs.profile, config, figures, costs.shelf),
        largest_depth=_min_depth(
            largest_depth(costs.profile, costs.representatives, budgets),
            costs.shelf.max_depth(replay.shelf.scratch_bytes) if costs.shelf and replay.shelf else None,
        ),
        config=config,
        basis=f"{costs.basis}; {_describe_link(figures)}",
        memory_bytes=memory_bytes,
        host_limit_bytes=host_limit_bytes,
        worker=replay.worker,
        shelf=replay.shelf,
    )


def simulate_costs(costs: ForecastCosts, config: RelayConfig, figures: Mapping[str, Any], cluster: Cluster) -> Trace:
    """Return the step that a forecast is read off."""
    return _add_host_bytes(_simulate(costs, config, figures, cluster))


class _ForecastStep(NamedTuple):
    """A simulated step.

    Attributes:
        trace: of it.
        standing: what stands on the host besides the stash, by category.
        layer_bytes: of that, each layer's.
        worker: whose step it is, of several.
        shelf: on disk, if there is one.
    """

    trace: Trace
    fixed_host_bytes: Mapping[str, int]
    layer_bytes: Mapping[str, int]
    worker: WorkerForecast | None = None
    shelf: ShelfForecast | None = None


def _simulate(costs: ForecastCosts, config: RelayConfig, figures: Mapping[str, Any], cluster: Cluster) -> _ForecastStep:
    alone = cluster.count == 1
    return _simulate_single(costs, config, figures) if alone else _simulate_worker(costs, config, figures, cluster)


def _simulate_single(costs: ForecastCosts, config: RelayConfig, figures: Mapping[str, Any]) -> _ForecastStep:
    profile = extrapolate_profile(costs.profile, costs.representatives)
    company = None if costs.shelf is None else costs.shelf.make_virtual_backend()
    if costs.shelf is not None:
        figures = {**figures, **costs.shelf.figures()}
    trace = replayed_step(profile, config, figures, Cluster(count=1), shelf=company).trace
    # The EPS keeps its buffers in a pool: those that earlier steps took are there, needed or not.
    gradients = max(gradient_buffer_bytes(profile, trace), costs.pooled_bytes)
    # Deferred updates keep each layer's gradient as well
    kept = {key: layer.push_bytes for key, layer in costs.profile.layers.items()} if config.update == "deferred" else {}
    layer_bytes = {key: nbytes + kept.get(key, 0) for key, nbytes in costs.layer_host_bytes.items()}
    standing = {**costs.host_bytes, "gradients": gradients}
    if costs.shelf is None or company is None:
        return _ForecastStep(trace, standing, layer_bytes)
    standing |= {
        "weights": company.load_pool.peak_bytes,
        "optimizer": company.record_pool.peak_bytes,
        "stash": company.stash.buffer_bytes,
    }
    return _ForecastStep(trace, standing, layer_bytes, shelf=costs.shelf.summarize(company, trace))


def _simulate_worker(
    costs: ForecastCosts, config: RelayConfig, figures: Mapping[str, Any], cluster: Cluster
) -> _ForecastStep:
    """The same for one of several workers, which holds parts of blocks, and buffers to put them together."""
    assert costs.inventory is not None, "costs by formula say nothing of blocks"
    profile, shares, rank = (
        extrapolate_profile(costs.profile, costs.representatives),
        costs.inventory.shard(cluster.count),
        cluster.rank,
    )
    trace, gathered, sent = replayed_step(profile, config, figures, cluster, shares)
    held = costs.inventory.worker_bytes(shares, rank)
    buffers = weight_itemsize(config.precision) * sum(numel * count for numel, count in gathered.items())
    gradients = worker_gradient_buffer_bytes(profile, trace, shares)
    standing = {**costs.host_bytes, **held, "weights": held["weights"] + buffers, "gradients": gradients}
    deferred = config.update == "deferred"
    layer_bytes = {
        key: nbytes + deferred * sum(4 * share.gradient_numels[rank] for share in shares[key])
        for key, nbytes in costs.inventory.worker_layer_bytes(shares, rank).items()
    }
    return _ForecastStep(trace, standing, layer_bytes, WorkerForecast(cluster, held, buffers, dict(sent)))


def _min_depth(*depths: int | None) -> int | None:
    """Give the smallest number, of those that are a limit."""
    return min((depth for depth in depths if depth is not None), default=None)


def _describe_link(figures: Mapping[str, Any]) -> str:
    speeds = [(lane, figures.get(f"{lane}_bytes_per_s")) for lane in COPY_LANES]
    words = [f"{lane} {format_bytes(speed)}/s" if speed else f"{lane} as measured" for lane, speed in speeds]
    return "link: " + ", ".join(words)


def _add_host_bytes(step: _ForecastStep) -> Trace:
    """The trace with what stands on the host besides the stash."""
    trace, standing = step.trace, step.fixed_host_bytes
    memory = [
        sample
        if sample.place == "device"
        else MemorySample(sample.t_s, "host", {n: v for n, v in {**standing, **sample.bytes_by_category}.items() if v})
        for sample in trace.memory
    ]
    names = ("step", "device", "names", "settings", "worker")
    header = {name: getattr(trace, name) for name in names}
    return Trace.of(trace.events_since(0)[0], memory, **header)
