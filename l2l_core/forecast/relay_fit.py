"""The fastest settings for a relay's next step: the space, the room, and the rehearsals that confirm the choice."""

from __future__ import annotations

import math
import time
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, replace

from l2l_core.batches import Batch
from l2l_core.config import MEMORY_STASHES, RelayConfig
from l2l_core.devices import Device, Ledger, free_bytes
from l2l_core.forecast.cost_forecast import ForecastCosts, forecast_costs
from l2l_core.forecast.fit_result import (
    LEAST,
    TUNABLE_SETTINGS,
    FasterStep,
    Fit,
    MemoryLimits,
    NothingFits,
    changes,
    in_words,
)
from l2l_core.forecast.minimise import Choice, Minimum, Price, Priced, Space, minimise
from l2l_core.forecast.rehearsal import Rehearsal
from l2l_core.forecast.step_cost_model import StepCostModel, kind_of
from l2l_core.forecast.what_fits import counts_from, least_of
from l2l_core.schedule_rules import has_link, weight_slots
from l2l_core.simulator import Cluster
from l2l_core.trace import format_bytes

_TIMED_PASSES = 3  # timed ones, of the steps that are rehearsed once more
_FINALISTS = 3  # steps that are rehearsed once more: one run each is too little to tell them apart
_CHANCE = 1.1  # factor by which one run of a step may seem slower than it is
_AS_FAST = 1.03  # a smaller gain is not worth other micro-batches, which draw other random numbers, or other updates
_FASTER = 1.01  # a smaller gain is not reported


@dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class Wanted:
    """A search for the fastest settings.

    Attributes:
        asked: the settings to begin with; those that are not `free` stay as they are.
        free: names of settings that may be changed, of `FREE`.
        rows: rows of the batch.
        layers: visits of a forward.
        room: bytes that a step may take.
        has_link: whether copies take time that compute need not wait for. Without a link they take the cores of compute.
    """

    requested: RelayConfig
    free: Collection[str]
    rows: int
    layers: int
    room: MemoryLimits
    has_link: bool = True

    def fastest(self, price: Price, until_s: float = math.inf) -> Minimum:
        """Find the fastest steps that fit.

        Eager updates need less of the host. They are the way out, and no more, since a step that fails may be torn then.
        """
        found = minimise(
            lambda config: price(self._whole(config)), self._space(), self.room.fits, self.cost, _CHANCE, until_s
        )
        if found.steps or "update" not in self.free or self.requested.update == "eager":
            return found
        return replace(self, asked=replace(self.requested, update="eager")).fastest(price, until_s)

    def cost(self, step: Priced) -> float:
        """Return the seconds by which steps are compared; other micro-batches and updates than were asked for cost some more."""
        same = not changes(self.requested, step.config, ("micro_batches", "update"))
        return step.seconds if same else _AS_FAST * step.seconds

    def smaller(self, config: RelayConfig) -> RelayConfig | None:
        """Return the settings of the next smaller step: one kept graph less, or one weight; None if there is none."""
        if config.schedule == "depth_first":
            return replace(config, schedule="breadth_first") if "schedule" in self.free else None
        name = next((name for name in ("keep", "resident") if name in self.free and getattr(config, name)), None)
        return None if name is None else replace(config, **{name: getattr(config, name) - 1})

    def _space(self) -> Space:
        """List the choices: depth first, where everything stays, before relays, of which those that overlap come first.

        Numbers of micro-batches: the present one, then from one row each, which is rehearsed soonest.
        """
        asked, free = self.requested, self.free
        present = min(asked.micro_batches, self.rows)
        relays: list[Choice] = [
            {"schedule": "breadth_first", "ahead": ahead, "stash": place}
            for ahead in ([*sorted({asked.ahead, 1, 2} - {0}), 0] if "ahead" in free else [asked.ahead])
            for place in (MEMORY_STASHES if "stash" in free else [asked.stash])
            if "schedule" in free or asked.schedule == "breadth_first"
        ]
        tiers = [[choice] for choice in relays] if {"keep", "resident"} <= {*free} else [relays]
        # The graph of the last layer is there anyhow: keeping one is keeping none.
        growing = {"keep": [0, *range(2, self.layers + 1)], "resident": range(self.layers)}
        return Space(
            start=asked,
            counts=[*dict.fromkeys([present, *counts_from(1, self.rows)])] if "micro_batches" in free else [present],
            tiers=[self._in_core(), *tiers],
            growing=[[{name: value} for value in values] for name, values in growing.items() if name in free],
        )

    def _in_core(self) -> list[Choice]:
        """List the ways to go depth first that leave the settings that are not free as they are."""
        held = {*TUNABLE_SETTINGS}.difference(self.free)
        if self.requested.schedule == "depth_first":
            held -= {"keep", "resident"}  # they follow from the schedule
        aheads = (
            [max(1, self.requested.ahead)] + [0] * (not self.has_link)
            if "ahead" in self.free
            else [self.requested.ahead]
        )
        ways: list[Choice] = [{"schedule": "depth_first", "stash": "device", "ahead": ahead} for ahead in aheads]
        return [way for way in ways if not changes(self.requested, self._whole(replace(self.requested, **way)), held)]

    def _whole(self, config: RelayConfig) -> RelayConfig:
        """Add the weights that must stay for the graphs that are kept, and take away those beyond the layers."""
        if config.schedule == "depth_first" or "resident" not in self.free:
            return config.for_layers(self.layers)
        slots = weight_slots(config.ahead)
        resident = max(config.resident, int(config.keep) - slots)
        return replace(config, resident=max(0, min(resident, self.layers - slots)))


def fit_step(
    rehearsal: Rehearsal,
    batch: Batch,
    requested: RelayConfig,
    fixed: Iterable[str],
    limits: MemoryLimits,
    time_limit_s: float,
    rows: int,
    cluster: Cluster,
) -> Fit:
    """Look for the fastest settings with which a step on this batch fits.

    Arguments and errors are those of `Relay.fit`; `rehearsal` has the relay's parts. Of several workers, which `fleet` is, one
    looks for all: the smallest batch has so many `rows`.
    """
    began_s = time.monotonic()
    free, figures = (
        _tunable_settings(requested, fixed, rehearsal.store.has_hooks, cluster.count),
        rehearsal.parts.device.figures(),
    )
    prices = StepCostModel(rehearsal, batch, figures, free_bytes(rehearsal.parts.device), cluster)
    before = prices(replace(requested, resident=0, keep=0, schedule="breadth_first")) and prices(requested)
    wanted = Wanted(
        requested=requested, free=free, rows=rows, layers=prices.visits, room=limits, has_link=has_link(figures)
    )
    until_s = began_s + time_limit_s
    found = wanted.fastest(prices, until_s)
    tried = len(prices.known)
    exact = dict(_rehearsed_again(finalists(wanted, prices, found.steps, until_s), wanted, prices, until_s))
    if not exact:
        raise _nothing_fits_error(prices, wanted)
    chosen = min(exact, key=wanted.cost)
    first_priced = prices(chosen.config)  # as the others were: rehearsed once more, it may seem faster by chance
    return Fit(
        requested=requested,
        baseline=before,
        chosen=chosen,
        faster=None if first_priced is None else better_than(first_priced, prices.known.values(), limits),
        limits=limits,
        layers=prices.visits,
        forecast=forecast_costs(exact[chosen], chosen.config, figures, limits.host_bytes, cluster),
        tried=tried,
        seconds=time.monotonic() - began_s,
        all_tried=found.all_tried,
    )


def finalists(wanted: Wanted, price: Price, steps: list[Priced], until_s: float = math.inf) -> list[Priced]:
    """Choose the steps that are worth another rehearsal: the fastest, and those rehearsed apart that may be as fast.

    What stays on the device was priced from the same rehearsals, so among those one is enough.
    """
    if time.monotonic() > until_s:
        return steps[:1]
    apart: dict[RelayConfig, Priced] = {}
    for step in steps:
        if step.seconds < _CHANCE * steps[0].seconds:
            apart.setdefault(kind_of(step.config), step)
    chosen = [*apart.values()][:_FINALISTS]
    # Deferred updates keep steps whole. Where they were asked for, eager ones are a way out alone.
    if chosen and "update" in wanted.free and chosen[0].config.update == "eager":
        deferred = price(replace(chosen[0].config, update="deferred"))
        chosen += [deferred] if deferred is not None and wanted.room.fits(deferred) else []
    return chosen


def _rehearsed_again(
    steps: list[Priced], wanted: Wanted, prices: StepCostModel, until_s: float
) -> Iterator[tuple[Priced, ForecastCosts]]:
    """Rehearse steps as they are; one that does not fit after all gives way to one that is a little smaller."""
    for step in steps:
        config: RelayConfig | None = step.config
        while config is not None:
            costs = prices.rehearse(config, _TIMED_PASSES if time.monotonic() < until_s else 1)
            if costs is not None and wanted.room.fits(exact := prices.cost_of(costs, config)):
                yield exact, costs
                break
            config = wanted.smaller(config)


def better_than(chosen: Priced, known: Iterable[Priced | None], room: MemoryLimits) -> FasterStep | None:
    """Find, of the steps that are faster than the chosen one and do not fit, the one that lacks least."""
    others = [step for step in known if step is not None and not room.fits(step)]
    faster = [step for step in others if _FASTER * step.seconds < chosen.seconds]
    least = min(faster, key=lambda step: sum(room.exceeded(step).values()), default=None)
    return None if least is None else FasterStep(least, chosen.seconds / least.seconds)


def layers_within(rehearsal: Rehearsal, batch: Batch, config: RelayConfig, nbytes: int) -> int:
    """Count the last layers whose kept graphs make a step on this batch take at most `nbytes` more of the device.

    Two steps are rehearsed, one that keeps none and one that keeps as many as there are slots for weights.

    Raises:
        Whatever the model raises on the batch.
    """
    prices = StepCostModel(rehearsal, batch, rehearsal.parts.device.figures(), free_bytes(rehearsal.parts.device))
    none = prices(replace(config, keep=0))
    if none is None:
        raise prices.errors[0]
    most, limit_bytes = min(prices.visits, weight_slots(config.ahead, config.resident)), none.device_bytes + nbytes
    space = Space(
        start=config,
        counts=[config.micro_batches],
        growing=[[{"keep": keep} for keep in (0, *range(2, most + 1))]],  # the last graph is there anyhow
    )
    found = minimise(prices, space, lambda step: step.device_bytes <= limit_bytes, lambda step: -int(step.config.keep))
    return int(found.steps[0].config.keep)


def memory_limits_of(
    device: Device, host: Ledger, device_bytes: int | None, host_bytes: int | None, sharers: int = 1
) -> MemoryLimits:
    """Say what a step may take: what was asked for, else the device's budget, and of the host what is free now.

    So many `neighbours`, this relay among them, share what is free of the host.

    Raises:
        ValueError: a number of bytes that is not positive, or more than the device has.
    """
    for name, value in (("device_bytes", device_bytes), ("host_bytes", host_bytes)):
        if value is not None and not value > 0:
            raise ValueError(f"{name}={value!r}: must be positive, or None for what there is")
    budget = device.ledger.limit_bytes
    if budget is not None and device_bytes is not None and device_bytes > budget:
        raise ValueError(
            f"device_bytes={device_bytes!r}: {device.name} has a budget of {budget:,} bytes; ask for at most that, or make the "
            "relay on a device with more"
        )
    free_host = free_bytes(None) // sharers + host.total
    if device.in_host_memory:
        return MemoryLimits(device_bytes or budget, host_bytes, free_host)
    return MemoryLimits(device_bytes or budget or free_bytes(device), host_bytes or free_host)


def _tunable_settings(requested: RelayConfig, fixed: Iterable[str], has_pre_hooks: bool, workers: int) -> list[str]:
    if isinstance(fixed, str):
        raise TypeError(f"fixed={fixed!r} is text: give names, as [{fixed!r}]")
    held = {*fixed}
    if unknown := sorted(held.difference(TUNABLE_SETTINGS)):
        raise ValueError(
            f"fixed names {unknown[0]!r}: a search changes {', '.join(TUNABLE_SETTINGS)}, and nothing else"
        )
    if has_pre_hooks or requested.max_grad_norm is not None:  # both may need all gradients at once
        held.add("update")
    if workers > 1:  # who goes depth first trains alone
        held.add("schedule")
    return [name for name in TUNABLE_SETTINGS if name not in held]


def _nothing_fits_error(cost_model: StepCostModel, wanted: Wanted) -> Exception:
    """Say what the step that needs least would need; if no step can be made, what the model said to it."""
    asked = wanted.requested
    least = least_of(cost_model, asked, counts_from(asked.micro_batches, wanted.rows))
    if least is None:
        return cost_model.errors[0]
    named = [*LEAST, "update", *changes(asked, least.config, ["schedule"])]
    remedies = {
        "host": "take an optimizer with less state, or a machine with more memory",
        "device": "give the device that much, or make big parts of the shell layers of their own (layers=[...])",
    }
    lacking = " ".join(wanted.room.exceeded(least))
    remedy = next((words for place, words in remedies.items() if place in lacking), "hold fewer settings fixed")
    return NothingFits(
        f"No settings were found with which a step on this batch fits {wanted.room}. What needs least needs "
        f"{format_bytes(least.budget_bytes)} ({least.budget_bytes:,} bytes) on the device and "
        f"{format_bytes(least.host_bytes)} on the host, with {in_words(least.config, named)}. Remedy: {remedy}",
        least,
    )
