"""A step that nobody has run: costs, settings, a link and workers, put together on a virtual clock.

`replay.py` is the schedule, `virtual_crew.py` what several workers do together; here it is checked whether costs and settings
belong together.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any, NamedTuple

from l2l_core.config import Compress, RelayConfig
from l2l_core.devices import Device
from l2l_core.rules import kept_of, pieces_of_copy, weight_itemsize
from l2l_core.simulator.costs import Job, Op
from l2l_core.simulator.fleet import Fleet, Share, shares_of_profile
from l2l_core.simulator.profile import Profile
from l2l_core.simulator.replay import Replay
from l2l_core.simulator.virtual_crew import Alone, Along, Meetings, Sent
from l2l_core.simulator.virtual_shelf import OnShelf
from l2l_core.simulator.virtual_stash import InMemory
from l2l_core.trace import Trace
from l2l_core.workers import Network

MOST_EVENTS = 20_000  # beyond, micro-batches of a stay are taken together


class Replayed(NamedTuple):
    """A step on a virtual clock.

    Attributes:
        trace: of the worker that is looked at.
        gathered: how many host buffers of so many elements it gathers layers into.
        sent: bytes between it and the others, by channel, "gather" for weights and "reduce" for gradients.
    """

    trace: Trace
    gathered: Mapping[int, int]
    sent: Mapping[str, Sent]


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
    fleet = Fleet(
        count=count,
        network=network or Network(),
        stragglers=stragglers or {},
        wire=wire,
        reduce=profile.settings.get("reduce", "sum") if reduce is None else reduce,
        rank=rank,
    )
    figures = device.figures() if isinstance(device, Device) else dict(device or {})
    return replayed(profile, config, figures, fleet).trace


def replayed(
    profile: Profile,
    config: RelayConfig,
    figures: Mapping[str, Any],
    fleet: Fleet,
    shares: Mapping[str, Sequence[Share]] | None = None,
    shelf: OnShelf | None = None,
) -> Replayed:
    """Replay a step; see `simulate`.

    Args:
        profile, config: as there.
        figures: of the link, as in `Device.figures`.
        fleet: of workers, perhaps of one.
        shares: what workers hold of each layer; None to cut as if a layer were one parameter.
        shelf: in whose files the weights and state of one worker are; None for memory.
    """
    config = config.over(len(profile.layers) - 1)
    room = _room(profile, config, shelf)
    _check(profile, config, fleet)
    profile = _of_one(profile).with_micro_batches(config.micro_batches)
    if config.stash != "disk" and _count_events(profile) > MOST_EVENTS:  # what a file reads depends on every turn
        profile = profile.aggregated()
    if fleet.count == 1:
        slowed = _slowed(profile, fleet.slowness(0))
        return Replayed(Replay(slowed, config, figures, shelf or Alone(), room).run(), {}, {})
    shares = shares_of_profile(profile, fleet.count) if shares is None else shares
    meetings, itemsize, figures = Meetings(), weight_itemsize(config.precision), {**figures, **fleet.figures()}
    rounds = profile.micro_batches if fleet.keeps_apart else 1
    along = {rank: Along(fleet, rank, shares, itemsize, meetings, rounds) for rank in fleet.seen}
    replays = {
        rank: Replay(_slowed(_parted(profile, shares, rank), fleet.slowness(rank)), config, figures, company).run
        for rank, company in along.items()
    }
    mine = along[fleet.rank]
    trace = meetings.run(replays)[fleet.rank]
    return Replayed(trace, mine.buffers, {channel: mine.sent[channel] for channel in ("gather", "reduce")})


def _check(profile: Profile, config: RelayConfig, fleet: Fleet) -> None:
    known, together = profile.settings.get("reduce", "sum"), max(fleet.count, profile.settings.get("workers", 1)) > 1
    asked = fleet.reduce if fleet.count > 1 else "sum"
    if together and known != asked:
        raise ValueError(
            f"the profile is of a step with reduce={known!r}, and reduce={asked!r} moves other gradients, each micro-batch's or "
            f"their sum: record a step with Workers(reduce={asked!r}), or rehearse one with relay.forecast(batch, "
            f"workers={fleet.count}, reduce={asked!r})"
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
    known, asked = kept_of(profile.settings, layers), kept_of(asdict(config), layers)
    if known != asked:
        raise ValueError(
            f"the profile is of a step that kept the graphs of {known} layer(s), and these settings keep those of {asked}, so "
            f"that others are recomputed: record a step with RelayConfig(keep={config.keep}, resident={config.resident}, "
            f"ahead={config.ahead}), or rehearse one with relay.forecast(batch, config)"
        )


def _room(profile: Profile, config: RelayConfig, shelf: OnShelf | None) -> InMemory:
    """Say where the stash waits."""
    if config.stash != "disk":
        return InMemory()
    if shelf is None or any(turn.moves is None for turn in profile.turns):
        raise ValueError(
            "stash='disk' is not replayed by itself: a profile has neither the shelf's disk nor the storages of a stash. Ask "
            "relay.forecast or forecast_config, or with stash='host', whose bytes over the link are the same"
        )
    return shelf.stash


def _of_one(profile: Profile) -> Profile:
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


def _parted(profile: Profile, shares: Mapping[str, Sequence[Share]], rank: int) -> Profile:
    """Let the EPS update a worker's part of every block."""
    blocks = {share.key: share for each in shares.values() for share in each}

    def job(one: Job) -> Job:
        share = blocks.get(one.layer)
        if share is None or one.k >= 0:
            return one
        seconds = one.seconds * (share.portion(rank) if one.kind == "update" else 1.0)
        return one._replace(seconds=seconds, nbytes=4 * share.gradient[rank])

    layers = {
        key: cost._replace(
            update_s=cost.update_s * blocks[key].portion(rank), block_bytes=4 * blocks[key].gradient[rank]
        )
        if key in blocks
        else cost
        for key, cost in profile.layers.items()
    }
    return replace(profile, layers=layers, closing=tuple(map(job, profile.closing)))


def _slowed(profile: Profile, factor: float) -> Profile:
    """Let compute and the EPS take so many times as long."""
    if factor == 1.0:
        return profile

    def op(one: Op) -> Op:
        parts = tuple(part._replace(reduce_s=factor * part.reduce_s) for part in one.parts)
        return one._replace(seconds=factor * one.seconds, overhead_s=factor * one.overhead_s, parts=parts)

    layers = {
        key: cost._replace(reduce_s=factor * cost.reduce_s, update_s=factor * cost.update_s)
        for key, cost in profile.layers.items()
    }
    return profile.with_turns(
        lambda _, turns: [turn._replace(ops=tuple(map(op, turn.ops))) for turn in turns],
        layers=layers,
        closing=tuple(job._replace(seconds=factor * job.seconds) for job in profile.closing),
    )


def _count_events(profile: Profile) -> int:
    """About how many events a replay has."""
    turns = [turn for stay in profile.stays for turn in stay.turns]
    settings = profile.settings
    pieces = pieces_of_copy(profile.micro_batches, settings.get("ahead", 1), settings.get("stash", "device"))
    return sum(len(turn.ops) + bool(turn.fetch_bytes) + bool(turn.stash_bytes) for turn in turns) + (
        (pieces + 2) * len(profile.stays)
    )
