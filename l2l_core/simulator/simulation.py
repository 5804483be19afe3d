"""Simulation of a step from costs, settings, a link and workers, after a check that they are compatible.

`virtual_relay.py` has the schedule, `virtual_workers.py` the collectives of several workers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from typing import Any, NamedTuple

from l2l_core.config import Compress, RelayConfig
from l2l_core.devices import Device
from l2l_core.plan import ScheduleSettings, StepPlan, check_plan
from l2l_core.schedule_rules import chunks_per_copy, kept_layer_count, kept_layers, weight_itemsize, weight_slots
from l2l_core.simulator.action_costs import CostedAction, CostPlaces, StepShape, actions_of_step
from l2l_core.simulator.cluster import BlockShards, Cluster, shards_of_profile
from l2l_core.simulator.plan_costs import cost_plan
from l2l_core.simulator.profile import Profile
from l2l_core.simulator.step_costs import ComputeOp, EPSJob, LayerCost
from l2l_core.simulator.virtual_relay import VirtualRelay
from l2l_core.simulator.virtual_shelf import VirtualDiskBackend
from l2l_core.simulator.virtual_stash import VirtualStashStore
from l2l_core.simulator.virtual_workers import (
    TrafficTotal,
    VirtualDistributedBackend,
    VirtualLocalBackend,
    VirtualRendezvous,
)
from l2l_core.trace import Trace
from l2l_core.workers import Network

MAX_EVENTS = 20_000  # above, the micro-batches of a stay are merged


class SimulatedStep(NamedTuple):
    """A step on a virtual clock."""

    trace: Trace  # of the observed worker
    gather_buffers: Mapping[int, int]  # number of its host buffers for gathered layers, by elements
    traffic: Mapping[str, TrafficTotal]  # between it and the others: "gather" for weights, "reduce" for gradients


def simulate(
    profile: Profile,
    config: RelayConfig,
    device: Device | Mapping[str, Any] | None = None,
    *,
    workers: int | None = None,
    network: Network | None = None,
    stragglers: Mapping[int, float] | None = None,
    wire: str = "fp32",
    reduce: str | None = None,
    rank: int = 0,
    plan: StepPlan | None = None,
) -> Trace:
    """Run a step with these costs on a virtual clock.

    Args:
        profile: costs, recorded or by formula.
        config: settings of the relay. With more or fewer micro-batches than in the profile, these are repeated or left out,
            so the batch grows or shrinks.
        device: assumed link: an `EmulatedDevice`, or figures ("h2d_bytes_per_s", "d2h_bytes_per_s", "latency_s"). Missing
            figures are taken from the profile.
        workers: number of workers, each with a batch like the profile's. Default: as in the profile.
        network: between them. Default: one that takes no time.
        stragglers: by rank, the factor by which compute and the EPS are slower than in the profile.
        wire: type in which gradients are sent, as for `Workers`.
        reduce: as for `Workers`. Default: as in the profile, "sum" if it is of one worker.
        rank: worker whose trace is returned.
        plan: run these actions, as `relay.step(batch, plan=plan)` does, in place of the relay's own schedule. Number of
            micro-batches, of layers ahead, of slots and of kept graphs are the plan's. For its costs see `plan_costs.py`.

    Returns:
        A trace on a virtual clock that starts at 0. Above 20,000 events, the micro-batches of a stay are merged, except those
        of a plan. The trace of a plan has no memory samples if it computes in another order than the profile's step, or
        keeps other graphs: see `plan_memory.py`.

    Raises:
        ValueError, TypeError: the profile has another precision, stash or `reduce`, so its bytes do not apply; or a figure
            is out of range; or the plan is of another step.
        PlanError: the plan breaks a rule of a training step.

    Example:
        >>> from l2l_core import EmulatedDevice, Profile, simulate
        >>> profile = Profile.of(relay.step(batch).trace)
        >>> slow = EmulatedDevice(h2d_bytes_per_s=1e6, d2h_bytes_per_s=1e6)
        >>> trace = simulate(profile, relay.config, slow)  # the same step behind a link of 1 MB/s
        >>> trace.span_s > 0.03
        True
    """
    count = profile.settings.get("workers", 1) if workers is None else workers
    cluster = Cluster(
        count=count,
        network=network or Network(),
        stragglers=stragglers or {},
        wire=wire,
        reduce=profile.settings.get("reduce", "sum") if reduce is None else reduce,
        rank=rank,
    )
    figures = device.figures() if isinstance(device, Device) else dict(device or {})
    return simulate_step(profile, config, figures, cluster, plan=plan).trace


def simulate_step(
    profile: Profile,
    config: RelayConfig,
    figures: Mapping[str, Any],
    cluster: Cluster,
    shards: Mapping[str, Sequence[BlockShards]] | None = None,
    shelf: VirtualDiskBackend | None = None,
    plan: StepPlan | None = None,
) -> SimulatedStep:
    """Run a step; see `simulate`.

    Without `shards`, a layer is split as if it were one parameter. A `shelf` has files with weights and state, for one worker.
    """
    if config.has_own_schedule:
        plan = plan or _plan_of(profile, config)
        config = replace(config, schedule="breadth_first")  # settings of the costs
    if plan is not None:
        return SimulatedStep(_simulate_plan(profile, config, figures, cluster, plan, shelf is not None), {}, {})
    config = config.for_layers(len(profile.layers) - 1)
    stash_store = _make_stash_store(profile, config, shelf)
    _check_compatible(profile, config, cluster)
    profile = _single_worker_profile(profile).with_micro_batches(config.micro_batches)
    if config.stash != "disk" and _count_events(profile) > MAX_EVENTS:  # reads of a file depend on every turn
        profile = profile.aggregated()
    if cluster.count == 1:
        slowed = _slow_down(profile, cluster.slowdown(0))
        backend = shelf or VirtualLocalBackend()
        relay = VirtualRelay(slowed, config, figures, backend, stash_store)
        return SimulatedStep(relay.run(_actions_of(profile, config, backend, stash_store)), {}, {})
    shards = shards_of_profile(profile, cluster.count) if shards is None else shards
    rendezvous, itemsize = VirtualRendezvous(), weight_itemsize(config.precision)
    exchanges = profile.micro_batches if cluster.per_micro_batch else 1
    backends: dict[int, VirtualDistributedBackend] = {}
    replays: dict[int, Callable[[], Trace]] = {}
    for rank in cluster.simulated_ranks:
        backends[rank] = VirtualDistributedBackend(cluster, rank, shards, itemsize, rendezvous, exchanges)
        slowed = _slow_down(_shard_profile(profile, shards, rank), cluster.slowdown(rank))
        both = {**figures, **cluster.figures()}
        relay = VirtualRelay(slowed, config, both, backends[rank], stash_store)
        replays[rank] = partial(relay.run, _actions_of(profile, config, backends[rank], stash_store))
    observed = backends[cluster.rank]
    trace = rendezvous.run(replays)[cluster.rank]
    return SimulatedStep(trace, observed.buffers, {name: observed.traffic[name] for name in ("gather", "reduce")})


def _simulate_plan(
    profile: Profile, config: RelayConfig, figures: Mapping[str, Any], cluster: Cluster, plan: StepPlan, on_disk: bool
) -> Trace:
    """Run a plan in place of the schedule."""
    check_plan(plan)
    settings = plan.settings
    differences = {
        "several workers": max(cluster.count, profile.settings.get("workers", 1)) > 1,
        "schedule='depth_first'": config.schedule == "depth_first",
        "a profile whose micro-batches are merged": any(turn.k < 0 for turn in profile.start),
        "weights or a stash on disk": on_disk or config.stash == "disk",
        f"stash={config.stash!r}, where the plan has offloads={settings.offloads}": settings.offloads
        != (config.stash != "device"),
        f"{settings.slots} slots, too few for the plan's ahead={settings.ahead}": settings.slots <= settings.ahead,
    }
    for difference, holds in differences.items():
        if holds:
            raise ValueError(
                f"a plan cannot be simulated with {difference}: start from relay.plan(batch), which fits its relay, or leave "
                "out the plan"
            )
    config = replace(
        config,
        ahead=settings.ahead,
        resident=settings.slots - settings.ahead - 1,
        keep=len({action.visit for action in plan.actions if action.kind == "F" and action.keep == "graph"}),
        micro_batches=settings.micro_batches,
    )
    _check_compatible(profile, config, cluster, keeps_alike=False)
    profile = profile.with_micro_batches(settings.micro_batches)
    costed, actions = cost_plan(_slow_down(profile, cluster.slowdown(0)), plan)
    return VirtualRelay(costed, config, figures, VirtualLocalBackend(), VirtualStashStore()).run(actions)


def _plan_of(profile: Profile, config: RelayConfig) -> StepPlan:
    """Return the plan of a step by a schedule of the user."""
    if isinstance(config.schedule, StepPlan):
        return config.schedule
    shape = StepShape.of(profile)
    assert isinstance(config.keep, int) and callable(config.schedule)
    settings = ScheduleSettings(
        micro_batches=config.micro_batches,
        ahead=config.ahead,
        slots=weight_slots(config.ahead, config.resident),
        kept_graphs=kept_layers(config.keep, config.ahead, config.resident),
        loss_per_micro_batch=shape.loss_per_micro_batch,
        offloads=config.stash != "device",
    )
    return StepPlan.of(config.schedule, settings, CostPlaces(shape).visits)


def _actions_of(
    profile: Profile, config: RelayConfig, backend: VirtualLocalBackend, stash_store: VirtualStashStore
) -> Sequence[CostedAction]:
    """Return the actions of the relay's own schedule."""
    shape, offloads = StepShape.of(profile), config.stash != "device"
    settings = ScheduleSettings(
        micro_batches=len(shape.start),
        ahead=config.ahead,
        slots=weight_slots(config.ahead, config.resident),
        loss_per_micro_batch=shape.loss_per_micro_batch,
        offloads=offloads,
        later_turns=stash_store.prefetch_turns if offloads and config.ahead else 0,
        announces_loads=backend.reads_ahead,
    )
    return actions_of_step(shape, settings, config.schedule == "depth_first")


def _check_compatible(profile: Profile, config: RelayConfig, cluster: Cluster, keeps_alike: bool = True) -> None:
    recorded, several = profile.settings, max(cluster.count, profile.settings.get("workers", 1)) > 1
    was, wanted = recorded.get("reduce", "sum"), cluster.reduce if cluster.count > 1 else "sum"
    if several and was != wanted:
        raise ValueError(
            f"the profile is of a step with reduce={was!r}, but reduce={wanted!r} sends other gradients (each micro-batch's or "
            f"their sum): record a step with Workers(reduce={wanted!r}), or rehearse one with relay.forecast(batch, "
            f"workers={cluster.count}, reduce={wanted!r})"
        )
    was = recorded.get("schedule", "breadth_first")
    if was != config.schedule or (was == "depth_first" and profile.micro_batches != config.micro_batches):
        raise ValueError(
            f"the profile is of {profile.micro_batches} micro-batches with schedule={was!r}, but {config.micro_batches} with "
            f"schedule={config.schedule!r} run in another order: record a step with these settings, or rehearse one with "
            "relay.forecast(batch, config)"
        )
    if several and config.schedule == "depth_first":
        raise ValueError(
            "schedule='depth_first' is not there for several workers, since it keeps all weights in one process's memory: "
            "leave schedule out of RelayConfig"
        )
    if several and recorded.get("keeps_dtypes"):
        raise ValueError(
            "the step has frozen parameters that keep their dtypes (a quantised base), which every worker holds whole; steps of "
            "several workers are simulated with shards of all parameters: leave workers= out, or make these parameters buffers "
            "(register_buffer) and record a step"
        )
    _check_fetches(profile, config)
    for name in ("precision", "stash"):
        was, wanted = recorded.get(name), getattr(config, name)
        if was is not None and was != wanted:
            raise ValueError(
                f"the profile is of a step with {name}={was!r}, but {name}={wanted!r} moves other bytes: record a step with "
                f"RelayConfig({name}={wanted!r}), or make the profile with it"
            )
    if several and config.wire is not None:
        raise ValueError(
            f"compress={config.compress!r} is not there for several workers: leave it out of RelayConfig, and use "
            "Workers(wire='bf16') to send fewer bits between workers"
        )
    was = Compress.of(recorded.get("compress"))
    if was != config.wire:
        raise ValueError(
            f"the profile is of a step with compress={was!r}, but compress={config.wire!r} pushes other bytes: record a step "
            f"with RelayConfig(compress={config.compress!r}), or rehearse one with relay.forecast(batch, config)"
        )
    if not keeps_alike:
        return
    layers = len(profile.layers) - 1  # without the shell
    was, wanted = kept_layer_count(recorded, layers), kept_layer_count(asdict(config), layers)
    if was != wanted:
        raise ValueError(
            f"the profile is of a step that kept the graphs of {was} layer(s), but these settings keep those of {wanted}, so "
            f"other layers are recomputed: record a step with RelayConfig(keep={config.keep}, resident={config.resident}, "
            f"ahead={config.ahead}), or rehearse one with relay.forecast(batch, config)"
        )


def _check_fetches(profile: Profile, config: RelayConfig) -> None:
    """Check that a step with these settings fetches as much of an offloaded stash as the profile's step.

    While copies overlap with compute, tensors leave the device during the next turn. With one or two micro-batches some are
    still there when they are needed again, so they are not fetched.
    """
    recorded, is_merged = profile.settings, any(turn.k < 0 for turn in profile.start)
    if config.stash == "device" or "ahead" not in recorded or "micro_batches" not in recorded:
        return
    was = recorded["micro_batches"], recorded["ahead"]
    wanted = was[0] if is_merged else config.micro_batches, config.ahead
    if _turns_between_uses(*was) != _turns_between_uses(*wanted):
        raise ValueError(
            f"the profile is of {was[0]} micro-batches with ahead={was[1]}, but {wanted[0]} with ahead={wanted[1]} fetch other "
            f"bytes of a stash={config.stash!r}: record a step with RelayConfig(micro_batches={wanted[0]}, ahead={wanted[1]}), "
            "or rehearse one with relay.forecast(batch, config). With 3 or more micro-batches all fetch the same"
        )


def _turns_between_uses(micro_batches: int, ahead: int) -> int:
    """Return the turns between two of a micro-batch that matter to its fetches: from 3 on, all is fetched."""
    return min(micro_batches, 3) if ahead else 3


def _make_stash_store(profile: Profile, config: RelayConfig, shelf: VirtualDiskBackend | None) -> VirtualStashStore:
    """Return the simulated stash store."""
    if config.stash != "disk":
        return VirtualStashStore()
    if shelf is None or any(turn.moves is None for turn in profile.turns):
        raise ValueError(
            "stash='disk' cannot be simulated from a profile, which lacks the speed of the shelf's disk and the storages of the "
            "stash: use relay.forecast or forecast_config, or stash='host', which moves the same bytes over the link"
        )
    return shelf.stash


def _single_worker_profile(profile: Profile) -> Profile:
    """Return costs with updates of whole blocks, for a profile of one of several workers."""
    count = profile.settings.get("workers", 1)
    if count == 1:
        return profile
    layers = {
        key: cost._replace(update_s=count * cost.update_s, block_bytes=cost.push_bytes)
        for key, cost in profile.layers.items()
    }
    closing = tuple(
        job._replace(seconds=count * job.seconds, nbytes=count * job.nbytes) if job.kind == "update" else job
        for job in profile.closing
    )
    return replace(profile, layers=layers, closing=closing, settings={**profile.settings, "workers": 1})


def _shard_profile(profile: Profile, shards: Mapping[str, Sequence[BlockShards]], rank: int) -> Profile:
    """Return costs with updates of a worker's shards."""
    blocks = {share.key: share for each in shards.values() for share in each}

    def job(whole: EPSJob) -> EPSJob:
        share = blocks.get(whole.layer)
        if share is None or whole.k >= 0:
            return whole
        seconds = whole.seconds * (share.update_share(rank) if whole.kind == "update" else 1.0)
        return whole._replace(seconds=seconds, nbytes=4 * share.gradient_numels[rank])

    def cost(key: str, whole: LayerCost) -> LayerCost:
        if (share := blocks.get(key)) is None:
            return whole
        seconds = whole.update_s * share.update_share(rank)
        return whole._replace(update_s=seconds, block_bytes=4 * share.gradient_numels[rank])

    layers = {key: cost(key, whole) for key, whole in profile.layers.items()}
    return replace(profile, layers=layers, closing=tuple(map(job, profile.closing)))


def _slow_down(profile: Profile, factor: float) -> Profile:
    """Return costs with compute and EPS slower by `factor`."""
    if factor == 1.0:
        return profile

    def op(one: ComputeOp) -> ComputeOp:
        parts = tuple(part._replace(reduce_s=factor * part.reduce_s) for part in one.gradient_parts)
        return one._replace(seconds=factor * one.seconds, overhead_s=factor * one.overhead_s, gradient_parts=parts)

    layers = {
        key: cost._replace(reduce_s=factor * cost.reduce_s, update_s=factor * cost.update_s)
        for key, cost in profile.layers.items()
    }
    return profile.map_turns(
        lambda _, turns: [turn._replace(ops=tuple(map(op, turn.ops))) for turn in turns],
        layers=layers,
        closing=tuple(job._replace(seconds=factor * job.seconds) for job in profile.closing),
    )


def _count_events(profile: Profile) -> int:
    """Estimate the number of events of a replay."""
    turns = [turn for stay in profile.stays for turn in stay.turns]
    settings = profile.settings
    pieces = chunks_per_copy(profile.micro_batches, settings.get("ahead", 1), settings.get("stash", "device"))
    return sum(len(turn.ops) + bool(turn.fetch_bytes) + bool(turn.stash_bytes) for turn in turns) + (
        (pieces + 2) * len(profile.stays)
    )
