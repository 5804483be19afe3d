"""What fills the memories of a step, turn by turn.

Every turn is known by what there was before it and by what it leaves, so the memories of a longer step are sums. That is
exact where micro-batches, or layers, are alike.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from l2l_core.simulator import BEFORE_FIRST_STAY, MemorySamples, Profile, TurnCost
from l2l_core.trace import PLACES

BytesByCategory = Mapping[str, int]  # by category


@dataclass(frozen=True, slots=True)
class MemoryRise:
    """What a turn does to the total of a memory: highest above its start, and what is left."""

    peak: int
    net: int

    def followed_by(self, other: MemoryRise) -> MemoryRise:
        """Join this one and another one after it."""
        return MemoryRise(max(self.peak, self.net + other.peak), self.net + other.net)

    def repeated(self, count: int) -> MemoryRise:
        """Repeat this one `count` times."""
        if count == 0:
            return MemoryRise(0, 0)
        # Where each one takes something away, the first is the highest; otherwise the last.
        return MemoryRise(self.peak + max(0, (count - 1) * self.net), count * self.net)


@dataclass(frozen=True, eq=False)
class TurnMemory:
    """A turn, and what fills each place before and after it."""

    turn: TurnCost
    before: Mapping[str, BytesByCategory]
    after: Mapping[str, BytesByCategory]

    @cached_property
    def sample_deltas(self) -> list[MemorySamples]:
        """By operation, every sample less what there was before the turn."""
        return [
            tuple((place, _subtract_bytes(held, self.before[place])) for place, held in op.memory)
            for op in self.turn.ops
        ]

    @cached_property
    def net_change(self) -> dict[str, BytesByCategory]:
        """By place, what there is after the turn less what there was before it."""
        return {place: _subtract_bytes(self.after[place], self.before[place]) for place in PLACES}

    def starting_from(self, state: Mapping[str, BytesByCategory]) -> TurnCost:
        """Return the turn with the samples that it would have, had it begun with `state` in the memories."""
        samples = [
            tuple((place, add_bytes(state[place], more)) for place, more in steps) for steps in self.sample_deltas
        ]
        return self.turn._replace(
            ops=tuple(op._replace(memory=memory) for op, memory in zip(self.turn.ops, samples, strict=True))
        )

    def rise(self, place: str) -> MemoryRise:
        """Say what the turn does to the total of a place."""
        highs = [sum(held.values()) for steps in self.sample_deltas for where, held in steps if where == place]
        return MemoryRise(max([0, *highs]), sum(self.net_change[place].values()))


class MemoryTimeline:
    """The memories of a step, turn by turn.

    Attributes:
        first: by place, what fills it before the first turn.
        turns: by index of their stay, `START` among them, and micro-batch.
    """

    def __init__(self, profile: Profile) -> None:
        self._stays = profile.stays
        self.initial: dict[str, BytesByCategory] = {place: {} for place in PLACES} | dict(profile.memory)
        self.turns: dict[tuple[int, int], TurnMemory] = {}
        self._rises: dict[tuple[str, int, int], MemoryRise] = {}
        state = dict(self.initial)
        for index, turns in profile.turns_by_stay():
            for turn in turns:
                before = dict(state)
                for op in turn.ops:
                    state.update(op.memory)
                self.turns[index, turn.k] = TurnMemory(turn, before, dict(state))

    def rise(self, place: str, representatives: Sequence[int], layer_counts: Mapping[str, int]) -> MemoryRise:
        """Say what the whole step does to a memory's total, which is empty before it.

        Args:
            place: one of `PLACES`.
            stands: which micro-batch of the profile stands for each of the step's, as in `stretch`.
            copies: how often a layer stands in the stack, where that is not once.
        """
        counts = list(Counter(representatives).items())
        assert list(representatives) == sorted(representatives), (
            f"{representatives}: alike micro-batches follow one another"
        )
        whole = MemoryRise(max(0, first := sum(self.initial[place].values())), first)
        for index in range(BEFORE_FIRST_STAY, len(self._stays)):
            stay = MemoryRise(0, 0)
            for stand, count in counts:
                if (index, stand) in self.turns:
                    stay = stay.followed_by(self._turn_rise(place, index, stand).repeated(count))
            whole = whole.followed_by(
                stay.repeated(1 if index == BEFORE_FIRST_STAY else layer_counts.get(self._stays[index].layer, 1))
            )
        return whole

    def _turn_rise(self, place: str, index: int, stand: int) -> MemoryRise:
        at = place, index, stand
        if at not in self._rises:  # the depth that fits is looked for with many calls of `rise`
            self._rises[at] = self.turns[index, stand].rise(place)
        return self._rises[at]


def add_bytes(a: BytesByCategory, b: BytesByCategory) -> dict[str, int]:
    """Add two readings of a memory up by category; what comes to 0 is left out."""
    return {name: n for name in dict.fromkeys((*a, *b)) if (n := a.get(name, 0) + b.get(name, 0))}


def _subtract_bytes(a: BytesByCategory, b: BytesByCategory) -> dict[str, int]:
    return {name: n for name in dict.fromkeys((*a, *b)) if (n := a.get(name, 0) - b.get(name, 0))}
