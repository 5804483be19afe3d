"""The costs of a relay's step, measured: in its last step if that was of the same kind, else in a rehearsal."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from l2l_core.batches import shapes_of
from l2l_core.config import Compress, RelayConfig
from l2l_core.eps.blocks import Block
from l2l_core.forecast.block_inventory import Inventory
from l2l_core.forecast.cost_forecast import ForecastCosts
from l2l_core.forecast.profile_extrapolation import map_memory
from l2l_core.forecast.profile_interpolation import with_slots
from l2l_core.forecast.rehearsal import Rehearsal
from l2l_core.forecast.representatives import Representatives, choose_representatives, represent_each
from l2l_core.schedule_rules import kept_layer_count, weight_itemsize
from l2l_core.simulator import MemorySamples, Profile
from l2l_core.trace import Trace


def costs_of_rehearsal(
    rehearsal: Rehearsal, micro_batches: Sequence[Any], config: RelayConfig, max_passes: int | None = None
) -> ForecastCosts:
    """Take the costs from a rehearsal of a few of these micro-batches, which is timed at most `most_passes` times."""
    chosen, stands = _choose_representatives([shapes_of(micro_batch) for micro_batch in micro_batches], config)
    found = rehearsal.run([micro_batches[k] for k in chosen], config, max_passes)
    # All weights that the pass itself has booked: bfloat16 casts for a device that cannot cast on the way.
    wire_bytes = max(
        (held.get("weights", 0) for place, held in _all_samples(found.profile) if place == "host"), default=0
    )
    host = {**_fixed_host_bytes(rehearsal), "optimizer": found.inventory.state_bytes}
    host["weights"] = host.get("weights", 0) + wire_bytes
    how = f"{len(chosen)} of {len(stands)} micro-batches" if len(chosen) < len(stands) else "all micro-batches"
    basis = f"a rehearsal of {how}, timed {found.passes} time(s), in {found.seconds:.2g} s"
    return _make_costs(rehearsal, found.profile, stands, found.overhead_s, host, basis, wire_bytes, found.inventory)


def costs_of_step(
    rehearsal: Rehearsal, trace: Trace, recorded: Sequence[Any], requested: Sequence[Any], config: RelayConfig
) -> ForecastCosts | None:
    """Take the costs from the last step; None if it was of another kind.

    Args:
        rehearsal: whose parts they are.
        trace: of the step.
        recorded, asked: forms of its micro-batches, and of those to forecast.
        config: to forecast.
    """
    known, others = _choose_representatives(recorded, config), _choose_representatives(requested, config)
    was, depth = trace.settings, len(rehearsal.parts.layers)
    same = ("schedule", "stash", "precision", "update", "max_grad_norm", "rollback", "meter")
    if (
        [recorded[k] for k in known.chosen] != [requested[k] for k in others.chosen]
        or any(was.get(name) != getattr(config, name) for name in same)
        or Compress.of(was.get("compress")) != config.wire
        # one without overlap has other rings and buffers; that there are further slots is reckoned below
        or (was["ahead"] > 0) != (config.ahead > 0)
        or kept_layer_count(was, depth) != kept_layer_count(asdict(config), depth)
        # a step that was metered took longer, as the first of a shape does
        or was.get("metered") != (config.meter == "always")
        # traces have the sums of what moves, and a file needs to know the storages
        or config.stash == "disk"
    ):
        return None
    stands = (
        [known.chosen[position] for position in others.positions]
        if list(recorded) != list(requested)
        else range(len(requested))
    )
    profile = with_slots(Profile.of(trace), config, slot_bytes(rehearsal, config))
    # No trace tells what came after its last event.
    around_s = min((event.start_s for event in trace.events), default=0.0)
    store = rehearsal.store
    holdings = Inventory.of(rehearsal.parts.units, store.updater, store.masters.findings.elementwise)
    basis = f"step {trace.step}, measured"
    return _make_costs(rehearsal, profile, stands, around_s, _fixed_host_bytes(rehearsal), basis, 0, holdings)


def _choose_representatives(shapes: Sequence[Any], config: RelayConfig) -> Representatives:
    """Say by which of its micro-batches a step is known. Where one comes after another, what repeats are no turns of a stay."""
    return choose_representatives(shapes) if config.schedule == "breadth_first" else represent_each(len(shapes))


def slot_bytes(rehearsal: Rehearsal, config: RelayConfig) -> int:
    """Return the bytes of a slot for weights on the device: of the largest layer."""
    return weight_itemsize(config.precision) * rehearsal.parts.slot_numel


def _fixed_host_bytes(rehearsal: Rehearsal) -> dict[str, int]:
    """Host bytes that are there whatever the step."""
    held = rehearsal.parts.host.by_category()
    return {name: n for name, n in held.items() if name not in ("gradients", "stash")}


def _make_costs(
    rehearsal: Rehearsal,
    profile: Profile,
    representatives: Sequence[int],
    overhead_s: float,
    host_bytes: Mapping[str, int],
    basis: str,
    wire_bytes: int,
    inventory: Inventory,
) -> ForecastCosts:
    weights, trained = _master_bytes(dict.fromkeys(b for unit in rehearsal.parts.units for b in unit.blocks))
    wire = wire_bytes / weights if weights else 0.0  # per byte of a master
    state = host_bytes.get("optimizer", 0) / trained if trained else 0.0  # per byte of one that is trained
    own = {u.key: _master_bytes(b for b in u.blocks if not b.shared) for u in rehearsal.parts.layers}
    return ForecastCosts(
        profile=map_memory(profile, _only_host_stash),
        representatives=list(representatives),
        overhead_s=overhead_s,
        host_bytes={name: n for name, n in host_bytes.items() if n},
        pooled_bytes=rehearsal.parts.host.by_category().get("gradients", 0),
        layer_host_bytes={key: round(n * (1 + wire) + learns * state) for key, (n, learns) in own.items()},
        basis=basis,
        inventory=inventory,
    )


def _master_bytes(blocks: Iterable[Block]) -> tuple[int, int]:
    """Bytes of masters, and of those among them that are trained."""
    each = [(block.nbytes, 4 * block.trained.numel) for block in blocks]
    return sum(nbytes for nbytes, _ in each), sum(trained for _, trained in each)


def _all_samples(profile: Profile) -> list[tuple[str, Mapping[str, int]]]:
    return [*profile.memory, *(sample for turn in profile.turns for op in turn.ops for sample in op.memory)]


def _only_host_stash(memory: MemorySamples) -> MemorySamples:
    """Samples with nothing but the stash on the host."""
    return tuple(
        (place, held if place == "device" else {name: n for name, n in held.items() if name == "stash"})
        for place, held in memory
    )
