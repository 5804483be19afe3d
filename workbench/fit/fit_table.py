"""Ways to train a model on a machine, side by side: bytes, seconds, origins, and whether they fit."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from l2l_core.trace import format_bytes

Origin = Literal["measured", "forecast", "formula"]
ORIGINS = {
    "measured": "counted or timed in steps that ran on this machine",
    "forecast": "the engine's forecast of the step, from costs that it rehearsed or from the configuration",
    "formula": "arithmetic on shapes and on the card's datasheet",
}


RELAY_ON_NF4 = "relay, LoRA on NF4"
FEW_WEIGHTS = ("LoRA", RELAY_ON_NF4)  # ways that train adapters alone


@dataclass(frozen=True)
class Measure:
    """A figure with its origin and, for seconds, its margin.

    Attributes:
        value: bytes or seconds.
        origin: key of `ORIGINS`.
        margin: the real value is expected within plus and minus this; 0 for bytes.
    """

    value: float
    origin: Origin
    margin: float = 0.0

    @classmethod
    def between(cls, slow_s: float, fast_s: float, origin: Origin) -> Measure:
        """Return the mean of two durations, with half of their difference as margin."""
        return cls((slow_s + fast_s) / 2, origin, (slow_s - fast_s) / 2)


@dataclass(frozen=True)
class FitWay:
    """Needs of a step in one way.

    Attributes:
        name: name of the way, such as "in core".
        micro_batches: number of micro-batches, the smallest that fits.
        recomputes: the graphs of layers are made again in backward.
        device, host, disk: bytes at the peak; `disk` is the space that must be free before the first step.
        seconds: duration of a step, None if the way cannot run.
        binds: resource that limits the step while everything fits.
        pool_bytes: `memory_bytes` of the shelf of a relay on disk.
        reason: why there are no figures; empty if there are.
    """

    name: str
    micro_batches: int = 1
    recomputes: bool = False
    device: Measure = Measure(0, "formula")
    host: Measure = Measure(0, "formula")
    disk: Measure = Measure(0, "formula")
    seconds: Measure = Measure(0, "formula")
    binds: str = "compute"
    pool_bytes: int = 0
    reason: str = ""


@dataclass(frozen=True)
class MachineLimits:
    """Bytes that a machine has.

    Attributes:
        device_bytes: memory of the card.
        host_bytes: memory of the host.
        disk_bytes: free space of the disk; 0 without a disk.
    """

    device_bytes: int
    host_bytes: int
    disk_bytes: int = 0

    def spare(self, way: FitWay) -> dict[str, float]:
        """Return the bytes that a way leaves free in each place that it uses; negative where it lacks them."""
        rooms = {
            "device memory": (self.device_bytes, way.device.value),
            "host memory": (self.host_bytes, way.host.value),
            "disk": (self.disk_bytes, way.disk.value),
        }
        return {place: limit - need for place, (limit, need) in rooms.items() if need or place == "device memory"}

    def fits(self, way: FitWay) -> bool:
        """Return True if the way has figures and no place lacks bytes."""
        return not way.reason and all(left >= 0 for left in self.spare(way).values())


@dataclass(frozen=True)
class FitTable:
    """All ways for one model, card, host and batch; `str` makes a table of them.

    Attributes:
        title: model, batch and machine.
        ways: in the order of the table.
        limits: of the machine.
        notes: sentences on the origin of the figures.
    """

    title: str
    ways: Sequence[FitWay]
    limits: MachineLimits
    notes: Sequence[str] = ()

    def fits(self, way: FitWay) -> bool:
        """Return True if the way fits the machine."""
        return self.limits.fits(way)

    @property
    def best(self) -> FitWay | None:
        """The fastest way that fits and trains all weights; else the fastest that fits, None if none does."""
        fitting = [way for way in self.ways if self.fits(way)]
        whole = [way for way in fitting if way.name not in FEW_WEIGHTS]
        return min(whole or fitting, key=lambda way: way.seconds.value, default=None)

    def verdict(self, way: FitWay) -> str:
        """Describe whether the way fits, and by how much."""
        if way.reason:
            return way.reason
        spare = self.limits.spare(way)
        lacking = [f"{format_bytes(-left)} of {place}" for place, left in spare.items() if left < 0]
        if lacking:
            return f"lacks {' and '.join(lacking)}"
        place = min(spare, key=lambda name: spare[name])
        return f"fits, {format_bytes(spare[place])} of {place} free"

    def binds(self, way: FitWay) -> str:
        """Return the resource that limits the way: the first one that lacks bytes, else that of its seconds."""
        if way.reason:
            return "–"
        return next((place for place, left in self.limits.spare(way).items() if left < 0), way.binds)

    def cells(self, way: FitWay) -> tuple[str, ...]:
        """Return the cells of a row behind the name."""
        if way.reason:
            return "–", "–", "–", "–", "–", "–", way.reason
        shows_recompute = way.recomputes and way.name in ("LoRA", "8-bit optimizer")  # the other ways have no choice
        batches = f"{way.micro_batches}{', recompute' if shows_recompute else ''}"
        return (
            batches,
            bytes_cell(way.device),
            bytes_cell(way.host),
            bytes_cell(way.disk),
            seconds_cell(way.seconds),
            self.binds(way),
            self.verdict(way),
        )

    def __str__(self) -> str:
        lines = [HEADER, *((way.name, *self.cells(way)) for way in self.ways)]
        widths = [max(len(line[i]) for line in lines) for i in range(len(HEADER) - 1)]
        rows = [
            "  ".join([*(cell.ljust(w) for cell, w in zip(line, widths, strict=False)), line[-1]]) for line in lines
        ]
        return "\n".join([self.title, "", *(row.rstrip() for row in rows), "", self.summary, *self.notes])

    @property
    def summary(self) -> str:
        """A sentence on the best way."""
        best = self.best
        if best is None:
            least = min((way for way in self.ways if not way.reason), key=lambda way: way.device.value, default=None)
            nothing = "None of these ways fits this machine."
            return nothing if least is None else f"{nothing} {least.name} {self.verdict(least)}."
        seconds = f"{seconds_text(best.seconds)} a step"
        if best.name in FEW_WEIGHTS:
            fitting = " and ".join(way.name for way in self.ways if self.fits(way))
            verb = "fits, which trains" if fitting == best.name else "fit, which train"
            return f"Of these ways only {fitting} {verb} few weights: {best.name} takes {seconds}."
        return f"Fastest way that fits and trains all weights: {best.name}, {seconds}, bound by {self.binds(best)}."


HEADER = ("way", "micro-batches", "device", "host", "disk", "a step", "binds", "fits?")


def bytes_cell(figure: Measure) -> str:
    """Return bytes with their origin; a dash for none."""
    return f"{format_bytes(figure.value)} {figure.origin}" if figure.value else "–"


def seconds_text(figure: Measure) -> str:
    """Return seconds with their margin, in two digits."""
    factor, unit = (1.0, "s") if figure.value >= 0.9995 else (1e3, "ms")
    value, margin = (_two_digits(factor * seconds) for seconds in (figure.value, figure.margin))
    return f"{value} ± {margin} {unit}"


def _two_digits(value: float) -> str:
    """Return a number rounded to two digits, without an exponent."""
    digits = 1 - math.floor(math.log10(value)) if value > 0 else 0
    return f"{round(value, digits):,.{max(0, digits)}f}"


def seconds_cell(figure: Measure) -> str:
    """Return seconds with margin and origin."""
    return f"{seconds_text(figure)} {figure.origin}"
