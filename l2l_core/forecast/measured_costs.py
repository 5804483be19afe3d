"""Measured costs of a relay's step, from its last step if that was alike, else from a rehearsal."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict
from typing import Any

from l2l_core.batches import shapes_of
from l2l_core.config import Compress, RelayConfig
from l2l_core.eps.blocks import Block
from l2l_core.forecast.block_inventory import Inventory
from l2l_core.forecast.cost_forecast import ForecastCosts
from l2l_core.forecast.profile_transforms import with_slots
from l2l_core.forecast.rehearsal import Rehearsal
from l2l_core.forecast.representatives import Representatives, choose_representatives
from l2l_core.schedule_rules import kept_layer_count
from l2l_core.simulator import MemorySamples, Profile
from l2l_core.step import WEIGHT_DTYPES
from l2l_core.trace import Trace

_SAME_SETTINGS = ("schedule", "stash", "precision", "update", "max_grad_norm", "rollback", "meter")


def costs_of_rehearsal(
    rehearsal: Rehearsal, micro_batches: Sequence[Any], config: RelayConfig, max_passes: int | None = None
) -> ForecastCosts:
    """Measure costs by rehearsing a few of these micro-batches, with at most `max_passes` timed passes."""
    shapes = [shapes_of(micro_batch) for micro_batch in micro_batches]
    chosen, positions = _choose_representatives(rehearsal, shapes, config)
    found = rehearsal.run([micro_batches[k] for k in chosen], config, max_passes)
    # Weights in the pass's own host samples are bfloat16 casts for a device that cannot cast.
    ops = [op for turn in found.profile.turns for op in turn.ops]
    samples = [*found.profile.memory, *(sample for op in ops for sample in op.memory)]
    wire_bytes = max((held.get("weights", 0) for place, held in samples if place == "host"), default=0)
    part = f"{len(chosen)} of {len(positions)} micro-batches" if len(chosen) < len(positions) else "all micro-batches"
    basis = f"a rehearsal of {part}, timed {found.passes} time(s), in {found.seconds:.2g} s"
    return _make_costs(rehearsal, found.profile, positions, found.overhead_s, basis, found.inventory, wire_bytes)


def costs_of_step(
    rehearsal: Rehearsal, trace: Trace, recorded: Sequence[Any], requested: Sequence[Any], config: RelayConfig
) -> ForecastCosts | None:
    """Return costs from the trace of the last step; None if it was of another kind than one with `config`.

    `recorded` and `requested` are the shapes of its micro-batches, and of those to forecast.
    """
    old, new = (_choose_representatives(rehearsal, shapes, config) for shapes in (recorded, requested))
    was, depth = trace.settings, len(rehearsal.parts.layers)
    if (
        [recorded[k] for k in old.chosen] != [requested[k] for k in new.chosen]
        or any(was.get(name) != getattr(config, name) for name in _SAME_SETTINGS)
        or Compress.of(was.get("compress")) != config.wire
        # Overlap changes rings and buffers; the number of slots is adjusted below.
        or (was["ahead"] > 0) != (config.ahead > 0)
        or kept_layer_count(was, depth) != kept_layer_count(asdict(config), depth)
        # A metered step takes longer.
        or was.get("metered") != (config.meter == "always")
        # A trace has sums of bytes, and a file needs the storages.
        or config.stash == "disk"
    ):
        return None
    representatives = [old.chosen[position] for position in new.positions]
    if list(recorded) == list(requested):
        representatives = list(range(len(requested)))
    profile = with_slots(Profile.of(trace), config, slot_bytes(rehearsal, config))
    # The trace does not contain the time after its last event.
    overhead_s = min((event.start_s for event in trace.events), default=0.0)
    store = rehearsal.store
    inventory = Inventory.of(rehearsal.parts.units, store.updater, store.masters.findings.elementwise)
    return _make_costs(rehearsal, profile, representatives, overhead_s, f"step {trace.step + 1}, measured", inventory)


def _choose_representatives(rehearsal: Rehearsal, shapes: Sequence[Any], config: RelayConfig) -> Representatives:
    """Choose micro-batches to measure: all of them depth first, where no turns repeat, or with a loss of the batch."""
    if config.schedule == "breadth_first" and rehearsal.batch_loss is None:
        return choose_representatives(shapes)
    every = list(range(len(shapes)))
    return Representatives(every, every)


def slot_bytes(rehearsal: Rehearsal, config: RelayConfig) -> int:
    """Return the bytes of a weight slot on the device, which fits the largest layer."""
    return rehearsal.parts.slot_bytes(WEIGHT_DTYPES[config.precision])


def _make_costs(
    rehearsal: Rehearsal,
    profile: Profile,
    representatives: list[int],
    overhead_s: float,
    basis: str,
    inventory: Inventory,
    wire_bytes: int | None = None,
) -> ForecastCosts:
    """Return costs with the host bytes of the relay now, or after a rehearsed step with `wire_bytes` of casts."""
    held = rehearsal.parts.host.by_category()
    host = {name: n for name, n in held.items() if name not in ("gradients", "stash")}
    if wire_bytes is not None:
        host |= {"optimizer": inventory.state_bytes, "weights": host.get("weights", 0) + wire_bytes}
    _, weights, trained = _master_bytes(dict.fromkeys(b for unit in rehearsal.parts.units for b in unit.blocks))
    wire = (wire_bytes or 0) / weights if weights else 0.0  # per byte of a master that may be cast
    state = host.get("optimizer", 0) / trained if trained else 0.0  # per byte of a trained master
    own = {u.key: _master_bytes(b for b in u.blocks if not b.shared) for u in rehearsal.parts.layers}
    return ForecastCosts(
        profile=profile.map_memory(_only_host_stash),
        representatives=representatives,
        overhead_s=overhead_s,
        host_bytes={name: n for name, n in host.items() if n},
        pooled_bytes=held.get("gradients", 0),
        layer_host_bytes={key: round(n + cast * wire + learned * state) for key, (n, cast, learned) in own.items()},
        basis=basis,
        inventory=inventory,
    )


def _master_bytes(blocks: Iterable[Block]) -> tuple[int, int, int]:
    """Return the bytes of masters, of those that may be cast, and of the trained ones."""
    blocks = list(blocks)
    casts = sum(block.nbytes for block in blocks if not block.in_bytes)
    return sum(block.nbytes for block in blocks), casts, sum(4 * block.trained.numel for block in blocks)


def _only_host_stash(memory: MemorySamples) -> MemorySamples:
    """Remove all host categories but the stash."""
    return tuple(
        (place, held if place == "device" else {name: n for name, n in held.items() if name == "stash"})
        for place, held in memory
    )
