"""Search for the fastest settings of a relay's next step, confirmed by rehearsals."""

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

_TIMED_PASSES = 3  # of a finalist
_FINALISTS = 3  # steps that are rehearsed again: one run each does not separate them
_NOISE_FACTOR = 1.1  # factor by which noise may slow down one run
_AS_FAST = 1.03  # a smaller gain is not worth other micro-batches, which draw other random numbers, or other updates
_FASTER = 1.01  # a smaller gain is not reported


@dataclass(frozen=True, eq=False, slots=True)
class FastestSearch:
    """A search for the fastest settings that fit."""

    requested: RelayConfig
    free: Collection[str]  # names of settings that may change, of `TUNABLE_SETTINGS`
    rows: int  # of the batch
    layers: int  # visits of a forward
    limits: MemoryLimits
    has_link: bool = True  # copies overlap with compute; else they take its cores

    def fastest(self, price: Price, until_s: float = math.inf) -> Minimum:
        """Find the fastest steps that fit.

        Eager updates, which need less of the host, are tried only if nothing else fits: a step that fails may then be torn.
        """
        space, fits = self._space(), self.limits.fits
        found = minimise(lambda config: price(self._complete(config)), space, fits, self.cost, _NOISE_FACTOR, until_s)
        if found.steps or "update" not in self.free or self.requested.update != "deferred":
            return found
        return replace(self, requested=replace(self.requested, update="eager")).fastest(price, until_s)

    def cost(self, step: Priced) -> float:
        """Return the seconds by which steps are compared, higher if micro-batches or updates are not as requested."""
        same = not changes(self.requested, step.config, ("micro_batches", "update"))
        return step.seconds if same else _AS_FAST * step.seconds

    def smaller(self, config: RelayConfig) -> RelayConfig | None:
        """Return the settings with one kept graph less, or one weight; None if there are none."""
        if config.schedule == "depth_first":
            return replace(config, schedule="breadth_first") if "schedule" in self.free else None
        name = next((name for name in ("keep", "resident") if name in self.free and getattr(config, name)), None)
        return None if name is None else replace(config, **{name: getattr(config, name) - 1})

    def _space(self) -> Space:
        """Return the choices: depth first, which keeps everything, before relays, those with overlap first.

        Numbers of micro-batches: the present one, then from one row each, which is rehearsed soonest.
        """
        start, free = self.requested, self.free
        present = min(start.micro_batches, self.rows)
        relays: list[Choice] = [
            {"schedule": "breadth_first", "ahead": ahead, "stash": place}
            for ahead in ([*sorted({start.ahead, 1, 2} - {0}), 0] if "ahead" in free else [start.ahead])
            for place in (MEMORY_STASHES if "stash" in free else [start.stash])
            if "schedule" in free or start.schedule == "breadth_first"
        ]
        tiers = [[choice] for choice in relays] if {"keep", "resident"} <= {*free} else [relays]
        # The graph of the last layer exists in any case: keeping one is keeping none.
        growing = {"keep": [0, *range(2, self.layers + 1)], "resident": range(self.layers)}
        return Space(
            start=start,
            counts=[*dict.fromkeys([present, *counts_from(1, self.rows)])] if "micro_batches" in free else [present],
            tiers=[self._depth_first_choices(), *tiers],
            growing=[[{name: value} for value in values] for name, values in growing.items() if name in free],
        )

    def _depth_first_choices(self) -> list[Choice]:
        """List the depth-first choices that change no fixed setting."""
        fixed = {*TUNABLE_SETTINGS}.difference(self.free)
        if self.requested.schedule == "depth_first":
            fixed -= {"keep", "resident"}  # they follow from the schedule
        aheads = [self.requested.ahead]
        if "ahead" in self.free:
            aheads = [max(1, self.requested.ahead)] + [0] * (not self.has_link)
        choices: list[Choice] = [{"schedule": "depth_first", "stash": "device", "ahead": ahead} for ahead in aheads]
        whole = [(choice, self._complete(replace(self.requested, **choice))) for choice in choices]
        return [choice for choice, config in whole if not changes(self.requested, config, fixed)]

    def _complete(self, config: RelayConfig) -> RelayConfig:
        """Return the settings with resident weights for all kept graphs, and none beyond the layers."""
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
    """Find the fastest settings with which a step on this batch fits.

    Arguments and errors are those of `Relay.fit`. Of several workers in `cluster` one searches for all; `rows` is the size of
    the smallest batch.
    """
    began_s = time.monotonic()
    until_s, device = began_s + time_limit_s, rehearsal.parts.device
    free = _tunable_settings(requested, fixed, rehearsal.store.has_hooks, cluster.count)
    figures = device.figures()
    prices = StepCostModel(rehearsal, batch, figures, free_bytes(device), cluster)
    baseline = prices(replace(requested, resident=0, keep=0, schedule="breadth_first")) and prices(requested)
    search = FastestSearch(requested, free, rows, prices.visits, limits, has_link(figures))
    found = search.fastest(prices, until_s)
    tried = len(prices.known)
    exact = dict(_rehearse_again(finalists(search, prices, found.steps, until_s), search, prices, until_s))
    if not exact:
        raise _nothing_fits_error(prices, search)
    chosen = min(exact, key=search.cost)
    first_priced = prices(chosen.config)  # priced as the others were: the second rehearsal may be faster by chance
    return Fit(
        requested=requested,
        baseline=baseline,
        chosen=chosen,
        faster=None if first_priced is None else faster_than(first_priced, prices.known.values(), limits),
        limits=limits,
        layers=prices.visits,
        forecast=forecast_costs(exact[chosen], chosen.config, figures, limits.host_bytes, cluster),
        tried=tried,
        seconds=time.monotonic() - began_s,
        all_tried=found.all_tried,
    )


def finalists(search: FastestSearch, price: Price, steps: list[Priced], until_s: float = math.inf) -> list[Priced]:
    """Choose the steps to rehearse again: the fastest, and others from different rehearsals that may be as fast."""
    if time.monotonic() > until_s:
        return steps[:1]
    by_kind: dict[RelayConfig, Priced] = {}
    for step in steps:
        if step.seconds < _NOISE_FACTOR * steps[0].seconds:
            by_kind.setdefault(kind_of(step.config), step)
    chosen = [*by_kind.values()][:_FINALISTS]
    # Deferred updates keep a failing step whole; if they were requested, eager ones are only a last resort.
    if chosen and "update" in search.free and chosen[0].config.update == "eager":
        deferred = price(replace(chosen[0].config, update="deferred"))
        chosen += [deferred] if deferred is not None and search.limits.fits(deferred) else []
    return chosen


def _rehearse_again(
    steps: list[Priced], search: FastestSearch, prices: StepCostModel, until_s: float
) -> Iterator[tuple[Priced, ForecastCosts]]:
    """Rehearse steps; in place of one that does not fit, yield the next smaller one that does."""
    for step in steps:
        config: RelayConfig | None = step.config
        while config is not None:
            costs = prices.rehearse(config, _TIMED_PASSES if time.monotonic() < until_s else 1)
            if costs is not None and search.limits.fits(exact := prices.price_of(costs, config)):
                yield exact, costs
                break
            config = search.smaller(config)


def faster_than(chosen: Priced, known: Iterable[Priced | None], limits: MemoryLimits) -> tuple[Priced, float] | None:
    """Return the step that lacks the fewest bytes of all faster ones that do not fit, and its relative speed."""
    others = [step for step in known if step is not None and not limits.fits(step)]
    faster = [step for step in others if _FASTER * step.seconds < chosen.seconds]
    least = min(faster, key=lambda step: sum(limits.exceeded(step).values()), default=None)
    return None if least is None else (least, chosen.seconds / least.seconds)


def layers_within(rehearsal: Rehearsal, batch: Batch, config: RelayConfig, nbytes: int) -> int:
    """Return how many of the last layers can keep their graphs in `nbytes` of the device.

    The bytes are those beyond a step that keeps none. Two steps are rehearsed, one that keeps none and one that keeps as many as
    there are slots for weights. Errors of the model on the batch are raised.
    """
    prices = StepCostModel(rehearsal, batch, rehearsal.parts.device.figures(), free_bytes(rehearsal.parts.device))
    none = prices(replace(config, keep=0))
    if none is None:
        raise prices.errors[0]
    most, limit_bytes = min(prices.visits, weight_slots(config.ahead, config.resident)), none.device_bytes + nbytes
    space = Space(
        start=config,
        counts=[config.micro_batches],
        growing=[[{"keep": keep} for keep in (0, *range(2, most + 1))]],  # the last graph exists in any case
    )
    found = minimise(prices, space, lambda step: step.device_bytes <= limit_bytes, lambda step: -int(step.config.keep))
    return int(found.steps[0].config.keep)


def memory_limits_of(
    device: Device, host: Ledger, device_bytes: int | None, host_bytes: int | None, sharers: int = 1
) -> MemoryLimits:
    """Return the requested limits; by default the device's budget, and the free memory of the host.

    Free host memory is divided among `sharers` relays, this one included.

    Raises:
        ValueError: a number of bytes that is not positive, or more than the device has.
    """
    for name, value in (("device_bytes", device_bytes), ("host_bytes", host_bytes)):
        if value is not None and not value > 0:
            raise ValueError(f"{name}={value!r}: must be positive, or None for all that is available")
    budget = device.ledger.limit_bytes
    if budget is not None and device_bytes is not None and device_bytes > budget:
        raise ValueError(
            f"device_bytes={device_bytes!r}: {device.name} has a budget of {budget:,} bytes; give at most that, or make the "
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
        raise ValueError(f"fixed names {unknown[0]!r}: a search changes only {', '.join(TUNABLE_SETTINGS)}")
    if has_pre_hooks or requested.max_grad_norm is not None:  # both may need all gradients at once
        held.add("update")
    if workers > 1:  # depth first is for a single worker
        held.add("schedule")
    return [name for name in TUNABLE_SETTINGS if name not in held]


def _nothing_fits_error(prices: StepCostModel, search: FastestSearch) -> Exception:
    """Return an error with the needs of the smallest step; if no step can run, the error of the model."""
    requested, limits = search.requested, search.limits
    least = least_of(prices, requested, counts_from(requested.micro_batches, search.rows))
    if least is None:
        return prices.errors[0]
    named = [*LEAST, "update", *changes(requested, least.config, ["schedule"])]
    remedies = {
        "host": "use an optimizer with less state, or a machine with more memory",
        "device": "give the device that much, or make large parts of the shell separate layers (layers=[...])",
    }
    lacking = " ".join(limits.exceeded(least))
    remedy = next((words for place, words in remedies.items() if place in lacking), "hold fewer settings fixed")
    return NothingFits(
        f"No settings were found with which a step on this batch fits {limits}. The smallest step needs "
        f"{format_bytes(least.budget_bytes)} ({least.budget_bytes:,} bytes) on the device and "
        f"{format_bytes(least.host_bytes)} on the host, with {in_words(least.config, named)}. Remedy: {remedy}",
        least,
    )
