"""What fills the memories of a step, turn by turn.

Every turn is known by what there was before it and by what it leaves, so the memories of a longer step are sums. That is
exact where micro-batches, or layers, are alike.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from l2l_core.simulator import START, Memory, Profile, TurnCost
from l2l_core.trace import PLACES

Bytes = Mapping[str, int]  # by category


@dataclass(frozen=True, slots=True)
class Rise:
    """What a turn does to the total of a memory: highest above its start, and what is left."""

    high: int
    left: int

    def then(self, other: Rise) -> Rise:
        """Join this one and another one after it."""
        return Rise(max(self.high, self.left + other.high), self.left + other.left)

    def times(self, count: int) -> Rise:
        """Repeat this one `count` times."""
        if count == 0:
            return Rise(0, 0)
        # Where each one takes something away, the first is the highest; otherwise the last.
        return Rise(self.high + max(0, (count - 1) * self.left), count * self.left)


@dataclass(frozen=True, eq=False)
class WalkedTurn:
    """A turn, and what fills each place before and after it."""

    turn: TurnCost
    before: Mapping[str, Bytes]
    after: Mapping[str, Bytes]

    @cached_property
    def steps(self) -> list[Memory]:
        """By operation, every sample less what there was before the turn."""
        return [
            tuple((place, _difference(held, self.before[place])) for place, held in op.memory) for op in self.turn.ops
        ]

    @cached_property
    def added(self) -> dict[str, Bytes]:
        """By place, what there is after the turn less what there was before it."""
        return {place: _difference(self.after[place], self.before[place]) for place in PLACES}

    def on(self, state: Mapping[str, Bytes]) -> TurnCost:
        """Return the turn with the samples that it would have, had it begun with `state` in the memories."""
        samples = [tuple((place, total(state[place], more)) for place, more in steps) for steps in self.steps]
        return self.turn._replace(
            ops=tuple(op._replace(memory=memory) for op, memory in zip(self.turn.ops, samples, strict=True))
        )

    def rise(self, place: str) -> Rise:
        """Say what the turn does to the total of a place."""
        highs = [sum(held.values()) for steps in self.steps for where, held in steps if where == place]
        return Rise(max([0, *highs]), sum(self.added[place].values()))


class MemoryWalk:
    """The memories of a step, turn by turn.

    Attributes:
        first: by place, what fills it before the first turn.
        turns: by index of their stay, `START` among them, and micro-batch.
    """

    def __init__(self, profile: Profile) -> None:
        self._stays = profile.stays
        self.first: dict[str, Bytes] = {place: {} for place in PLACES} | dict(profile.memory)
        self.turns: dict[tuple[int, int], WalkedTurn] = {}
        self._rises: dict[tuple[str, int, int], Rise] = {}
        state = dict(self.first)
        for index, turns in profile.by_stay():
            for turn in turns:
                before = dict(state)
                for op in turn.ops:
                    state.update(op.memory)
                self.turns[index, turn.k] = WalkedTurn(turn, before, dict(state))

    def rise(self, place: str, stands: Sequence[int], copies: Mapping[str, int]) -> Rise:
        """Say what the whole step does to a memory's total, which is empty before it.

        Args:
            place: one of `PLACES`.
            stands: which micro-batch of the profile stands for each of the step's, as in `stretch`.
            copies: how often a layer stands in the stack, where that is not once.
        """
        counts = list(Counter(stands).items())
        assert list(stands) == sorted(stands), f"{stands}: alike micro-batches follow one another"
        whole = Rise(max(0, first := sum(self.first[place].values())), first)
        for index in range(START, len(self._stays)):
            stay = Rise(0, 0)
            for stand, count in counts:
                if (index, stand) in self.turns:
                    stay = stay.then(self._rise_of(place, index, stand).times(count))
            whole = whole.then(stay.times(1 if index == START else copies.get(self._stays[index].layer, 1)))
        return whole

    def _rise_of(self, place: str, index: int, stand: int) -> Rise:
        at = place, index, stand
        if at not in self._rises:  # the depth that fits is looked for with many calls of `rise`
            self._rises[at] = self.turns[index, stand].rise(place)
        return self._rises[at]


def total(a: Bytes, b: Bytes) -> dict[str, int]:
    """Add two readings of a memory up by category; what comes to 0 is left out."""
    return {name: n for name in dict.fromkeys((*a, *b)) if (n := a.get(name, 0) + b.get(name, 0))}


def _difference(a: Bytes, b: Bytes) -> dict[str, int]:
    return {name: n for name in dict.fromkeys((*a, *b)) if (n := a.get(name, 0) - b.get(name, 0))}
