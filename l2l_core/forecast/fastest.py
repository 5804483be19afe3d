"""The search for the fastest settings that fit. Like `smallest.py`, it has no costs of its own: a price says what a step needs.

For each number of micro-batches it first finds what of the weights and graphs can stay on the device.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from l2l_core.config import IN_MEMORY, RelayConfig
from l2l_core.forecast.fit import FREE, Better, Room
from l2l_core.forecast.smallest import Price, Priced, changes, counts_from
from l2l_core.rules import weight_slots

_AS_FAST = 1.03  # who gains less is not worth other micro-batches, which draw other random numbers, or other updates
_FASTER = 1.01  # less is not told as a gain
_CHANCE = 1.1  # by which one run of a step may seem slower than it is
_FINALISTS = 3  # steps that are timed once more: one run each is too little to tell them apart


@dataclass(frozen=True, eq=False, slots=True)
class Wanted:
    """What is looked for.

    Attributes:
        asked: the settings to begin with; what is not `free` stays as it is in them.
        free: names of settings that may be changed, of `FREE`.
        rows: of the batch.
        layers: visits of a forward.
        room: that there is.
        has_link: whether copies take time that compute need not wait for. Without a link they take the cores of compute.
    """

    asked: RelayConfig
    free: Collection[str]
    rows: int
    layers: int
    room: Room
    has_link: bool = True


class Search:
    """A search for the fastest settings; `price` is asked for no settings twice.

    Args:
        price: what a step with some settings needs; None if it cannot be made, or surely does not fit.
        wanted: what is looked for.
        most_s: after so many seconds nothing further is tried, once something is found.
    """

    def __init__(self, price: Price, wanted: Wanted, most_s: float) -> None:
        self._ask, self._wanted, self._until_s = price, wanted, time.monotonic() + most_s
        self._known: dict[RelayConfig, Priced | None] = {}
        self.room, self.all_tried = wanted.room, True

    @property
    def has_time(self) -> bool:
        """Whether its time is not up."""
        return time.monotonic() < self._until_s

    @property
    def tried(self) -> int:
        """How many settings were looked at."""
        return len(self._known)

    def price(self, config: RelayConfig) -> Priced | None:
        """Say what a step with these settings needs."""
        if config not in self._known:
            self._known[config] = self._ask(config)
        return self._known[config]

    def run(self) -> list[Priced]:
        """Return steps that fit, the fastest first, as far as one run of each can tell."""
        found: list[Priced] = []
        for count in self._counts():
            if found and not self.has_time:
                self.all_tried = False
                break
            here = list(self._fitting_with(count, min((step.seconds for step in found), default=math.inf)))
            found += here
            # Further numbers are smaller, and make larger micro-batches; the one that was asked for comes out of turn.
            if not here and count != self._wanted.asked.micro_batches and self._can_be_made(count):
                break
        return sorted(dict.fromkeys(found), key=self.cost)

    def finalists(self, found: Sequence[Priced]) -> list[Priced]:
        """Of the steps that fit, those that are worth another look: the fastest, and who was timed apart and may be as fast."""
        if not self.has_time:
            return list(found[:1])
        chosen: dict[RelayConfig, Priced] = {}
        for step in found:
            rehearsed = _rehearsed(step)
            if rehearsed not in chosen and len(chosen) < _FINALISTS and step.seconds < _CHANCE * found[0].seconds:
                # What stays on the device was reckoned from the same rehearsals, so nothing needs to be timed again. A graph
                # that is kept costs no time: what makes less than it seem faster is chance.
                as_fast = [
                    each for each in found if _rehearsed(each) == rehearsed and each.seconds < _CHANCE * step.seconds
                ]
                chosen[rehearsed] = max(as_fast, key=lambda each: each.config.keep)
        # Not the other way round, where deferred updates do: they keep steps whole.
        for first in list(chosen.values())[:1]:
            if "update" in self._wanted.free and first.config.update == "eager":
                step = self.price(replace(first.config, update="deferred"))
                chosen |= {step.config: step} if step is not None and self.room.holds(step) else {}
        return list(chosen.values())

    def smaller_than(self, step: Priced) -> Priced | None:
        """Return the same step with one graph less that is kept, or one weight; None if there is none."""
        config, free = step.config, self._wanted.free
        if config.schedule == "depth_first":
            return self.price(replace(config, schedule="breadth_first")) if "schedule" in free else None
        if config.keep and "keep" in free:
            return self.price(replace(config, keep=config.keep - 1))
        if config.resident and "resident" in free:
            return self.price(replace(config, resident=config.resident - 1))
        return None

    def better_than(self, config: RelayConfig) -> Better | None:
        """Find, of the steps that do not fit and are faster than the one with these settings, the one that needs least."""
        chosen = self.price(config)  # as the others were priced: timed once more, it may seem faster by chance
        if chosen is None:
            return None
        others = [step for step in self._known.values() if step is not None and not self.room.holds(step)]
        faster = [step for step in others if _FASTER * step.seconds < chosen.seconds]
        least = min(faster, key=lambda step: sum(self.room.lacks(step).values()), default=None)
        return None if least is None else Better(least, chosen.seconds / least.seconds)

    def cost(self, step: Priced) -> float:
        """Seconds by which steps are compared; other micro-batches and updates than were asked for must be worth it."""
        asked = self._wanted.asked
        same = (step.config.micro_batches, step.config.update) == (asked.micro_batches, asked.update)
        return step.seconds if same else _AS_FAST * step.seconds

    def _counts(self) -> list[int]:
        """Numbers of micro-batches: that of the present settings, then from one row each, which is rehearsed soonest."""
        asked = min(self._wanted.asked.micro_batches, self._wanted.rows)
        if "micro_batches" not in self._wanted.free:
            return [asked]
        return list(dict.fromkeys([asked, *counts_from(1, self._wanted.rows)]))

    def _fitting_with(self, count: int, best_s: float) -> Iterator[Priced]:
        """Steps with so many micro-batches that fit, each with as much on the device as there is room for.

        Where with everything on the device, room or not, they would not be faster than `best_s`, they are not looked for.
        """
        yield from self._fitting_as(replace(self._wanted.asked, micro_batches=count), best_s)

    def _fitting_as(self, asked: RelayConfig, best_s: float) -> Iterator[Priced]:
        in_core = [step for step in self._in_core(asked) if self.room.holds(step)]
        yield from in_core  # nothing that comes and goes can gain on them
        if in_core:
            return
        if asked.schedule == "breadth_first" or "schedule" in self._wanted.free:
            yield from self._fitting_in_relays(replace(asked, schedule="breadth_first"), best_s)
        elif "update" in self._wanted.free and asked.update == "deferred":  # as there, the way out
            yield from self._fitting_as(replace(asked, update="eager"), best_s)

    def _in_core(self, asked: RelayConfig) -> Iterator[Priced]:
        """Steps in which everything stays and micro-batches come one after another, as far as what is held allows them."""
        layers, free = self._wanted.layers, self._wanted.free
        # Where the schedule is asked for, what stays follows from it.
        held = {*FREE} - {*free} - ({"keep", "resident"} if asked.schedule == "depth_first" else set())
        aheads = [max(1, asked.ahead)] + [0] * (not self._wanted.has_link) if "ahead" in free else [asked.ahead]
        for ahead in aheads:
            config = replace(asked, schedule="depth_first", stash="device", ahead=ahead).over(layers)
            if not changes(asked, config, held) and (step := self.price(config)) is not None:
                yield step

    def _fitting_in_relays(self, asked: RelayConfig, best_s: float) -> Iterator[Priced]:
        fits = False
        for config in self._ways(asked):
            fitting = list(self._staying(config))
            yield from fitting
            fits |= bool(fitting)
            if any(self._keeps_all(step) for step in fitting):
                return  # no place of the stash, and no other way to load, can gain anything on it
            if self._most_hopeful_s(config) > best_s:
                return
            if not self.has_time and (fits or best_s < math.inf):
                self.all_tried = False
                return
        # Eager updates need less of the host: a way out, and no more, since a step that fails may be torn then.
        if not fits and "update" in self._wanted.free and asked.update == "deferred":
            yield from self._fitting_as(replace(asked, update="eager"), best_s)

    def _can_be_made(self, count: int) -> bool:
        """Whether the model runs with so many micro-batches: some need more than one row each."""
        return any(step is not None and config.micro_batches == count for config, step in self._known.items())

    def _most_hopeful_s(self, config: RelayConfig) -> float:
        """Seconds of the same step with everything on the device that may be."""
        layers, free = self._wanted.layers, self._wanted.free
        keep = layers if "keep" in free else config.keep
        resident = max(0, layers - config.ahead - 1) if "resident" in free else config.resident
        step = self.price(replace(config, keep=keep, resident=resident))
        return 0.0 if step is None else step.seconds

    def _keeps_all(self, step: Priced) -> bool:
        config = step.config
        return config.ahead > 0 and min(config.keep, weight_slots(config.ahead, config.resident)) >= self._wanted.layers

    def _ways(self, asked: RelayConfig) -> Iterable[RelayConfig]:
        """The same settings with every place of the stash, as far ahead, or a layer or two, or none; those that overlap first."""
        free = self._wanted.free
        aheads = sorted({asked.ahead, 1, 2} - {0}) + [0] if "ahead" in free else [asked.ahead]
        places = IN_MEMORY if "stash" in free else [asked.stash]
        return [replace(asked, ahead=ahead, stash=stash) for ahead in aheads for stash in places]

    def _staying(self, config: RelayConfig) -> Iterator[Priced]:
        """Steps that differ in what stays on the device: as many graphs as there is room for, or fewer and more weights."""
        layers, free = self._wanted.layers, self._wanted.free
        # The graph of the last layer is there anyhow: keeping one is keeping none.
        keeps = [0, *range(2, layers + 1)] if "keep" in free else [config.keep]
        residents = range(max(0, layers - config.ahead - 1) + 1) if "resident" in free else [config.resident]

        def with_(keep: int, resident: int) -> Priced | None:
            return self.price(replace(config, keep=keep, resident=resident))

        def least_slots(keep: int) -> int:
            return max(residents[0], min(residents[-1], keep - config.ahead - 1))

        def most_weights(keep: int) -> Priced | None:
            return _largest(lambda at: with_(keep, at), self.room, range(least_slots(keep), residents[-1] + 1))

        most = _largest(lambda keep: with_(keep, least_slots(keep)), self.room, keeps)
        if most is None:
            return
        # A graph that is kept saves a recompute, a weight that stays a load: what is worth more depends on the link.
        for keep in dict.fromkeys(round(most.config.keep * share) for share in (1, 0.75, 0.5, 0.25, 0)):
            if keep in keeps and (found := most_weights(keep)) is not None:
                yield found
                bare = with_(keep, least_slots(keep))
                if bare is not None and bare is not found:
                    yield bare


def _rehearsed(step: Priced) -> RelayConfig:
    """Say which rehearsals have told what the step needs."""
    return replace(step.config, ahead=min(step.config.ahead, 1), resident=0, keep=0)


def _largest(step_of: Callable[[int], Priced | None], room: Room, values: Collection[int]) -> Priced | None:
    """Find the largest value with which the step fits, where larger ones need more; None if none does."""
    ordered = list(values)

    def fitting(at: int) -> Priced | None:
        step = step_of(ordered[at])
        return step if step is not None and room.holds(step) else None

    low = fitting(0)
    if low is None:
        return None
    if (all_ := fitting(len(ordered) - 1)) is not None:
        return all_
    first, beyond = 0, len(ordered) - 1  # `first` fits, `beyond` does not
    while beyond - first > 1:
        middle = (first + beyond) // 2
        if (step := fitting(middle)) is None:
            beyond = middle
        else:
            first, low = middle, step
    return low
