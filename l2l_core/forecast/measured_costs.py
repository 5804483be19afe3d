"""The costs of a relay's step, measured: in its last step if that was of the same kind, else in a rehearsal."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from l2l_core.batches import form_of
from l2l_core.config import Compress, RelayConfig
from l2l_core.eps.blocks import Block
from l2l_core.forecast.from_costs import Costs
from l2l_core.forecast.holdings import Holdings
from l2l_core.forecast.mixture import with_slots
from l2l_core.forecast.rehearsal import Rehearsal
from l2l_core.forecast.stands import Representatives, each_for_itself, representatives
from l2l_core.forecast.stretch import with_memory
from l2l_core.rules import kept_of, weight_itemsize
from l2l_core.simulator import Memory, Profile
from l2l_core.trace import Trace


def costs_of_rehearsal(
    rehearsal: Rehearsal, micro_batches: Sequence[Any], config: RelayConfig, most_passes: int | None = None
) -> Costs:
    """Take the costs from a rehearsal of a few of these micro-batches, which is timed at most `most_passes` times."""
    chosen, stands = _known_by([form_of(micro_batch) for micro_batch in micro_batches], config)
    found = rehearsal.run([micro_batches[k] for k in chosen], config, most_passes)
    # All weights that the pass itself has booked: bfloat16 casts for a device that cannot cast on the way.
    wire_bytes = max((held.get("weights", 0) for place, held in _samples(found.profile) if place == "host"), default=0)
    host = {**_standing(rehearsal), "optimizer": found.holdings.state_bytes}
    host["weights"] = host.get("weights", 0) + wire_bytes
    how = f"{len(chosen)} of {len(stands)} micro-batches" if len(chosen) < len(stands) else "all micro-batches"
    basis = f"a rehearsal of {how}, timed {found.passes} time(s), in {found.seconds:.2g} s"
    return _costs(rehearsal, found.profile, stands, found.around_s, host, basis, wire_bytes, found.holdings)


def costs_of_step(
    rehearsal: Rehearsal, trace: Trace, recorded: Sequence[Any], asked: Sequence[Any], config: RelayConfig
) -> Costs | None:
    """Take the costs from the last step; None if it was of another kind.

    Args:
        rehearsal: whose parts they are.
        trace: of the step.
        recorded, asked: forms of its micro-batches, and of those to forecast.
        config: to forecast.
    """
    known, others = _known_by(recorded, config), _known_by(asked, config)
    was, depth = trace.settings, len(rehearsal.parts.layers)
    same = ("schedule", "stash", "precision", "update", "max_grad_norm", "rollback", "meter")
    if (
        [recorded[k] for k in known.chosen] != [asked[k] for k in others.chosen]
        or any(was.get(name) != getattr(config, name) for name in same)
        or Compress.of(was.get("compress")) != config.wire
        # one without overlap has other rings and buffers; that there are further slots is reckoned below
        or (was["ahead"] > 0) != (config.ahead > 0)
        or kept_of(was, depth) != kept_of(asdict(config), depth)
        # a step that was metered took longer, as the first of a shape does
        or was.get("metered") != (config.meter == "always")
        # traces have the sums of what moves, and a file needs to know the storages
        or config.stash == "disk"
    ):
        return None
    stands = (
        [known.chosen[position] for position in others.stands] if list(recorded) != list(asked) else range(len(asked))
    )
    profile = with_slots(Profile.of(trace), config, slot_bytes(rehearsal, config))
    # No trace tells what came after its last event.
    around_s = min((event.start_s for event in trace.events), default=0.0)
    store = rehearsal.store
    holdings = Holdings.of(rehearsal.parts.units, store.update, store.masters.findings.elementwise)
    basis = f"step {trace.step}, measured"
    return _costs(rehearsal, profile, stands, around_s, _standing(rehearsal), basis, 0, holdings)


def _known_by(forms: Sequence[Any], config: RelayConfig) -> Representatives:
    """Say by which of its micro-batches a step is known. Where one comes after another, what repeats are no turns of a stay."""
    return representatives(forms) if config.schedule == "breadth_first" else each_for_itself(len(forms))


def slot_bytes(rehearsal: Rehearsal, config: RelayConfig) -> int:
    """Return the bytes of a slot for weights on the device: of the largest layer."""
    return weight_itemsize(config.precision) * rehearsal.parts.slot_numel


def _standing(rehearsal: Rehearsal) -> dict[str, int]:
    """Host bytes that are there whatever the step."""
    held = rehearsal.parts.host.by_category()
    return {name: n for name, n in held.items() if name not in ("gradients", "stash")}


def _costs(
    rehearsal: Rehearsal,
    profile: Profile,
    stands: Sequence[int],
    around_s: float,
    host: Mapping[str, int],
    basis: str,
    wire_bytes: int,
    holdings: Holdings,
) -> Costs:
    weights, trained = _weights_of(dict.fromkeys(b for unit in rehearsal.parts.units for b in unit.blocks))
    wire = wire_bytes / weights if weights else 0.0  # per byte of a master
    state = host.get("optimizer", 0) / trained if trained else 0.0  # per byte of one that is trained
    own = {u.key: _weights_of(b for b in u.blocks if not b.shared) for u in rehearsal.parts.layers}
    return Costs(
        profile=with_memory(profile, _stash_alone),
        stands=list(stands),
        around_s=around_s,
        host={name: n for name, n in host.items() if n},
        pooled_bytes=rehearsal.parts.host.by_category().get("gradients", 0),
        layer_host_bytes={key: round(n * (1 + wire) + learns * state) for key, (n, learns) in own.items()},
        basis=basis,
        holdings=holdings,
    )


def _weights_of(blocks: Iterable[Block]) -> tuple[int, int]:
    """Bytes of masters, and of those among them that are trained."""
    each = [(block.nbytes, 4 * block.trained.numel) for block in blocks]
    return sum(nbytes for nbytes, _ in each), sum(trained for _, trained in each)


def _samples(profile: Profile) -> list[tuple[str, Mapping[str, int]]]:
    return [*profile.memory, *(sample for turn in profile.turns for op in turn.ops for sample in op.memory)]


def _stash_alone(memory: Memory) -> Memory:
    """Samples with nothing but the stash on the host."""
    return tuple(
        (place, held if place == "device" else {name: n for name, n in held.items() if name == "stash"})
        for place, held in memory
    )
