"""From costs, measured or by formula, to a forecast. The schedule is `simulate`'s: this is no second model of the relay."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from l2l_core.config import RelayConfig
from l2l_core.forecast.forecast import Forecast, OfWorker
from l2l_core.forecast.gradient_buffers import gradient_buffer_bytes, gradient_buffer_bytes_of_worker
from l2l_core.forecast.holdings import Holdings
from l2l_core.forecast.limits import Budgets, hiding_micro_batches, largest_depth
from l2l_core.forecast.memory_walk import MemoryWalk
from l2l_core.forecast.planned_shelf import OfShelf, ShelfCosts
from l2l_core.forecast.stretch import stretch
from l2l_core.rules import weight_itemsize
from l2l_core.simulator import COPY_LANES, Fleet, Profile
from l2l_core.simulator import replayed as replayed_step
from l2l_core.trace import MemorySample, Trace, format_bytes


@dataclass(frozen=True, slots=True)
class Costs:
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
    stands: Sequence[int]
    around_s: float
    host: Mapping[str, int]
    pooled_bytes: int
    layer_host_bytes: Mapping[str, int]
    basis: str
    holdings: Holdings | None = None
    shelf: ShelfCosts | None = None

    def peak_bytes(self, place: str) -> int:
        """Return the bytes that the step itself takes of a place at its peak: all on the device, on the host the stash."""
        return MemoryWalk(self.profile).rise(place, self.stands, {}).high


def on_shelf(shelf: ShelfCosts, costs: Costs) -> Costs:
    """Move masters and optimizer state of a step from host memory to files."""
    host = {name: nbytes for name, nbytes in costs.host.items() if name not in ("weights", "optimizer")}
    return replace(costs, host=host, layer_host_bytes=dict.fromkeys(costs.layer_host_bytes, 0), shelf=shelf)


def forecast_costs(
    costs: Costs,
    config: RelayConfig,
    figures: Mapping[str, Any],
    host_limit_bytes: int | None = None,
    fleet: Fleet = Fleet(count=1),  # noqa: B008 - frozen
) -> Forecast:
    """Make the forecast of a step from its costs.

    Args:
        costs: measured, or by formula.
        config: of the step; its number of micro-batches is that of `costs.stands`.
        figures: of the device, as in `Device.figures`.
        host_limit_bytes: what the host has; None for no limit.
        fleet: of workers that each make such a step.
    """
    replay = _replay(costs, config, figures, fleet)
    trace, memory_bytes = _with_host(replay), figures.get("memory_bytes")
    spare = replay.shelf.spare_bytes if replay.shelf else 0
    budgets = Budgets(memory_bytes, host_limit_bytes, spare + sum(replay.standing.values()), replay.layer_bytes)
    return Forecast(
        seconds=trace.span_s + costs.around_s + fleet.around_s,
        trace=trace,
        # of the few micro-batches and not of the stretched step: both make steps of other sizes from them
        hiding_micro_batches=hiding_micro_batches(costs.profile, config, figures, costs.shelf),
        largest_depth=_least(
            largest_depth(costs.profile, costs.stands, budgets),
            costs.shelf.deepest(replay.shelf.scratch_bytes) if costs.shelf and replay.shelf else None,
        ),
        config=config,
        basis=f"{costs.basis}; {_link_words(figures)}",
        memory_bytes=memory_bytes,
        host_limit_bytes=host_limit_bytes,
        worker=replay.worker,
        shelf=replay.shelf,
    )


def replayed(costs: Costs, config: RelayConfig, figures: Mapping[str, Any], fleet: Fleet) -> Trace:
    """Return the step that a forecast is read off."""
    return _with_host(_replay(costs, config, figures, fleet))


class _Replay(NamedTuple):
    """A simulated step.

    Attributes:
        trace: of it.
        standing: what stands on the host besides the stash, by category.
        layer_bytes: of that, each layer's.
        worker: whose step it is, of several.
        shelf: on disk, if there is one.
    """

    trace: Trace
    standing: Mapping[str, int]
    layer_bytes: Mapping[str, int]
    worker: OfWorker | None = None
    shelf: OfShelf | None = None


def _replay(costs: Costs, config: RelayConfig, figures: Mapping[str, Any], fleet: Fleet) -> _Replay:
    alone = fleet.count == 1
    return _replay_alone(costs, config, figures) if alone else _replay_of_worker(costs, config, figures, fleet)


def _replay_alone(costs: Costs, config: RelayConfig, figures: Mapping[str, Any]) -> _Replay:
    profile = stretch(costs.profile, costs.stands)
    company = None if costs.shelf is None else costs.shelf.company()
    if costs.shelf is not None:
        figures = {**figures, **costs.shelf.figures()}
    trace = replayed_step(profile, config, figures, Fleet(count=1), shelf=company).trace
    # The EPS keeps its buffers in a pool: those that earlier steps took are there, needed or not.
    gradients = max(gradient_buffer_bytes(profile, trace), costs.pooled_bytes)
    # Deferred updates keep each layer's gradient as well
    kept = {key: layer.push_bytes for key, layer in costs.profile.layers.items()} if config.update == "deferred" else {}
    layer_bytes = {key: nbytes + kept.get(key, 0) for key, nbytes in costs.layer_host_bytes.items()}
    standing = {**costs.host, "gradients": gradients}
    if costs.shelf is None or company is None:
        return _Replay(trace, standing, layer_bytes)
    standing |= {
        "weights": company.loads.most,
        "optimizer": company.records.most,
        "stash": company.stash.buffer_bytes,
    }
    return _Replay(trace, standing, layer_bytes, shelf=costs.shelf.told(company, trace))


def _replay_of_worker(costs: Costs, config: RelayConfig, figures: Mapping[str, Any], fleet: Fleet) -> _Replay:
    """The same for one of several workers, which holds parts of blocks, and buffers to put them together."""
    assert costs.holdings is not None, "costs by formula say nothing of blocks"
    profile, shares, rank = stretch(costs.profile, costs.stands), costs.holdings.shares(fleet.count), fleet.rank
    trace, gathered, sent = replayed_step(profile, config, figures, fleet, shares)
    held = costs.holdings.of_worker(shares, rank)
    buffers = weight_itemsize(config.precision) * sum(numel * count for numel, count in gathered.items())
    gradients = gradient_buffer_bytes_of_worker(profile, trace, shares)
    standing = {**costs.host, **held, "weights": held["weights"] + buffers, "gradients": gradients}
    deferred = config.update == "deferred"
    layer_bytes = {
        key: nbytes + deferred * sum(4 * share.gradient[rank] for share in shares[key])
        for key, nbytes in costs.holdings.layers_of_worker(shares, rank).items()
    }
    return _Replay(trace, standing, layer_bytes, OfWorker(fleet, held, buffers, dict(sent)))


def _least(*depths: int | None) -> int | None:
    """Give the smallest number, of those that are a limit."""
    return min((depth for depth in depths if depth is not None), default=None)


def _link_words(figures: Mapping[str, Any]) -> str:
    speeds = [(lane, figures.get(f"{lane}_bytes_per_s")) for lane in COPY_LANES]
    words = [f"{lane} {format_bytes(speed)}/s" if speed else f"{lane} as measured" for lane, speed in speeds]
    return "link: " + ", ".join(words)


def _with_host(replay: _Replay) -> Trace:
    """The trace with what stands on the host besides the stash."""
    trace, standing = replay.trace, replay.standing
    memory = [
        sample
        if sample.place == "device"
        else MemorySample(sample.t_s, "host", {n: v for n, v in {**standing, **sample.bytes_by_category}.items() if v})
        for sample in trace.memory
    ]
    names = ("step", "device", "names", "settings", "worker")
    header = {name: getattr(trace, name) for name in names}
    return Trace.of(trace.since(0)[0], memory, **header)
