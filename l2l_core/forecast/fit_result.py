"""The settings that a search has found, and why: values and their words.

`relay_fit.py` finds the fastest settings, `what_fits.py` those that help where a step does not fit.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import astuple, dataclass
from functools import cached_property
from typing import Any, NamedTuple

from l2l_core.config import RelayConfig
from l2l_core.forecast.forecast import Forecast
from l2l_core.forecast.minimise import Priced
from l2l_core.schedule_rules import weight_slots
from l2l_core.trace import format_bytes

TUNABLE_SETTINGS = ("micro_batches", "ahead", "stash", "resident", "keep", "update", "schedule")
LEAST = ("micro_batches", "ahead", "stash")  # the step that needs the least keeps nothing


def changes(old: RelayConfig, new: RelayConfig, names: Collection[str] = TUNABLE_SETTINGS) -> dict[str, Any]:
    """Return the settings of these names that differ, with their new values."""
    return {name: getattr(new, name) for name in names if getattr(new, name) != getattr(old, name)}


def in_words(config: RelayConfig, names: Iterable[str]) -> str:
    """Write settings as arguments."""
    return ", ".join(f"{name}={getattr(config, name)!r}" for name in names)


class NothingFits(ValueError):
    """No settings were found with which a step fits.

    Attributes:
        smallest: what needs the least device memory; None if no step could be made at all.
    """

    def __init__(self, message: str, smallest: Priced | None) -> None:
        super().__init__(message)
        self.smallest = smallest


@dataclass(frozen=True, slots=True)
class MemoryLimits:
    """Bytes that a step may take; None without a limit.

    Attributes:
        device_bytes: on the device.
        host_bytes: on the host.
        shared_bytes: on both together, where the device computes in host memory.
    """

    device_bytes: int | None
    host_bytes: int | None
    shared_bytes: int | None = None

    @staticmethod
    def tightest(others: Sequence[MemoryLimits]) -> MemoryLimits:
        """Return the room that all of these have."""
        places = zip(*map(astuple, others), strict=True)
        return MemoryLimits(*(min((limit for limit in limits if limit is not None), default=None) for limits in places))

    @property
    def _limits(self) -> dict[str, int]:
        limits = {
            "device": self.device_bytes,
            "host": self.host_bytes,
            "device and host together": self.shared_bytes,
        }
        return {place: limit for place, limit in limits.items() if limit is not None}

    def exceeded(self, step: Priced) -> dict[str, int]:
        """Return the bytes that the step needs at each place where they are more than the limit."""
        needs = {  # worked out only where there is a limit: the bytes on the host take a replay
            "device": lambda: step.budget_bytes,
            "host": lambda: step.host_bytes,
            "device and host together": lambda: step.budget_bytes + step.host_bytes,
        }
        return {place: need for place, limit in self._limits.items() if (need := needs[place]()) > limit}

    def fits(self, step: Priced) -> bool:
        """Whether the step fits."""
        return not self.exceeded(step)

    def __str__(self) -> str:
        known = [f"{format_bytes(limit)} on the {place}" for place, limit in self._limits.items()]
        return " and ".join(known) or "room without limits"


class FasterStep(NamedTuple):
    """A step that does not fit, and how many times as fast as the chosen one it would be."""

    step: Priced
    speedup: float


@dataclass(frozen=True, eq=False, kw_only=True)
class Fit:
    """The settings that a search has found, and why these.

    Attributes:
        asked: settings that it began with.
        before: a step with these, None if there cannot be one.
        chosen: the step that is the fastest of those that fit.
        better: of those that are faster and do not fit, the one that needs least.
        room: what there was.
        layers: visits of a forward.
        forecast: of a step with the chosen settings.
        tried: number of settings that were compared.
        seconds: that the search took.
        all_tried: whether it ended by itself, and not because its time was up.
    """

    requested: RelayConfig
    baseline: Priced | None
    chosen: Priced
    faster: FasterStep | None
    limits: MemoryLimits
    layers: int
    forecast: Forecast
    tried: int
    seconds: float
    all_tried: bool

    @property
    def config(self) -> RelayConfig:
        """The settings."""
        return self.chosen.config

    @cached_property
    def settings(self) -> dict[str, Any]:
        """What of them is new."""
        return changes(self.requested, self.config)

    def __str__(self) -> str:
        return "\n".join(
            filter(
                None,
                (self._describe_choice(), self._describe_residency(), self._describe_faster(), self._describe_search()),
            )
        )

    def _describe_choice(self) -> str:
        config, forecast = self.config, self.forecast
        device, host = format_bytes(forecast.peak_device_bytes), format_bytes(forecast.peak_host_bytes)
        gain = ""
        if self.settings and self.baseline is not None:
            ratio = self.baseline.seconds / self.chosen.seconds
            gain = f", {ratio:.2f} times as fast as with {in_words(self.requested, self.settings)}" if ratio > 1 else ""
        return (
            f"RelayConfig({in_words(config, TUNABLE_SETTINGS)}): {forecast.seconds:.3g} s a step by the forecast{gain}. It needs "
            f"{device} on the device and {host} on the host, of {self.limits}."
        )

    def _describe_residency(self) -> str:
        stay = min(self.layers, weight_slots(self.config.ahead, self.config.resident))
        kept = min(self.layers, max(1, self.config.keep), stay)
        if self.config.schedule == "depth_first":
            return (
                "All weights stay on the device during a step, and micro-batches go through all layers and back one after "
                "another: a step in core."
            )
        if kept == self.layers:
            return "All weights stay on the device during a step, and nothing is recomputed: a step in core, layer by layer."
        weights = "all weights stay" if stay == self.layers else f"the weights of {stay} stay or are on their way"
        return f"Of {self.layers} layers {weights}, and {kept} keep their graphs; {self.layers - kept} are recomputed."

    def _describe_faster(self) -> str:
        if self.faster is None:
            return ""
        step, times = self.faster
        (place, need), *_ = self.limits.exceeded(step).items()
        words = in_words(step.config, changes(self.config, step.config))
        return f"Next better: {words} would be {times:.2f} times as fast and needs {format_bytes(need)} on the {place}."

    def _describe_search(self) -> str:
        rest = "" if self.all_tried else "; its time was up before all were tried"
        return f"{self.tried} settings were compared in {self.seconds:.2g} s{rest}."


@dataclass(frozen=True, eq=False)
class WhatFits:
    """Settings that fit a budget of the device, and those that need the least.

    Attributes:
        asked: the present settings.
        budget_bytes: the budget.
        smallest: the step that needs the least.
        fastest: the fastest step that fits; None if none does.
    """

    requested: RelayConfig
    budget_bytes: int
    smallest: Priced
    fastest: Priced | None

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
                f"No settings help. {words} Give the device that much, or make big parts of the shell layers of their own "
                "(layers=[...])."
            )
        return (
            f"RelayConfig({in_words(fastest.config, self.settings)}) needs {format_bytes(fastest.device_bytes)} and is the "
            f"fastest of the settings that were found to fit, {fastest.seconds:.2g} s a step by the forecast. {words}"
        )
