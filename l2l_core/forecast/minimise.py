"""Search for settings: the cheapest step of a space that fits a budget, given a function that prices steps."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from operator import attrgetter
from typing import Any, NamedTuple

from l2l_core.config import RelayConfig

# Relative error of forecast bytes with overlap, where the bytes held by copies depend on timing.
TIMED = 0.02


class Run(NamedTuple):
    """Figures of a step that need a run or a simulation."""

    seconds: float
    host_bytes: int


@dataclass(frozen=True, eq=False)
class Priced:
    """A step with its settings and needs."""

    config: RelayConfig
    device_bytes: int  # at the peak
    run: Callable[[], Run]  # returns the other figures; called at most once, when they are needed

    def __reduce__(self) -> Any:
        return _with_run, (self.config, self.device_bytes, self._run)  # other workers get the figures

    @cached_property
    def _run(self) -> Run:
        return self.run()

    @property
    def seconds(self) -> float:
        """Seconds of the step."""
        return self._run.seconds

    @property
    def host_bytes(self) -> int:
        """Host memory at the peak."""
        return self._run.host_bytes

    @property
    def budget_bytes(self) -> int:
        """A device budget that certainly suffices."""
        return self.device_bytes if not self.config.ahead else math.ceil((1 + TIMED) * self.device_bytes)


def _with_run(config: RelayConfig, device_bytes: int, run: Run) -> Priced:
    return Priced(config, device_bytes, lambda: run)


Price = Callable[[RelayConfig], Priced | None]  # None: the step cannot run, or certainly does not fit
Choice = Mapping[str, Any]  # settings by name


@dataclass(frozen=True, kw_only=True)
class Space:
    """Settings to search. Each choice replaces some of `start`."""

    start: RelayConfig
    counts: Sequence[int]  # numbers of micro-batches, in search order
    # Choices whose bytes have no order (place of the stash, layers ahead, schedule), the most promising first.
    tiers: Sequence[Sequence[Choice]] = (({},),)
    # By setting (kept graphs, resident weights): each choice needs no fewer bytes than the one before, and costs no more.
    growing: Sequence[Sequence[Choice]] = ()


class Minimum(NamedTuple):
    """Steps that fit, the cheapest first; `all_tried` is False if the time ran out before the search ended."""

    steps: list[Priced]
    all_tried: bool


def minimise(
    price: Price,
    space: Space,
    fits: Callable[[Priced], bool] | None,
    cost: Callable[[Priced], float] = attrgetter("seconds"),
    chance: float = 1.0,
    until_s: float = math.inf,
) -> Minimum:
    """Search a space for the cheapest step that fits.

    Every step returned fits by its price, and the first one is the cheapest of the space if these orders hold:

    - Choices of `growing` are ordered as in `Space`. If the step with the least of all does not fit, no other does; if the one
      with the most fits, none is cheaper; and its cost is a lower bound for all. If that is a gain, the longest range is halved.
    - Fewer micro-batches, which are larger, need no fewer bytes: a choice of `tiers` that does not fit with some number of them
      is not tried with fewer.
    - With each number of micro-batches a choice of `tiers` bounds the cost of later tiers. They are skipped if its step with
      the most of all fits, or if its bound is no gain and nothing else was found.

    Evaluations for each choice of `tiers` and number of micro-batches: 1 without `growing`, 2 log2(n) + 2 with one setting of
    n choices, about 3 (n + m) at most with two; bounds skip most of them.

    Args:
        price: returns the needs of a step. Some settings are priced twice, so it should cache.
        fits: returns True for a step within the budget. None: for a step that costs no more than any step found before.
        chance: factor by which noise may raise a cost. Parts of the space whose bound is up to that factor above the best so
            far are searched, too.
        until_s: a time of `time.monotonic`; later, nothing more is tried once something was found.
    """
    search = _Search(price, space, fits, cost, chance, until_s)
    ended = set[int]()
    for tier in space.tiers:
        ended |= {count for choice in tier for count in search.try_counts(choice, ended)}
    return Minimum(sorted(search.found, key=cost), search.all_tried)


@dataclass(eq=False)
class _Search:
    """Invariant: all steps in `found` fit, and `least` is the cost of the cheapest of them."""

    price: Price
    space: Space
    fits: Callable[[Priced], bool] | None  # as in `minimise`
    cost: Callable[[Priced], float]
    chance: float
    until_s: float
    found: dict[Priced, None] = field(default_factory=dict)
    least: float = math.inf
    all_tried: bool = True

    def try_counts(self, choice: Choice, ended: Collection[int]) -> Iterator[int]:
        """Try a choice with all numbers of micro-batches; yield those with which no later tier can gain."""
        growing = self.space.growing
        low, high = tuple(0 for _ in growing), tuple(len(choices) - 1 for choices in growing)
        failed = made = 0
        for count in self.space.counts:
            if count <= failed or count in ended:
                continue
            if self.found and time.monotonic() > self.until_s:
                self.all_tried = False
                return
            start = replace(self.space.start, micro_batches=count, **choice)
            smallest = self._priced(start, low)
            if smallest is None:  # some models need several rows, and some devices have no room for many
                failed = count if made > count else failed
                continue
            made = max(made, count)
            if not self._fits(smallest):
                failed = count
                continue
            self._try_between(start, low, high)
            largest, new = self._priced(start, high), all(step.config.micro_batches != count for step in self.found)
            if largest in self.found or (new and not self._promises(largest)):
                yield count

    def _try_between(self, start: RelayConfig, low: tuple[int, ...], high: tuple[int, ...]) -> None:
        """Find the cheapest steps with growing settings between the choices `low` and `high`."""
        smallest = self._priced(start, low)
        if smallest is None or not self._fits(smallest):
            return
        largest = self._priced(start, high)
        if largest is not None and self._fits(largest):
            self.found[largest] = None
            self.least = min(self.least, self.cost(largest))
        elif self._promises(largest):
            axis = max(range(len(low)), key=lambda axis: high[axis] - low[axis])
            middle = (low[axis] + high[axis] + 1) // 2  # above `low`, since the two steps differ
            self._try_between(start, (*low[:axis], middle, *low[axis + 1 :]), high)
            self._try_between(start, low, (*high[:axis], middle - 1, *high[axis + 1 :]))

    def _fits(self, step: Priced) -> bool:
        return self.cost(step) <= self.least if self.fits is None else self.fits(step)

    def _promises(self, largest: Priced | None) -> bool:
        return largest is None or self.cost(largest) < self.chance * self.least

    def _priced(self, start: RelayConfig, at: tuple[int, ...]) -> Priced | None:
        for choices, index in zip(self.space.growing, at, strict=True):
            start = replace(start, **choices[index])
        return self.price(start)
