"""What a step will need and how long it will take, before it runs; and how far off that was, afterwards.

Values and their words. `cost_forecast.py` makes them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from l2l_core.analysis import Bound
from l2l_core.config import RelayConfig
from l2l_core.forecast.shelf_costs import ShelfForecast
from l2l_core.simulator import Cluster, TrafficTotal
from l2l_core.trace import StepResult, Trace, format_bytes


@dataclass(frozen=True, eq=False, kw_only=True)
class StepFigures:
    """A step and its figures, each worked out when it is first asked for.

    Attributes:
        trace: of the step.
        basis: where its costs come from, in words.
    """

    trace: Trace
    basis: str

    @cached_property
    def device_bytes(self) -> Mapping[str, int]:
        """Bytes on the device at its peak, by category."""
        return _peak(self.trace, "device")

    @cached_property
    def host_bytes(self) -> Mapping[str, int]:
        """Bytes on the host at its peak, by category."""
        return _peak(self.trace, "host")

    @property
    def peak_device_bytes(self) -> int:
        """Bytes on the device at its peak, all categories together."""
        return sum(self.device_bytes.values())

    @property
    def peak_host_bytes(self) -> int:
        """Bytes on the host at its peak, all categories together."""
        return sum(self.host_bytes.values())

    @cached_property
    def bounds(self) -> tuple[Bound, ...]:
        """What binds each phase. Of a step of thousands of events this takes longer than all else."""
        return self.trace.bound_by()

    @cached_property
    def bound(self) -> Bound | None:
        """What binds the phase that loses most, or if none loses a twentieth of the step, the longest; None without events."""
        span_s = self.trace.span_s
        losing = [bound for bound in self.bounds if bound.lane != "compute" and bound.exposed_s > 0.05 * span_s]
        if losing:
            return max(losing, key=lambda bound: bound.exposed_s)
        return max(self.bounds, key=lambda bound: bound.span_s, default=None)


@dataclass(frozen=True, slots=True)
class WorkerForecast:
    """What is planned for one of several workers.

    Attributes:
        fleet: the workers, and which of them this is.
        held: bytes of masters ("weights") and of the optimizer's state ("optimizer") that it has.
        gathered_bytes: of host buffers into which layers are gathered.
        sent: bytes of a step that go to other workers and come from them, by channel: "gather" for weights, "reduce" for
            gradients. What gloo adds is not among them.
    """

    cluster: Cluster
    held_bytes: Mapping[str, int]
    gather_buffer_bytes: int
    traffic: Mapping[str, TrafficTotal]

    def __str__(self) -> str:
        fleet, sent = self.cluster, TrafficTotal(*map(sum, zip(*self.traffic.values(), strict=True)))
        slow = ", ".join(f"worker {rank} {factor:g} times as slow" for rank, factor in fleet.stragglers.items())
        return (
            f"planned for worker {fleet.rank} of {fleet.count}{f', {slow}' if slow else ''}: holds "
            f"{format_bytes(sum(self.held_bytes.values()))} of masters and state, gathers into {format_bytes(self.gather_buffer_bytes)}, "
            f"sends {format_bytes(sent.sent)} and receives {format_bytes(sent.received)} a step; {fleet.network}"
        )


@dataclass(frozen=True, kw_only=True)
class Forecast(StepFigures):
    """A step that has not run; `trace` is simulated.

    Attributes:
        seconds: of a step; the first one of a shape takes longer, because it is metered.
        hiding_micro_batches: the smallest number of micro-batches of this size under which the link is hidden in forward
            and backward; None if no number does.
        largest_depth: most layers like the middle one that fit; 0 if not even one does, None without a limit.
        config: of the step.
        memory_bytes: budget of the device, None without one.
        host_limit_bytes: budget of the host, None without one.
        advice: what would fit where this does not, as far as that was looked for.
        worker: whose step it is, if several are planned with; the budgets are its own, and so is every figure.
        shelf: on disk, if one is planned with. Then the disk must be hidden, too, and what fits counts its whole pool.
    """

    seconds: float
    hiding_micro_batches: int | None
    largest_depth: int | None
    config: RelayConfig
    memory_bytes: int | None = None
    host_limit_bytes: int | None = None
    advice: str = ""
    worker: WorkerForecast | None = None
    shelf: ShelfForecast | None = None

    @property
    def fits(self) -> bool:
        """Whether both budgets suffice, and the disk."""
        return not self.shortfalls()

    def shortfalls(self) -> list[str]:
        """Say what does not fit, in words."""
        places = (
            ("the device", self.peak_device_bytes, self.memory_bytes, self.device_bytes),
            ("the host", self.needed_host_bytes, self.host_limit_bytes, self.host_bytes),
        )
        lacks = [
            f"does not fit {name}: {format_bytes(need)} of {format_bytes(limit)}, most of it {_format_categories(held, 2)}"
            for name, need, limit, held in places
            if limit is not None and need > limit
        ]
        if self.shelf is not None and self.shelf.exceeds_disk:
            free = self.shelf.disk.free_bytes
            assert free is not None
            lacks.append(f"does not fit the disk: {format_bytes(self.shelf.needed_bytes)} of {format_bytes(free)}")
        return lacks

    @property
    def needed_host_bytes(self) -> int:
        """Bytes that the host must have: those at its peak, and what a pool may take besides."""
        return self.peak_host_bytes + (self.shelf.unused_bytes if self.shelf is not None else 0)

    def check(self, result: StepResult) -> ForecastCheck:
        """Compare with a step that has run."""
        measured = {place: result.trace.peak_sample(place) for place in ("device", "host")}
        held = {place: dict(sample.bytes_by_category) if sample else {} for place, sample in measured.items()}
        return ForecastCheck(
            device=_check_categories(self.device_bytes, held["device"]),
            host=_check_categories(self.host_bytes, held["host"]),
            peak_device=CheckedFigure("peak", self.peak_device_bytes, result.peak_device_bytes),
            peak_host=CheckedFigure("peak", self.peak_host_bytes, result.trace.peak_bytes("host")),
            seconds=CheckedFigure("seconds", self.seconds, result.seconds),
        )

    def __str__(self) -> str:
        count, depth = self.hiding_micro_batches, self.largest_depth
        what = "the link" if self.shelf is None else "link and disk"
        hiding = f"no number of micro-batches hides {what}"
        if count is not None:
            hiding = (
                f"{count} micro-batch{'es' if count > 1 else ''} of this size hide{'s' if count == 1 else ''} {what}"
            )
        return "\n".join(
            [
                f"a step of {self.seconds:.3g} s; {self.bound}",
                f"device peak {format_bytes(self.peak_device_bytes)}: {_format_categories(self.device_bytes)}",
                f"host peak {format_bytes(self.peak_host_bytes)}: {_format_categories(self.host_bytes)}",
                *(str(each) for each in (self.worker, self.shelf) if each is not None),
                *self.shortfalls(),
                *filter(None, [self.advice]),
                hiding + ("; any depth fits" if depth is None else f"; at most {depth:,} layers like these fit"),
                f"basis: {self.basis}",
            ]
        )


@dataclass(frozen=True, slots=True)
class CheckedFigure:
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

    device: tuple[CheckedFigure, ...]
    host: tuple[CheckedFigure, ...]
    peak_device: CheckedFigure
    peak_host: CheckedFigure
    seconds: CheckedFigure

    def __str__(self) -> str:
        rows = [("", "forecast", "measured", "error")]
        for place, peak, parts in (("device", self.peak_device, self.device), ("host", self.peak_host, self.host)):
            rows += [
                (
                    f"{place} {row.name}",
                    format_bytes(row.forecast),
                    format_bytes(row.measured),
                    _format_error(row.error),
                )
                for row in (peak, *parts)
            ]
        time = self.seconds
        rows.append(("seconds", f"{time.forecast:.4g}", f"{time.measured:.4g}", _format_error(time.error)))
        widths = [max(len(row[i]) for row in rows) for i in range(4)]
        return "\n".join("  ".join([a.ljust(widths[0]), *map(str.rjust, rest, widths[1:])]) for a, *rest in rows)


def _format_error(error: float) -> str:
    return f"{error:+.1%}" if abs(error) != float("inf") else "not there"


def _check_categories(forecast: Mapping[str, int], measured: Mapping[str, int]) -> tuple[CheckedFigure, ...]:
    names = dict.fromkeys((*forecast, *measured))
    return tuple(CheckedFigure(name, forecast.get(name, 0), measured.get(name, 0)) for name in names)


def _format_categories(bytes_by_category: Mapping[str, int], limit: int | None = None) -> str:
    parts = sorted(((name, n) for name, n in bytes_by_category.items() if n), key=lambda part: -part[1])[:limit]
    return ", ".join(f"{name} {format_bytes(n)}" for name, n in parts)


def _peak(trace: Trace, place: str) -> Mapping[str, int]:
    sample = trace.peak_sample(place)
    return dict(sample.bytes_by_category) if sample is not None else {}
