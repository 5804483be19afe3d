"""Memory of a step, turn by turn: the state before a turn, and the change that the turn makes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property

from l2l_core.simulator import BEFORE_FIRST_STAY, MemorySamples, Profile, TurnCost
from l2l_core.trace import PLACES

BytesByCategory = Mapping[str, int]


@dataclass(frozen=True, slots=True)
class MemoryRise:
    """Change of the bytes in one memory: the highest value above the start, and the final difference."""

    peak: int
    net: int

    def followed_by(self, other: MemoryRise) -> MemoryRise:
        """Return the rise of this change and then another."""
        return MemoryRise(max(self.peak, self.net + other.peak), self.net + other.net)

    def repeated(self, count: int) -> MemoryRise:
        """Return the rise of this change made `count` times."""
        # If the change is negative, the first repetition is the highest, otherwise the last.
        return MemoryRise(self.peak + max(0, (count - 1) * self.net), count * self.net) if count else MemoryRise(0, 0)


@dataclass(frozen=True, eq=False)
class TurnMemory:
    """A turn, with the bytes in each place before and after it."""

    turn: TurnCost
    before: Mapping[str, BytesByCategory]
    after: Mapping[str, BytesByCategory]

    @cached_property
    def sample_deltas(self) -> list[MemorySamples]:
        """By operation, every sample minus the state before the turn."""
        return [
            tuple((place, _subtract_bytes(held, self.before[place])) for place, held in op.memory)
            for op in self.turn.ops
        ]

    @cached_property
    def net_change(self) -> dict[str, BytesByCategory]:
        """By place, the state after the turn minus the state before it."""
        return {place: _subtract_bytes(self.after[place], self.before[place]) for place in PLACES}

    def continue_from(self, state: dict[str, BytesByCategory]) -> TurnCost:
        """Return the turn with the samples that it has if it begins in `state`, and advance `state` to its end."""
        samples = [tuple((place, add_bytes(state[place], more)) for place, more in op) for op in self.sample_deltas]
        state.update((place, add_bytes(state[place], added)) for place, added in self.net_change.items())
        ops = zip(self.turn.ops, samples, strict=True)
        return self.turn._replace(ops=tuple(op._replace(memory=memory) for op, memory in ops))

    def rise(self, place: str) -> MemoryRise:
        """Return the change of the total bytes of a place."""
        highs = [sum(held.values()) for op in self.sample_deltas for where, held in op if where == place]
        return MemoryRise(max([0, *highs]), sum(self.net_change[place].values()))


class MemoryTimeline:
    """Memory of a step, turn by turn."""

    def __init__(self, profile: Profile) -> None:
        self._stays = profile.stays
        self.initial: dict[str, BytesByCategory] = {place: {} for place in PLACES} | dict(profile.memory)
        self.turns: dict[tuple[int, int], TurnMemory] = {}  # by index of the stay and micro-batch
        # Cached, since the search for the largest depth calls `rise` many times.
        self._turn_rise = cache(lambda place, at: self.turns[at].rise(place))
        state = dict(self.initial)
        for index, turns in profile.turns_by_stay():
            for turn in turns:
                before = dict(state)
                for op in turn.ops:
                    state.update(op.memory)
                self.turns[index, turn.k] = TurnMemory(turn, before, dict(state))

    def rise(self, place: str, representatives: Sequence[int], layer_counts: Mapping[str, int]) -> MemoryRise:
        """Return the change of the total bytes of a place over the whole step, from empty.

        `representatives` are as for `extrapolate_profile`, ascending; `layer_counts` has layers that are in the stack not once.
        """
        counts = list(Counter(representatives).items())
        assert list(representatives) == sorted(representatives), f"{representatives}: not in ascending order"
        whole = MemoryRise(max(0, first := sum(self.initial[place].values())), first)
        for index in range(BEFORE_FIRST_STAY, len(self._stays)):
            stay = MemoryRise(0, 0)
            for k, count in counts:
                if (index, k) in self.turns:
                    stay = stay.followed_by(self._turn_rise(place, (index, k)).repeated(count))
            copies = 1 if index == BEFORE_FIRST_STAY else layer_counts.get(self._stays[index].layer, 1)
            whole = whole.followed_by(stay.repeated(copies))
        return whole


def add_bytes(a: BytesByCategory, b: BytesByCategory) -> dict[str, int]:
    """Add two readings of a memory by category, and omit zeros."""
    return {name: n for name in dict.fromkeys((*a, *b)) if (n := a.get(name, 0) + b.get(name, 0))}


def _subtract_bytes(a: BytesByCategory, b: BytesByCategory) -> dict[str, int]:
    return {name: n for name in dict.fromkeys((*a, *b)) if (n := a.get(name, 0) - b.get(name, 0))}
