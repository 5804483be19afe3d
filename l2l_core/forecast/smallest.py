"""Which settings need the least device memory, and which of those that fit a budget are the fastest.

A search, without costs of its own: whoever asks says what a step with some settings needs, be it rehearsed, replayed or
by formula. Looked at are settings that change no result: micro-batches, layers ahead, place of the stash. More
micro-batches are smaller ones, so the search goes from one row each upwards: what it tries first is cheap, and it stops
where they no longer fit.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

from l2l_core.config import IN_MEMORY, RelayConfig
from l2l_core.forecast.from_costs import Costs, replayed
from l2l_core.forecast.memory_walk import MemoryWalk
from l2l_core.simulator import Fleet
from l2l_core.trace import format_bytes

# Of the bytes: with overlap, what copies still hold is a matter of timing, and forecasts are exact to so much.
TIMED = 0.02
SEARCHED = ("micro_batches", "ahead", "stash", "resident", "keep", "schedule")  # the least needs none of the last three


class Run(NamedTuple):
    """What is known of a step when it has been run, or replayed."""

    seconds: float
    host_bytes: int


@dataclass(frozen=True, eq=False)
class Priced:
    """A step with some settings.

    Attributes:
        config: the settings.
        device_bytes: that it needs.
        run: tells the rest, which takes longer; is asked only where it matters.
    """

    config: RelayConfig
    device_bytes: int
    run: Callable[[], Run]

    @staticmethod
    def of(
        costs: Costs,
        config: RelayConfig,
        figures: Mapping[str, Any],
        fleet: Fleet = Fleet(count=1),  # noqa: B008 - frozen
    ) -> Priced:
        """Make one from costs; `figures` are those of the device, `fleet` are the workers that make it."""

        def run() -> Run:
            trace = replayed(costs, config, figures, fleet)
            return Run(trace.span_s + costs.around_s + fleet.around_s, trace.peak_bytes("host"))

        return Priced(config, device_bytes(costs), run)

    def __reduce__(self) -> Any:
        return _known, (self.config, self.device_bytes, self._run)  # to other workers goes what it tells

    @cached_property
    def _run(self) -> Run:
        return self.run()

    @property
    def seconds(self) -> float:
        """Of the step."""
        return self._run.seconds

    @property
    def host_bytes(self) -> int:
        """What it needs on the host."""
        return self._run.host_bytes

    @property
    def budget_bytes(self) -> int:
        """A budget with which it surely fits."""
        return self.device_bytes if not self.config.ahead else math.ceil((1 + TIMED) * self.device_bytes)


def _known(config: RelayConfig, device_bytes: int, run: Run) -> Priced:
    return Priced(config, device_bytes, lambda: run)


Price = Callable[[RelayConfig], Priced | None]  # None: the step cannot be made with these settings


def device_bytes(costs: Costs) -> int:
    """Return the device bytes at the peak of a step."""
    return MemoryWalk(costs.profile).rise("device", costs.stands, {}).high


@dataclass(frozen=True, eq=False)
class WhatFits:
    """What a search has found.

    Attributes:
        asked: the settings that it began with.
        budget_bytes: of the device.
        smallest: the step that needs the least.
        fastest: of the steps that fit the budget, None if there is none.
    """

    asked: RelayConfig
    budget_bytes: int
    smallest: Priced
    fastest: Priced | None

    @property
    def settings(self) -> dict[str, Any]:
        """What to change so that the step fits; nothing if no settings help."""
        return {} if self.fastest is None else changes(self.asked, self.fastest.config)

    def __str__(self) -> str:
        least = self.smallest
        words = (
            f"The smallest budget that fits this model and batch is {format_bytes(least.budget_bytes)} "
            f"({least.budget_bytes:,} bytes), with {settings_in_words({n: getattr(least.config, n) for n in SEARCHED[:3]})}; "
            f"the budget is {format_bytes(self.budget_bytes)}."
        )
        if self.fastest is None:
            return (
                f"No settings help. {words} Give the device that much, or make big parts of the shell layers of their own "
                "(layers=[...])."
            )
        need, seconds = format_bytes(self.fastest.device_bytes), self.fastest.seconds
        return (
            f"RelayConfig({settings_in_words(self.settings)}) needs {need} and is the fastest of the settings that were found to "
            f"fit, {seconds:.2g} s a step by the forecast. {words}"
        )


def what_fits(price: Price, asked: RelayConfig, rows: int, budget_bytes: int, most_s: float = math.inf) -> WhatFits:
    """Look for settings with which a step fits.

    Args:
        price: what a step with some settings needs.
        asked: the present settings. Micro-batches are not made larger than they are in them.
        rows: of the batch.
        budget_bytes: of the device.
        most_s: after so many seconds no further settings are tried; what needs the least is found in any case.

    Raises:
        ValueError: the step cannot be made with any settings that were tried.
    """
    until_s = time.monotonic() + most_s
    known: dict[RelayConfig, Priced | None] = {}  # a price may be a rehearsal, and some settings are asked for twice

    def priced(config: RelayConfig) -> Priced | None:
        if config not in known:
            known[config] = price(config)
        return known[config]

    counts = counts_from(asked.micro_batches, rows)
    is_relay = asked.schedule == "breadth_first"  # what stays depth first is all there is, and nobody's wish
    relayed = asked if is_relay else replace(asked, schedule="breadth_first", resident=0, keep=0)
    # Without layers ahead: fewer slots and no room for what moves, so nothing needs less.
    serial = [
        _descend(priced, replace(relayed, ahead=0, resident=0, keep=0, stash=stash), counts) for stash in IN_MEMORY
    ]
    least = min((found for each in serial for found in _falling(each)), key=_size, default=None)
    if least is None:
        raise ValueError(f"no step could be made with {len(known)} settings from {asked} on")
    fitting = [least] if least.budget_bytes <= budget_bytes else []
    for config in _ways(relayed) if fitting else ():
        largest: Priced | None = None  # micro-batches: fewer of them are never slower
        for found in _descend(priced, config, counts):
            if found.budget_bytes > budget_bytes or time.monotonic() > until_s:
                break
            largest = found
        fitting += [largest] if largest is not None else []
    fastest = min(fitting, key=lambda found: found.seconds, default=None)
    return WhatFits(asked, budget_bytes, least, fastest)


def counts_from(present: int, rows: int) -> Sequence[int]:
    """Numbers of micro-batches, the most first: one row each, then about half as many each time, down to the present number."""
    doubled = present
    found = []
    while doubled < rows:
        found.append(doubled)
        doubled *= 2
    return [rows, *reversed(found)]


def _ways(asked: RelayConfig) -> list[RelayConfig]:
    """The same settings with every place of the stash, as far ahead, or a layer, or none; those that overlap first.

    With what stays on the device, and without.
    """
    aheads = sorted({asked.ahead, 1, 0}, reverse=True)
    stays = dict.fromkeys([(asked.resident, asked.keep), (0, 0)])
    return [
        replace(asked, ahead=ahead, stash=stash, resident=resident, keep=keep)
        for resident, keep in stays
        for ahead in aheads
        for stash in IN_MEMORY
    ]


def _descend(price: Price, config: RelayConfig, counts: Sequence[int]) -> Iterator[Priced]:
    """Steps with fewer and fewer micro-batches, as long as they can be made; some need more than a row each."""
    begun = False
    for count in counts:
        found = price(replace(config, micro_batches=count))
        if found is not None:
            begun = True
            yield found
        elif begun:
            return


def _falling(steps: Iterator[Priced]) -> Iterator[Priced]:
    """Steps up to the first one that needs more than one before it."""
    least = math.inf
    for step in steps:
        if step.device_bytes > least:
            return
        least = step.device_bytes
        yield step


def _size(step: Priced) -> tuple[int, int]:
    """What needs less comes first; of the same bytes, what has fewer micro-batches."""
    return step.device_bytes, step.config.micro_batches


def changes(old: RelayConfig, new: RelayConfig, names: Collection[str] = SEARCHED) -> dict[str, Any]:
    """Return what is set otherwise, with its new value."""
    return {name: getattr(new, name) for name in names if getattr(new, name) != getattr(old, name)}


def settings_in_words(settings: Mapping[str, Any]) -> str:
    """Write settings as arguments."""
    return ", ".join(f"{name}={value!r}" for name, value in settings.items())
