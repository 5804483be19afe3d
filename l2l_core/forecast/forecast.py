"""Needs and time of a step before it runs, and their errors afterwards; `cost_forecast.py` makes the values."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property

from l2l_core.analysis import Bound
from l2l_core.config import RelayConfig
from l2l_core.forecast.shelf_costs import ShelfForecast
from l2l_core.simulator import Cluster, TrafficTotal
from l2l_core.trace import StepResult, Trace, format_bytes


@dataclass(frozen=True, eq=False, kw_only=True)
class StepFigures:
    """Figures of a step, each computed on first access."""

    trace: Trace
    basis: str  # description of the source of its costs

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
        """Bytes on the device at its peak."""
        return sum(self.device_bytes.values())

    @property
    def peak_host_bytes(self) -> int:
        """Bytes on the host at its peak."""
        return sum(self.host_bytes.values())

    @cached_property
    def bounds(self) -> tuple[Bound, ...]:
        """Bounds of each phase; slow for a step of thousands of events."""
        return self.trace.bound_by()

    @cached_property
    def bound(self) -> Bound | None:
        """Bound of the phase that loses most, or of the longest if no loss exceeds 5 % of the step."""
        span_s = self.trace.span_s
        losing = [bound for bound in self.bounds if bound.lane != "compute" and bound.exposed_s > 0.05 * span_s]
        if losing:
            return max(losing, key=lambda bound: bound.exposed_s)
        return max(self.bounds, key=lambda bound: bound.span_s, default=None)


@dataclass(frozen=True, slots=True)
class WorkerForecast:
    """Forecast for one of several workers."""

    cluster: Cluster  # with the rank of this one
    held_bytes: Mapping[str, int]  # masters ("weights") and optimizer state ("optimizer")
    gather_buffer_bytes: int  # on the host
    traffic: Mapping[str, TrafficTotal]  # of weights ("gather") and gradients ("reduce"), without gloo's overhead

    def __str__(self) -> str:
        cluster, total = self.cluster, TrafficTotal(*map(sum, zip(*self.traffic.values(), strict=True)))
        slow = [f", worker {rank} {factor:g} times as slow" for rank, factor in cluster.stragglers.items()]
        return (
            f"planned for worker {cluster.rank} of {cluster.count}{''.join(slow)}: holds "
            f"{format_bytes(sum(self.held_bytes.values()))} of masters and state, gathers into "
            f"{format_bytes(self.gather_buffer_bytes)}, sends {format_bytes(total.sent)} and receives "
            f"{format_bytes(total.received)} a step; {cluster.network}"
        )


@dataclass(frozen=True, kw_only=True)
class Forecast(StepFigures):
    """Forecast of a step; `trace` is simulated.

    Attributes:
        seconds: of a step; the first one of a shape takes longer, because it is metered.
        hiding_micro_batches: the smallest number of micro-batches of this size that hides the link in forward and backward;
            None if none does. With a shelf, the disk must be hidden too.
        largest_depth: most layers like the middle one that fit; 0 if not even one does, None without a limit.
            Too low if all layers keep their graphs now, and deeper stacks would recompute some.
        memory_bytes: budget of the device, None without one.
        host_limit_bytes: budget of the host, None without one.
        advice: settings that would fit if these do not, as far as they were searched.
        worker: the worker to which all figures and budgets belong, if there are several.
        shelf: on disk, if there is one; its whole pool counts as host memory.

    Example:
        >>> forecast = relay.forecast(batch)
        >>> forecast.config == relay.config, forecast.seconds > 0
        (True, True)
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
        """True if both budgets and the disk suffice."""
        return not self.shortfalls()

    def shortfalls(self) -> list[str]:
        """Describe each place that lacks bytes."""
        places = (
            ("the device", self.peak_device_bytes, self.memory_bytes, self.device_bytes),
            ("the host", self.needed_host_bytes, self.host_limit_bytes, self.host_bytes),
        )
        lacks = [
            f"does not fit {name}: {format_bytes(need)} of {format_bytes(limit)}, most of it {_format_categories(held, 2)}"
            for name, need, limit, held in places
            if limit is not None and need > limit
        ]
        if self.shelf is not None and (free := self.shelf.disk.free_bytes) is not None and self.shelf.exceeds_disk:
            lacks.append(f"does not fit the disk: {format_bytes(self.shelf.needed_bytes)} of {format_bytes(free)}")
        return lacks

    @property
    def needed_host_bytes(self) -> int:
        """Host bytes at the peak, with the unused part of the shelf's pool."""
        return self.peak_host_bytes + (self.shelf.unused_bytes if self.shelf is not None else 0)

    def check(self, result: StepResult) -> ForecastCheck:
        """Compare with a finished step."""
        trace = result.trace
        return ForecastCheck(
            device=_check_categories(self.device_bytes, _peak(trace, "device")),
            host=_check_categories(self.host_bytes, _peak(trace, "host")),
            peak_device=CheckedFigure("peak", self.peak_device_bytes, result.peak_device_bytes),
            peak_host=CheckedFigure("peak", self.peak_host_bytes, trace.peak_bytes("host")),
            seconds=CheckedFigure("seconds", self.seconds, result.seconds),
        )

    def __str__(self) -> str:
        count, depth = self.hiding_micro_batches, self.largest_depth
        lanes = "the link" if self.shelf is None else "link and disk"
        subject = "no number of micro-batches hides"
        if count is not None:
            subject = (
                f"{count} micro-batch of this size hides" if count == 1 else f"{count} micro-batches of this size hide"
            )
        deepest = "any depth fits" if depth is None else f"at most {depth:,} layers like these fit"
        lines = [
            f"a step of {self.seconds:.3g} s; {self.bound}",
            f"device peak {format_bytes(self.peak_device_bytes)}: {_format_categories(self.device_bytes)}",
            f"host peak {format_bytes(self.peak_host_bytes)}: {_format_categories(self.host_bytes)}",
            *(str(each) for each in (self.worker, self.shelf) if each is not None),
            *self.shortfalls(),
            self.advice,
            f"{subject} {lanes}; {deepest}",
            f"basis: {self.basis}",
        ]
        return "\n".join(filter(None, lines))


@dataclass(frozen=True, slots=True)
class CheckedFigure:
    """A forecast figure and its measured value."""

    name: str
    forecast: float
    measured: float

    @property
    def error(self) -> float:
        """Relative error: 0.1 means 10 % too much; infinite if nothing was measured."""
        if self.measured:
            return (self.forecast - self.measured) / self.measured
        return float("inf") if self.forecast else 0.0

    def row(self, name: str, form: Callable[[float], str]) -> tuple[str, str, str, str]:
        """Return the cells of a table."""
        error = f"{self.error:+.1%}" if math.isfinite(self.error) else "not measured"
        return (name, form(self.forecast), form(self.measured), error)


@dataclass(frozen=True, slots=True)
class ForecastCheck:
    """Comparison of a forecast with its step: bytes by category at the peaks, peaks, and seconds; `str` makes a table.

    Example:
        >>> forecast = relay.forecast(batch)
        >>> check = forecast.check(relay.step(batch))
        >>> check.peak_device.forecast == check.peak_device.measured
        True
        >>> print(check)
        forecast  measured   error
        device peak          24.3 kB   24.3 kB   +0.0%
        ...
    """

    device: tuple[CheckedFigure, ...]
    host: tuple[CheckedFigure, ...]
    peak_device: CheckedFigure
    peak_host: CheckedFigure
    seconds: CheckedFigure

    def __str__(self) -> str:
        rows = [("", "forecast", "measured", "error")]
        for place, figures in (("device", (self.peak_device, *self.device)), ("host", (self.peak_host, *self.host))):
            rows += [figure.row(f"{place} {figure.name}", format_bytes) for figure in figures]
        rows.append(self.seconds.row("seconds", "{:.4g}".format))
        widths = [max(len(row[i]) for row in rows) for i in range(4)]
        return "\n".join("  ".join([a.ljust(widths[0]), *map(str.rjust, rest, widths[1:])]) for a, *rest in rows)


def _check_categories(forecast: Mapping[str, int], measured: Mapping[str, int]) -> tuple[CheckedFigure, ...]:
    names = dict.fromkeys((*forecast, *measured))
    return tuple(CheckedFigure(name, forecast.get(name, 0), measured.get(name, 0)) for name in names)


def _format_categories(bytes_by_category: Mapping[str, int], limit: int | None = None) -> str:
    parts = sorted(((name, n) for name, n in bytes_by_category.items() if n), key=lambda part: -part[1])[:limit]
    return ", ".join(f"{name} {format_bytes(n)}" for name, n in parts)


def _peak(trace: Trace, place: str) -> Mapping[str, int]:
    sample = trace.peak_sample(place)
    return dict(sample.bytes_by_category) if sample is not None else {}
