"""A step that nobody has run: costs, settings, a link and workers, put together on a virtual clock.

`virtual_relay.py` is the schedule, `virtual_workers.py` what several workers do together; here it is checked whether costs and settings
belong together.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any, NamedTuple

from l2l_core.config import Compress, RelayConfig
from l2l_core.devices import Device
from l2l_core.schedule_rules import chunks_per_copy, kept_layer_count, weight_itemsize
from l2l_core.simulator.cluster import BlockShards, Cluster, shards_of_profile
from l2l_core.simulator.profile import Profile
from l2l_core.simulator.step_costs import ComputeOp, EPSJob
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

MAX_EVENTS = 20_000  # beyond, micro-batches of a stay are taken together


class SimulatedStep(NamedTuple):
    """A step on a virtual clock.

    Attributes:
        trace: of the worker that is looked at.
        gathered: how many host buffers of so many elements it gathers layers into.
        sent: bytes between it and the others, by channel, "gather" for weights and "reduce" for gradients.
    """

    trace: Trace
    gather_buffers: Mapping[int, int]
    traffic: Mapping[str, TrafficTotal]


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
) -> Trace:
    """Replay a step with these costs on a virtual clock.

    Args:
        profile: costs, recorded or by formula.
        config: how the relay runs. With another number of micro-batches than the profile's, the profile's are repeated or
            left out, so the batch grows or shrinks.
        device: whose link to assume: an `EmulatedDevice`, or figures ("h2d_bytes_per_s", "d2h_bytes_per_s",
            "latency_s"). What is None or missing runs at the speed that the profile has.
        workers: how many train together, each on a batch like the profile's; default those of the profile.
        network: between them; default one that costs no time.
        stragglers: by rank, how many times as long as the profile's its compute and its EPS take.
        wire: type in which they send gradients, as of `Workers`.
        reduce: what they send of these, as of `Workers`; default what the profile has, "sum" where it is of one worker.
        rank: of the worker whose trace is returned.

    Returns:
        A trace on a virtual clock that starts at 0. With more than 20,000 events, a stay's micro-batches count as one.

    Raises:
        ValueError, TypeError: the profile was made for another precision, stash place or `reduce`, so its bytes do not apply; or
            a figure is out of range.
    """
    count = profile.settings.get("workers", 1) if workers is None else workers
    fleet = Cluster(
        count=count,
        network=network or Network(),
        stragglers=stragglers or {},
        wire=wire,
        reduce=profile.settings.get("reduce", "sum") if reduce is None else reduce,
        rank=rank,
    )
    figures = device.figures() if isinstance(device, Device) else dict(device or {})
    return simulate_step(profile, config, figures, fleet).trace


def simulate_step(
    profile: Profile,
    config: RelayConfig,
    figures: Mapping[str, Any],
    cluster: Cluster,
    shards: Mapping[str, Sequence[BlockShards]] | None = None,
    shelf: VirtualDiskBackend | None = None,
) -> SimulatedStep:
    """Replay a step; see `simulate`.

    Args:
        profile, config: as there.
        figures: of the link, as in `Device.figures`.
        fleet: of workers, perhaps of one.
        shares: what workers hold of each layer; None to cut as if a layer were one parameter.
        shelf: in whose files the weights and state of one worker are; None for memory.
    """
    config = config.for_layers(len(profile.layers) - 1)
    room = _make_stash_store(profile, config, shelf)
    _check_compatible(profile, config, cluster)
    profile = _single_worker_profile(profile).with_micro_batches(config.micro_batches)
    if config.stash != "disk" and _count_events(profile) > MAX_EVENTS:  # what a file reads depends on every turn
        profile = profile.aggregated()
    if cluster.count == 1:
        slowed = _slow_down(profile, cluster.slowdown(0))
        return SimulatedStep(VirtualRelay(slowed, config, figures, shelf or VirtualLocalBackend(), room).run(), {}, {})
    shards = shards_of_profile(profile, cluster.count) if shards is None else shards
    meetings, itemsize, figures = (
        VirtualRendezvous(),
        weight_itemsize(config.precision),
        {**figures, **cluster.figures()},
    )
    rounds = profile.micro_batches if cluster.per_micro_batch else 1
    along = {
        rank: VirtualDistributedBackend(cluster, rank, shards, itemsize, meetings, rounds)
        for rank in cluster.simulated_ranks
    }
    replays = {
        rank: VirtualRelay(
            _slow_down(_shard_profile(profile, shards, rank), cluster.slowdown(rank)), config, figures, company
        ).run
        for rank, company in along.items()
    }
    mine = along[cluster.rank]
    trace = meetings.run(replays)[cluster.rank]
    return SimulatedStep(trace, mine.buffers, {channel: mine.traffic[channel] for channel in ("gather", "reduce")})


def _check_compatible(profile: Profile, config: RelayConfig, cluster: Cluster) -> None:
    known, together = profile.settings.get("reduce", "sum"), max(cluster.count, profile.settings.get("workers", 1)) > 1
    asked = cluster.reduce if cluster.count > 1 else "sum"
    if together and known != asked:
        raise ValueError(
            f"the profile is of a step with reduce={known!r}, and reduce={asked!r} moves other gradients, each micro-batch's or "
            f"their sum: record a step with Workers(reduce={asked!r}), or rehearse one with relay.forecast(batch, "
            f"workers={cluster.count}, reduce={asked!r})"
        )
    known = profile.settings.get("schedule", "breadth_first")
    if known != config.schedule or (known == "depth_first" and profile.micro_batches != config.micro_batches):
        raise ValueError(
            f"the profile is of {profile.micro_batches} micro-batches with schedule={known!r}, and {config.micro_batches} with "
            f"schedule={config.schedule!r} take turns otherwise: record a step with these settings, or rehearse one with "
            "relay.forecast(batch, config)"
        )
    if together and config.schedule == "depth_first":
        raise ValueError(
            "schedule='depth_first' is not there for several workers: weights that are not all in one process's memory come and "
            "go. Leave schedule out of RelayConfig"
        )
    for name in ("precision", "stash"):
        known, asked = profile.settings.get(name), getattr(config, name)
        if known is not None and known != asked:
            raise ValueError(
                f"the profile is of a step with {name}={known!r}, and {name}={asked!r} moves other bytes: record a step with "
                f"RelayConfig({name}={asked!r}), or make the profile with it"
            )
    if together and config.wire is not None:
        raise ValueError(
            f"compress={config.compress!r} is not there for several workers: leave it out of RelayConfig. They send fewer bits "
            "to one another by wire='bf16'"
        )
    was = Compress.of(profile.settings.get("compress"))
    if was != config.wire:
        raise ValueError(
            f"the profile is of a step with compress={was!r}, and compress={config.wire!r} pushes other bytes: record a step "
            f"with RelayConfig(compress={config.compress!r}), or rehearse one with relay.forecast(batch, config)"
        )
    layers = len(profile.layers) - 1  # besides the shell
    known, asked = kept_layer_count(profile.settings, layers), kept_layer_count(asdict(config), layers)
    if known != asked:
        raise ValueError(
            f"the profile is of a step that kept the graphs of {known} layer(s), and these settings keep those of {asked}, so "
            f"that others are recomputed: record a step with RelayConfig(keep={config.keep}, resident={config.resident}, "
            f"ahead={config.ahead}), or rehearse one with relay.forecast(batch, config)"
        )


def _make_stash_store(profile: Profile, config: RelayConfig, shelf: VirtualDiskBackend | None) -> VirtualStashStore:
    """Say where the stash waits."""
    if config.stash != "disk":
        return VirtualStashStore()
    if shelf is None or any(turn.moves is None for turn in profile.turns):
        raise ValueError(
            "stash='disk' is not replayed by itself: a profile has neither the shelf's disk nor the storages of a stash. Ask "
            "relay.forecast or forecast_config, or with stash='host', whose bytes over the link are the same"
        )
    return shelf.stash


def _single_worker_profile(profile: Profile) -> Profile:
    """Let the EPS update all of every block, where the profile is of one of several workers."""
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
    """Let the EPS update a worker's part of every block."""
    blocks = {share.key: share for each in shards.values() for share in each}

    def job(one: EPSJob) -> EPSJob:
        share = blocks.get(one.layer)
        if share is None or one.k >= 0:
            return one
        seconds = one.seconds * (share.update_share(rank) if one.kind == "update" else 1.0)
        return one._replace(seconds=seconds, nbytes=4 * share.gradient_numels[rank])

    layers = {
        key: cost._replace(
            update_s=cost.update_s * blocks[key].update_share(rank), block_bytes=4 * blocks[key].gradient_numels[rank]
        )
        if key in blocks
        else cost
        for key, cost in profile.layers.items()
    }
    return replace(profile, layers=layers, closing=tuple(map(job, profile.closing)))


def _slow_down(profile: Profile, factor: float) -> Profile:
    """Let compute and the EPS take so many times as long."""
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
    """About how many events a replay has."""
    turns = [turn for stay in profile.stays for turn in stay.turns]
    settings = profile.settings
    pieces = chunks_per_copy(profile.micro_batches, settings.get("ahead", 1), settings.get("stash", "device"))
    return sum(len(turn.ops) + bool(turn.fetch_bytes) + bool(turn.stash_bytes) for turn in turns) + (
        (pieces + 2) * len(profile.stays)
    )
