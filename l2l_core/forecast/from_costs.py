"""From costs to a forecast. The costs are measured: those of the last step where it was of the same kind, else of a rehearsal.

The schedule is `simulate`'s. What it is not: a second model of the relay.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

from l2l_core.batches import Batch, form_of, split
from l2l_core.config import RelayConfig
from l2l_core.devices import Device, EmulatedDevice
from l2l_core.eps.blocks import Block
from l2l_core.forecast.costs import COPY_LANES, Memory
from l2l_core.forecast.forecast import Forecast
from l2l_core.forecast.gradient_buffers import gradient_buffer_bytes
from l2l_core.forecast.limits import Budgets, hiding_micro_batches, largest_depth
from l2l_core.forecast.profile import Profile
from l2l_core.forecast.rehearsal import Rehearsal
from l2l_core.forecast.replay import simulate
from l2l_core.forecast.stands import representatives
from l2l_core.forecast.stretch import stretch, with_memory
from l2l_core.rules import weight_itemsize
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
    """

    profile: Profile
    stands: Sequence[int]
    around_s: float
    host: Mapping[str, int]
    pooled_bytes: int
    layer_host_bytes: Mapping[str, int]
    basis: str


def costs_of_rehearsal(rehearsal: Rehearsal, micro_batches: Sequence[Any], config: RelayConfig) -> Costs:
    """Costs from a rehearsal of at most a few of these micro-batches."""
    chosen, stands = representatives([form_of(micro_batch) for micro_batch in micro_batches])
    found = rehearsal.run([micro_batches[k] for k in chosen], config)
    wire_bytes = max((held.get("weights", 0) for place, held in _samples(found.profile) if place == "host"), default=0)
    host = {**_standing(rehearsal), "optimizer": found.state_bytes}
    host["weights"] = host.get("weights", 0) + wire_bytes
    how = f"{len(chosen)} of {len(stands)} micro-batches" if len(chosen) < len(stands) else "all micro-batches"
    basis = f"a rehearsal of {how}, timed {found.passes} time(s), in {found.seconds:.2g} s"
    return _costs(rehearsal, found.profile, stands, found.around_s, host, basis, wire_bytes)


def costs_of_step(
    rehearsal: Rehearsal, trace: Trace, recorded: Sequence[Any], asked: Sequence[Any], config: RelayConfig
) -> Costs | None:
    """Costs from the last step; None if it was of another kind.

    Args:
        rehearsal: whose parts they are.
        trace: of the step.
        recorded, asked: forms of its micro-batches, and of those to forecast.
        config: to forecast.
    """
    known, others = representatives(recorded), representatives(asked)
    was = trace.settings
    same = ("stash", "precision", "update", "max_grad_norm", "rollback", "meter")
    if (
        [recorded[k] for k in known[0]] != [asked[k] for k in others[0]]
        or any(was.get(name) != getattr(config, name) for name in same)
        or (was["ahead"] > 0) != (config.ahead > 0)
        or was.get("metered") != (config.meter == "always")
    ):
        return None
    stands = [known[0][position] for position in others[1]] if list(recorded) != list(asked) else range(len(asked))
    profile = Profile.of(trace)
    slot_bytes = weight_itemsize(config.precision) * rehearsal.parts.slot_numel
    profile = with_memory(profile, partial(_with_more_slots, (config.ahead - was["ahead"]) * slot_bytes))
    around_s = min((event.start_s for event in trace.events), default=0.0)
    return _costs(rehearsal, profile, stands, around_s, _standing(rehearsal), f"step {trace.step}, measured", 0)


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
    )


def _weights_of(blocks: Iterable[Block]) -> tuple[int, int]:
    """Bytes of masters, and of those among them that are trained."""
    each = [(block.nbytes, 4 * block.trained.numel) for block in blocks]
    return sum(nbytes for nbytes, _ in each), sum(trained for _, trained in each)


def forecast_costs(
    costs: Costs, config: RelayConfig, figures: Mapping[str, Any], host_limit_bytes: int | None = None
) -> Forecast:
    """The forecast from costs.

    Args:
        costs: measured, or by formula.
        config: of the step; its number of micro-batches is that of `costs.stands`.
        figures: of the device, as in `Device.figures`.
        host_limit_bytes: what the host has; None for no limit.
    """
    profile = stretch(costs.profile, costs.stands)
    trace = simulate(profile, config, figures)
    gradients = max(gradient_buffer_bytes(profile, trace), costs.pooled_bytes)
    trace = _with_host(trace, {**costs.host, "gradients": gradients})
    memory_bytes = figures.get("memory_bytes")
    standing = sum(costs.host.values()) + gradients
    budgets = Budgets(memory_bytes, host_limit_bytes, standing, _layer_bytes(costs, config))
    return Forecast(
        seconds=trace.span_s + costs.around_s,
        trace=trace,
        hiding_micro_batches=hiding_micro_batches(costs.profile, config, figures),
        largest_depth=largest_depth(costs.profile, costs.stands, budgets),
        config=config,
        basis=f"{costs.basis}; {_link_words(figures)}",
        memory_bytes=memory_bytes,
        host_limit_bytes=host_limit_bytes,
    )


def _layer_bytes(costs: Costs, config: RelayConfig) -> dict[str, int]:
    """What each layer keeps on the host: deferred updates keep its gradient as well."""
    kept = {key: layer.push_bytes for key, layer in costs.profile.layers.items()} if config.update == "deferred" else {}
    return {key: nbytes + kept.get(key, 0) for key, nbytes in costs.layer_host_bytes.items()}


def _link_words(figures: Mapping[str, Any]) -> str:
    speeds = [(lane, figures.get(f"{lane}_bytes_per_s")) for lane in COPY_LANES]
    words = [f"{lane} {format_bytes(speed)}/s" if speed else f"{lane} as measured" for lane, speed in speeds]
    return "link: " + ", ".join(words)


@dataclass(frozen=True, slots=True)
class LastStep:
    """What a relay knows of the step that it made last.

    Attributes:
        trace: of the last step or attempt, if there was any.
        number: of the last finished step.
        shape: settings, shapes of tensors, mode and layers that its course depended on, if that is known.
        now: the same for an empty batch, as things stand.
    """

    trace: Trace | None
    number: int
    shape: Any
    now: Any

    def forms(self) -> list[Any] | None:
        """Shapes of its micro-batches; None if it failed, or the model, its layers or settings are others now."""
        if self.trace is None or self.shape is None or self.trace.step != self.number:
            return None
        config, forms, *model = self.shape
        if model != list(self.now[2:]) or any(
            self.trace.settings.get(n) != v for n, v in asdict(config).items() if n != "seed"
        ):
            return None
        return list(forms)


def forecast_step(
    rehearsal: Rehearsal,
    batch: Batch,
    config: RelayConfig,
    device: Device | Mapping[str, Any],
    host_limit_bytes: int | None,
    last: LastStep,
) -> Forecast:
    """The forecast of a relay's step: from its last one if that was of the same kind, else from a rehearsal.

    Arguments and errors are those of `Relay.forecast`; `rehearsal` has the relay's parts.
    """
    if not isinstance(config, RelayConfig):
        raise TypeError(f"config={config!r}: give a RelayConfig, or None for the relay's own")
    if host_limit_bytes is not None and not host_limit_bytes > 0:
        raise ValueError(f"host_bytes={host_limit_bytes!r}: must be positive, or None for no limit")
    figures = _figures_of(device)
    micro_batches = split(batch, config.micro_batches)
    costs, recorded = None, last.forms()
    if recorded is not None and last.trace is not None and not _is_faster(figures, last.trace.settings):
        costs = costs_of_step(rehearsal, last.trace, recorded, [form_of(each) for each in micro_batches], config)
    costs = costs or costs_of_rehearsal(rehearsal, micro_batches, config)
    return forecast_costs(costs, config, figures, host_limit_bytes)


def _figures_of(device: Device | Mapping[str, Any]) -> dict[str, Any]:
    """Figures of a link and a budget, checked."""
    if isinstance(device, Device):
        return device.figures()
    if not isinstance(device, Mapping):
        raise TypeError(f"device={device!r}: give a Device, or figures such as {{'h2d_bytes_per_s': 1e9}}")
    known = ("memory_bytes", "h2d_bytes_per_s", "d2h_bytes_per_s", "latency_s")
    if unknown := [name for name in device if name not in known]:
        raise ValueError(f"device has the figure {unknown[0]!r}: known are {', '.join(known)}")
    return EmulatedDevice(**device).figures()  # checks the values


def _is_faster(figures: Mapping[str, Any], recorded: Mapping[str, Any]) -> bool:
    """Whether a link is asked for without a limit, where a limit hid how fast it is."""
    names = [f"{lane}_bytes_per_s" for lane in COPY_LANES]
    return any(recorded.get(name) and not figures.get(name) for name in names)


# -- memory ----------------------------------------------------------------------------------------------------------


def _samples(profile: Profile) -> list[tuple[str, Mapping[str, int]]]:
    return [*profile.memory, *(sample for turn in profile.turns for op in turn.ops for sample in op.memory)]


def _with_more_slots(nbytes: int, memory: Memory) -> Memory:
    """Samples with so many bytes of weights more on the device."""
    return tuple(
        (place, {**held, "weights": held.get("weights", 0) + nbytes} if place == "device" else held)
        for place, held in memory
    )


def _stash_alone(memory: Memory) -> Memory:
    """Samples with nothing but the stash on the host."""
    return tuple(
        (place, held if place == "device" else {name: n for name, n in held.items() if name == "stash"})
        for place, held in memory
    )


def _with_host(trace: Trace, standing: Mapping[str, int]) -> Trace:
    """The trace with what stands on the host besides the stash."""
    memory = [
        sample
        if sample.place == "device"
        else MemorySample(sample.t_s, "host", {n: v for n, v in {**standing, **sample.bytes_by_category}.items() if v})
        for sample in trace.memory
    ]
    header = {"step": trace.step, "device": trace.device, "names": trace.names, "settings": trace.settings}
    return Trace.of(trace.since(0)[0], memory, **header)
