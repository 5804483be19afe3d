"""Results of searches for settings: memory limits, the settings found, and their description for users."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import astuple, dataclass
from functools import cached_property
from typing import Any

from l2l_core.config import RelayConfig
from l2l_core.forecast.forecast import Forecast
from l2l_core.forecast.minimise import Priced
from l2l_core.schedule_rules import weight_slots
from l2l_core.trace import format_bytes

TUNABLE_SETTINGS = ("micro_batches", "ahead", "stash", "resident", "keep", "update", "schedule")
LEAST = ("micro_batches", "ahead", "stash")  # settings of the smallest step, which keeps nothing


def changes(old: RelayConfig, new: RelayConfig, names: Collection[str] = TUNABLE_SETTINGS) -> dict[str, Any]:
    """Return the settings of these names that differ, with their new values."""
    return {name: getattr(new, name) for name in names if getattr(new, name) != getattr(old, name)}


def in_words(config: RelayConfig, names: Iterable[str]) -> str:
    """Format settings as arguments."""
    return ", ".join(f"{name}={getattr(config, name)!r}" for name in names)


class NothingFits(ValueError):
    """Raised when a search finds no settings with which a step fits.

    Attributes:
        smallest: the step with the least device memory; None if none could run.

    Example:
        >>> from l2l_core import NothingFits
        >>> try:
        ...     relay.fit(batch, device_bytes=1000, fixed=["micro_batches"])
        ... except NothingFits as error:
        ...     print(error)
        No settings were found with which a step on this batch fits 1 kB on the device ...
    """

    def __init__(self, message: str, smallest: Priced | None) -> None:
        super().__init__(message)
        self.smallest = smallest


@dataclass(frozen=True, slots=True)
class MemoryLimits:
    """Bytes available to a step; None without a limit."""

    device_bytes: int | None
    host_bytes: int | None
    shared_bytes: int | None = None  # on both together, if the device computes in host memory

    @staticmethod
    def tightest(others: Sequence[MemoryLimits]) -> MemoryLimits:
        """Return the smallest of each limit."""
        places = zip(*map(astuple, others), strict=True)
        return MemoryLimits(*(min((limit for limit in limits if limit is not None), default=None) for limits in places))

    @property
    def _limits(self) -> dict[str, int]:
        limits = zip(("device", "host", "device and host together"), astuple(self), strict=True)
        return {place: limit for place, limit in limits if limit is not None}

    def exceeded(self, step: Priced) -> dict[str, int]:
        """Return by place the bytes that the step needs where they exceed the limit."""
        needs = {  # functions, since the bytes on the host need a simulation
            "device": lambda: step.budget_bytes,
            "host": lambda: step.host_bytes,
            "device and host together": lambda: step.budget_bytes + step.host_bytes,
        }
        return {place: need for place, limit in self._limits.items() if (need := needs[place]()) > limit}

    def fits(self, step: Priced) -> bool:
        """Return True if the step fits."""
        return not self.exceeded(step)

    def __str__(self) -> str:
        words = [f"{format_bytes(limit)} on the {place}" for place, limit in self._limits.items()]
        return " and ".join(words) or "memory without limits"


@dataclass(frozen=True, eq=False, kw_only=True)
class Fit:
    """Settings found by a search, and the reasons.

    Attributes:
        requested: settings at the start.
        baseline: a step with these, None if it cannot run.
        chosen: the fastest step that fits.
        faster: of the faster steps that do not fit, the one that lacks the fewest bytes, and its relative speed.
        limits: available memory.
        layers: visits of a forward.
        forecast: of a step with the chosen settings.
        tried: number of settings compared.
        seconds: of the search.
        all_tried: False if the time ran out before the search ended.

    Example:
        See `Relay.fit`.
    """

    requested: RelayConfig
    baseline: Priced | None
    chosen: Priced
    faster: tuple[Priced, float] | None
    limits: MemoryLimits
    layers: int
    forecast: Forecast
    tried: int
    seconds: float
    all_tried: bool

    @property
    def config(self) -> RelayConfig:
        """The chosen settings."""
        return self.chosen.config

    @cached_property
    def settings(self) -> dict[str, Any]:
        """Chosen settings that differ from the requested ones."""
        return changes(self.requested, self.config)

    def __str__(self) -> str:
        forecast = self.forecast
        device, host = format_bytes(forecast.peak_device_bytes), format_bytes(forecast.peak_host_bytes)
        gain = ""
        if self.settings and self.baseline is not None and (ratio := self.baseline.seconds / self.chosen.seconds) > 1:
            gain = f", {ratio:.2f} times as fast as with {in_words(self.requested, self.settings)}"
        lines = [
            f"RelayConfig({in_words(self.config, TUNABLE_SETTINGS)}): {forecast.seconds:.3g} s a step by the forecast{gain}. It "
            f"needs {device} on the device and {host} on the host, of {self.limits}.",
            self._describe_residency(),
        ]
        if self.faster is not None:
            step, speedup = self.faster
            (place, need), *_ = self.limits.exceeded(step).items()
            words = f"{in_words(step.config, changes(self.config, step.config))} would be {speedup:.2f} times as fast"
            lines.append(f"Next better: {words} and needs {format_bytes(need)} on the {place}.")
        rest = "" if self.all_tried else "; the time ran out before all were tried"
        return "\n".join([*lines, f"{self.tried} settings were compared in {self.seconds:.2g} s{rest}."])

    def _describe_residency(self) -> str:
        stay = min(self.layers, weight_slots(self.config.ahead, self.config.resident))
        kept = min(self.layers, max(1, int(self.config.keep)), stay)
        if self.config.schedule == "depth_first":
            return (
                "All weights stay on the device during a step, and micro-batches go through all layers and back one after "
                "another: a step in core."
            )
        if kept == self.layers:
            return "All weights stay on the device during a step, and nothing is recomputed: a step in core, layer by layer."
        weights = "all weights stay" if stay == self.layers else f"the weights of {stay} stay or are on their way"
        return f"Of {self.layers} layers {weights}, and {kept} keep their graphs; {self.layers - kept} are recomputed."


@dataclass(frozen=True, eq=False)
class WhatFits:
    """Settings that fit a device budget, and those that need the least."""

    requested: RelayConfig  # the present settings
    budget_bytes: int
    smallest: Priced  # the step that needs the least
    fastest: Priced | None  # the fastest step that fits

    @property
    def settings(self) -> dict[str, Any]:
        """Settings to change so that the step fits; empty if none help."""
        return {} if self.fastest is None else changes(self.requested, self.fastest.config)

    def __str__(self) -> str:
        least, fastest = self.smallest, self.fastest
        words = (
            f"The smallest budget that fits this model and batch is {format_bytes(least.budget_bytes)} "
            f"({least.budget_bytes:,} bytes), with {in_words(least.config, LEAST)}; the budget is "
            f"{format_bytes(self.budget_bytes)}."
        )
        if fastest is None:
            return (
                f"No settings help. {words} Give the device that much, or make large parts of the shell separate layers "
                "(layers=[...])."
            )
        return (
            f"RelayConfig({in_words(fastest.config, self.settings)}) needs {format_bytes(fastest.device_bytes)} and is the "
            f"fastest of the settings that were found to fit, {fastest.seconds:.2g} s a step by the forecast. {words}"
        )
