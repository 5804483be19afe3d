"""What a step will need and how long it will take, before it runs; and how far off that was, afterwards.

The schedule is `simulate`'s and the costs are measured: those of the last step where it was one of the same kind, else of a
rehearsal (`rehearsal.py`). What it is not: a second model of the relay.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch.utils import _pytree as pytree

from l2l_core.bounds import Bound, micro_batches_to_hide
from l2l_core.config import RelayConfig
from l2l_core.cost import COPY_LANES, Memory
from l2l_core.memory import format_bytes
from l2l_core.profile import Profile
from l2l_core.rehearsal import Rehearsal, representatives
from l2l_core.roofline import OVERLAPPING, Work
from l2l_core.simulate import MOST_EVENTS, simulate
from l2l_core.stretch import MemoryWalk, stretch
from l2l_core.trace import MemorySample, Trace
from l2l_core.underway import gradient_buffer_bytes
from l2l_core.units import Unit

if TYPE_CHECKING:
    from l2l_core.relay import StepResult

_DEEPEST = 1 << 20  # layers; what fits so many has no limit worth a number
_SIMULATED = 64  # micro-batches that are tried one by one, whatever the depth


@dataclass(frozen=True)
class Forecast:
    """A step that has not run.

    Attributes:
        device_bytes, host_bytes: at the peak, by category.
        seconds: of a step; the first one of a shape takes longer, because it is metered.
        bound: what binds the phase that loses most.
        trace: the simulated step.
        hiding_micro_batches: the smallest number of micro-batches of this size under which the link is hidden in forward
            and backward; None if no number does.
        largest_depth: most layers like the middle one that fit; 0 if not even one does, None without a limit.
        config: of the step.
        basis: where the costs come from, in words.
        memory_bytes: budget of the device, None without one.
        host_limit_bytes: budget of the host, None without one.
        advice: what would fit where this does not, as far as that was looked for.
    """

    device_bytes: Mapping[str, int]
    host_bytes: Mapping[str, int]
    seconds: float
    bound: Bound
    trace: Trace
    hiding_micro_batches: int | None
    largest_depth: int | None
    config: RelayConfig
    basis: str
    memory_bytes: int | None = None
    host_limit_bytes: int | None = None
    advice: str = ""

    @property
    def peak_device_bytes(self) -> int:
        """All categories together."""
        return sum(self.device_bytes.values())

    @property
    def peak_host_bytes(self) -> int:
        """All categories together."""
        return sum(self.host_bytes.values())

    @property
    def fits(self) -> bool:
        """Whether both budgets suffice."""
        return not self._lacks()

    def _lacks(self) -> list[str]:
        """What does not fit, in words."""
        places = (
            ("the device", self.peak_device_bytes, self.memory_bytes, self.device_bytes),
            ("the host", self.peak_host_bytes, self.host_limit_bytes, self.host_bytes),
        )
        return [
            f"does not fit {name}: {format_bytes(need)} of {format_bytes(limit)}, most of it {_words(held, 2)}"
            for name, need, limit, held in places
            if limit is not None and need > limit
        ]

    def check(self, result: StepResult) -> ForecastCheck:
        """Compare with a step that has run."""
        measured = {place: result.trace.peak_sample(place) for place in ("device", "host")}
        held = {place: dict(sample.bytes_by_category) if sample else {} for place, sample in measured.items()}
        return ForecastCheck(
            device=_rows(self.device_bytes, held["device"]),
            host=_rows(self.host_bytes, held["host"]),
            peak_device=Row("peak", self.peak_device_bytes, result.peak_device_bytes),
            peak_host=Row("peak", self.peak_host_bytes, result.trace.peak_bytes("host")),
            seconds=Row("seconds", self.seconds, result.seconds),
        )

    def __str__(self) -> str:
        count, depth = self.hiding_micro_batches, self.largest_depth
        hiding = "no number of micro-batches hides the link"
        if count is not None:
            hiding = (
                f"{count} micro-batch{'es' if count > 1 else ''} of this size hide{'s' if count == 1 else ''} the link"
            )
        return "\n".join(
            [
                f"a step of {self.seconds:.3g} s; {self.bound}",
                f"device peak {format_bytes(self.peak_device_bytes)}: {_words(self.device_bytes)}",
                f"host peak {format_bytes(self.peak_host_bytes)}: {_words(self.host_bytes)}",
                *self._lacks(),
                *filter(None, [self.advice]),
                hiding + ("; any depth fits" if depth is None else f"; at most {depth:,} layers like these fit"),
                f"basis: {self.basis}",
            ]
        )


@dataclass(frozen=True, slots=True)
class Row:
    """A figure as forecast and as measured."""

    name: str
    forecast: float
    measured: float

    @property
    def error(self) -> float:
        """How far off, relative to what was measured: 0.1 is 10 % too much. Infinite where nothing was measured."""
        if self.measured:
            return (self.forecast - self.measured) / self.measured
        return float("inf") if self.forecast else 0.0


@dataclass(frozen=True, slots=True)
class ForecastCheck:
    """A forecast against the step that it was of; `str` makes a table.

    Attributes:
        device, host: categories at the peak.
        peak_device, peak_host, seconds: of the whole step.
    """

    device: tuple[Row, ...]
    host: tuple[Row, ...]
    peak_device: Row
    peak_host: Row
    seconds: Row

    def __str__(self) -> str:
        rows = [("", "forecast", "measured", "error")]
        for place, peak, parts in (("device", self.peak_device, self.device), ("host", self.peak_host, self.host)):
            rows += [
                (f"{place} {row.name}", format_bytes(row.forecast), format_bytes(row.measured), _percent(row.error))
                for row in (peak, *parts)
            ]
        time = self.seconds
        rows.append(("seconds", f"{time.forecast:.4g}", f"{time.measured:.4g}", _percent(time.error)))
        widths = [max(len(row[i]) for row in rows) for i in range(4)]
        return "\n".join("  ".join([a.ljust(widths[0]), *map(str.rjust, rest, widths[1:])]) for a, *rest in rows)


def _percent(error: float) -> str:
    return f"{error:+.1%}" if abs(error) != float("inf") else "not there"


def _rows(forecast: Mapping[str, int], measured: Mapping[str, int]) -> tuple[Row, ...]:
    names = dict.fromkeys((*forecast, *measured))
    return tuple(Row(name, forecast.get(name, 0), measured.get(name, 0)) for name in names)


def _words(held: Mapping[str, int], most: int | None = None) -> str:
    parts = sorted(((name, n) for name, n in held.items() if n), key=lambda part: -part[1])[:most]
    return ", ".join(f"{name} {format_bytes(n)}" for name, n in parts)


# -- of a relay ------------------------------------------------------------------------------------------------------


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


def form_of(micro_batch: Any) -> Any:
    """Shapes and types of a micro-batch's tensors."""
    leaves = (leaf for leaf in pytree.tree_leaves(micro_batch) if isinstance(leaf, torch.Tensor))
    return tuple((tuple(leaf.shape), leaf.dtype) for leaf in leaves)


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
    slot_bytes = (2 if config.precision == "bf16" else 4) * rehearsal.parts.slot_numel
    profile = _mapped(profile, lambda held: _more(held, "weights", (config.ahead - was["ahead"]) * slot_bytes))
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
    blocks = list(dict.fromkeys(block for unit in rehearsal.parts.units for block in unit.blocks))
    weights = sum(block.nbytes for block in blocks)
    per_byte = (host.get("optimizer", 0) + wire_bytes) / weights if weights else 0.0  # of a master
    own = {unit.key: _own_bytes(unit) for unit in rehearsal.parts.layers}
    return Costs(
        profile=_stash_alone(profile),
        stands=list(stands),
        around_s=around_s,
        host={name: n for name, n in host.items() if n},
        pooled_bytes=rehearsal.parts.host.by_category().get("gradients", 0),
        layer_host_bytes={key: round(n * (1 + per_byte)) for key, n in own.items()},
        basis=basis,
    )


def _own_bytes(unit: Unit) -> int:
    return sum(block.nbytes for block in unit.blocks if not block.shared)


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
    peaks = {
        place: dict(s.bytes_by_category) if (s := trace.peak_sample(place)) else {} for place in ("device", "host")
    }
    return Forecast(
        device_bytes=peaks["device"],
        host_bytes=peaks["host"],
        seconds=trace.span_s + costs.around_s,
        bound=_binding(trace),
        trace=trace,
        hiding_micro_batches=hiding_micro_batches(costs.profile, config, figures),
        largest_depth=largest_depth(costs, config, memory_bytes, host_limit_bytes, gradients),
        config=config,
        basis=f"{costs.basis}; {_link_words(figures)}",
        memory_bytes=memory_bytes,
        host_limit_bytes=host_limit_bytes,
    )


def _binding(trace: Trace) -> Bound:
    """What binds the phase that loses most, or if none loses a twentieth of the step, the longest one."""
    bounds, span_s = trace.bound_by(), trace.span_s
    losing = [bound for bound in bounds if bound.lane != "compute" and bound.exposed_s > 0.05 * span_s]
    return max(losing, key=lambda bound: bound.exposed_s) if losing else max(bounds, key=lambda bound: bound.span_s)


def _link_words(figures: Mapping[str, Any]) -> str:
    speeds = [(lane, figures.get(f"{lane}_bytes_per_s")) for lane in COPY_LANES]
    words = [f"{lane} {format_bytes(speed)}/s" if speed else f"{lane} as measured" for lane, speed in speeds]
    return "link: " + ", ".join(words)


def forecast_step(
    rehearsal: Rehearsal,
    micro_batches: Sequence[Any],
    config: RelayConfig,
    figures: Mapping[str, Any],
    last: tuple[Trace, Sequence[Any]] | None,
    host_limit_bytes: int | None,
) -> Forecast:
    """The forecast of a relay's step: from its last one if that was of the same kind, else from a rehearsal.

    Args:
        rehearsal: the relay's parts.
        micro_batches: of the step.
        config, figures, host_limit_bytes: as in `forecast_costs`.
        last: trace of the last step, and the forms of its micro-batches.
    """
    costs = None
    if last is not None and not _is_faster(figures, last[0].settings):
        costs = costs_of_step(rehearsal, *last, [form_of(each) for each in micro_batches], config)
    costs = costs or costs_of_rehearsal(rehearsal, micro_batches, config)
    return forecast_costs(costs, config, figures, host_limit_bytes)


def _is_faster(figures: Mapping[str, Any], recorded: Mapping[str, Any]) -> bool:
    """Whether a link is asked for without a limit, where a limit hid how fast it is."""
    names = [f"{lane}_bytes_per_s" for lane in COPY_LANES]
    return any(recorded.get(name) and not figures.get(name) for name in names)


# -- memory ----------------------------------------------------------------------------------------------------------


def _samples(profile: Profile) -> list[tuple[str, Mapping[str, int]]]:
    turns = [*profile.start, *(turn for stay in profile.stays for turn in stay.turns)]
    return [*profile.memory, *(sample for turn in turns for op in turn.ops for sample in op.memory)]


def _mapped(profile: Profile, change: Any, place: str = "device", first: bool = False) -> Profile:
    """The profile with other samples of one place; those before the first operation only if `first`."""

    def mapped(memory: Memory) -> Memory:
        return tuple((where, change(held) if where == place else held) for where, held in memory)

    def turns(known: Sequence[Any]) -> tuple[Any, ...]:
        return tuple(t._replace(ops=tuple(op._replace(memory=mapped(op.memory)) for op in t.ops)) for t in known)

    return replace(
        profile,
        start=turns(profile.start),
        stays=tuple(stay._replace(turns=turns(stay.turns)) for stay in profile.stays),
        memory=mapped(profile.memory) if first else profile.memory,
    )


def _more(held: Mapping[str, int], category: str, nbytes: int) -> dict[str, int]:
    return {**held, category: held.get(category, 0) + nbytes} if nbytes else dict(held)


def _stash_alone(profile: Profile) -> Profile:
    """The profile with nothing but the stash in its host samples."""
    return _mapped(profile, lambda held: {n: v for n, v in held.items() if n == "stash"}, "host", first=True)


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


def largest_depth(
    costs: Costs, config: RelayConfig, memory_bytes: int | None, host_limit_bytes: int | None, gradients: int
) -> int | None:
    """Most layers that fit both budgets, None without a limit; deeper stacks have more layers like the middle one."""
    walk = MemoryWalk(costs.profile)
    keys = list(costs.layer_host_bytes)
    if not keys or (memory_bytes is None and host_limit_bytes is None):
        return None
    # what is nearest to the middle goes first; the last layer stays, it is where forward turns
    spare = sorted(keys[:-1], key=lambda key: abs(keys.index(key) - (len(keys) - 1) // 2)) or keys
    deferred = config.update == "deferred"

    def fits(depth: int) -> bool:
        copies = (
            {spare[0]: 1 + depth - len(keys)} if depth >= len(keys) else dict.fromkeys(spare[: len(keys) - depth], 0)
        )
        if memory_bytes is not None and walk.rise("device", costs.stands, copies).high > memory_bytes:
            return False
        if host_limit_bytes is None:
            return True
        added = sum((copies.get(key, 1) - 1) * n for key, n in costs.layer_host_bytes.items())
        if deferred:
            push_bytes = {key: layer.push_bytes for key, layer in costs.profile.layers.items()}
            added += sum((copies.get(key, 1) - 1) * push_bytes.get(key, 0) for key in keys)
        standing = sum(costs.host.values()) + gradients + added
        return standing + walk.rise("host", costs.stands, copies).high <= host_limit_bytes

    if fits(_DEEPEST):
        return None
    low, high = 0, _DEEPEST  # low fits, or is none at all; high does not
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


# -- hiding the link -------------------------------------------------------------------------------------------------


def hiding_micro_batches(profile: Profile, config: RelayConfig, figures: Mapping[str, Any]) -> int | None:
    """The smallest number of micro-batches with which the link binds neither forward nor backward; None if none does.

    Numbers are tried in simulations as long as those are short; beyond, the arithmetic of `micro_batches_to_hide` decides.
    """
    bare = _without_memory(profile)
    most = max(_SIMULATED, MOST_EVENTS // (2 * len(profile.stays)))

    def trace_of(count: int) -> Trace:
        return simulate(
            stretch(bare, pattern(bare.micro_batches, count)), replace(config, micro_batches=count), figures
        )

    def hidden(count: int) -> bool:
        return not any(b.phase in OVERLAPPING and b.lane in COPY_LANES for b in trace_of(count).bound_by())

    high = 1
    while high <= most and not hidden(high):
        high *= 2
    if high > most:
        return _by_arithmetic(trace_of(most), most)
    low = high // 2  # does not hide, or is none at all
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if hidden(middle) else (middle, high)
    return high


def pattern(known: int, count: int) -> list[int]:
    """Which of `known` micro-batches stands for each of `count` of their size."""
    usual = max(0, min(2, known - 2)) if known > 1 else 0
    head = list(range(usual))
    last = [known - 1] if count > 1 else []
    middle = [usual] * max(0, count - len(head) - len(last))
    return (head + middle + last)[:count] if count >= len(head) + len(last) else (head[: count - len(last)] + last)


def _without_memory(profile: Profile) -> Profile:
    def turns(known: Sequence[Any]) -> tuple[Any, ...]:
        return tuple(t._replace(ops=tuple(op._replace(memory=()) for op in t.ops)) for t in known)

    stays = tuple(stay._replace(turns=turns(stay.turns)) for stay in profile.stays)
    return replace(profile, start=turns(profile.start), stays=stays, memory=())


def _by_arithmetic(trace: Trace, micro_batches: int) -> int | None:
    work = Work(trace.lanes, trace.settings)
    needed = 1
    for phase in OVERLAPPING:
        for lane in COPY_LANES:
            visits = [visit for visit in work.in_phase(phase) if visit[lane]]
            events = [event for visit in visits for event in visit[lane]]
            fixed_s = sum(e.stop_s - e.start_s for e in events if e.kind in ("load", "push") and e.k < 0)
            whole_s = sum(e.stop_s - e.start_s for e in events)
            compute_s = sum(e.stop_s - e.start_s for visit in visits for e in visit["compute"])
            found = micro_batches_to_hide(compute_s, fixed_s, whole_s - fixed_s, micro_batches)
            if found is None:
                return None
            needed = max(needed, found)
    return max(needed, micro_batches + 1)
