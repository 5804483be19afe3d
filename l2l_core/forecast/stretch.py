"""A profile of a few micro-batches made into one of many, and of one depth into another: what repeats is repeated.

Every turn is known by what it costs and by what it adds to the memories, so a longer step is a sum. That is exact where
micro-batches, or layers, are alike; the others must be among those that were recorded.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from l2l_core.forecast.costs import Memory, Op, TurnCost
from l2l_core.forecast.profile import Profile
from l2l_core.trace import PLACES

START = -1  # in place of a stay's index: what comes before the first layer

Bytes = Mapping[str, int]  # by category


def stretch(profile: Profile, stands: Sequence[int]) -> Profile:
    """The step with `len(stands)` micro-batches, the k-th of which is as the profile's micro-batch `stands[k]`."""
    if list(stands) == list(range(profile.micro_batches)):
        return profile
    walk = MemoryWalk(profile)
    state = dict(walk.before)
    rows: dict[int, list[TurnCost]] = {}
    for index, k in walk.turns(stands):
        rows.setdefault(index, []).append(_renumbered(walk, state, index, stands[k], k))
        for place, added in walk.added[index, stands[k]].items():
            state[place] = _sum(state[place], added)
    return replace(
        profile,
        start=tuple(rows.get(START, ())),
        stays=tuple(stay._replace(turns=tuple(rows.get(i, ()))) for i, stay in enumerate(profile.stays)),
        settings={**profile.settings, "micro_batches": len(stands)},
    )


def _renumbered(walk: MemoryWalk, state: Mapping[str, Bytes], index: int, stand: int, k: int) -> TurnCost:
    turn = walk.known[index, stand]
    ops: list[Op] = []
    for op, steps in zip(turn.ops, walk.steps[index, stand], strict=True):
        memory: Memory = tuple((place, _sum(state[place], added)) for place, added in steps)
        ops.append(op._replace(memory=memory))
    return turn._replace(k=k, ops=tuple(ops))


def with_memory(profile: Profile, change: Callable[[Memory], Memory]) -> Profile:
    """The profile with other memory samples."""

    def turns(known: Sequence[TurnCost]) -> tuple[TurnCost, ...]:
        return tuple(t._replace(ops=tuple(op._replace(memory=change(op.memory)) for op in t.ops)) for t in known)

    stays = tuple(stay._replace(turns=turns(stay.turns)) for stay in profile.stays)
    return replace(profile, start=turns(profile.start), stays=stays, memory=change(profile.memory))


@dataclass(frozen=True, slots=True)
class Rise:
    """What a turn does to the total of a memory: highest above its start, and what is left."""

    high: int
    left: int

    def then(self, other: Rise) -> Rise:
        """This one, and the other after it."""
        return Rise(max(self.high, self.left + other.high), self.left + other.left)

    def times(self, count: int) -> Rise:
        """This one over and over."""
        if count == 0:
            return Rise(0, 0)
        return Rise(self.high + max(0, (count - 1) * self.left), count * self.left)


class MemoryWalk:
    """The memories of a step, turn by turn, as differences.

    Attributes:
        before: by place, what fills it before the first turn.
        known: turns by index of their stay and micro-batch.
        steps: of each turn, by operation, every sample less what there was when the turn began.
        added: of each turn, by place, what was there at its end less what was there at its beginning.
    """

    def __init__(self, profile: Profile) -> None:
        self._stays = profile.stays
        self.before: dict[str, Bytes] = {place: {} for place in PLACES} | dict(profile.memory)
        self.known: dict[tuple[int, int], TurnCost] = {}
        self.steps: dict[tuple[int, int], list[list[tuple[str, Bytes]]]] = {}
        self.added: dict[tuple[int, int], dict[str, Bytes]] = {}
        self._rises: dict[tuple[str, int, int], Rise] = {}
        state = dict(self.before)
        for index, turns in [(START, profile.start), *((i, stay.turns) for i, stay in enumerate(profile.stays))]:
            for turn in turns:
                self.known[index, turn.k] = turn
                began = dict(state)
                self.steps[index, turn.k] = steps = []
                for op in turn.ops:
                    steps.append([(place, _difference(held, began[place])) for place, held in op.memory])
                    state.update(op.memory)
                self.added[index, turn.k] = {place: _difference(state[place], began[place]) for place in PLACES}

    def turns(self, stands: Sequence[int]) -> Iterator[tuple[int, int]]:
        """Stay and micro-batch of every turn, in order."""
        for index in range(START, len(self._stays)):
            for k, stand in enumerate(stands):
                if (index, stand) in self.known:
                    yield index, k

    def rise(self, place: str, stands: Sequence[int], copies: Mapping[str, int]) -> Rise:
        """What the whole step does to a memory's total, from an empty one.

        Args:
            place: one of `PLACES`.
            stands: as in `stretch`.
            copies: how often a layer stands in the stack, where that is not once.
        """
        counts = list(Counter(stands).items())
        assert list(stands) == sorted(stands), f"{stands}: alike micro-batches follow one another"
        total = Rise(max(0, first := sum(self.before[place].values())), first)
        for index in range(START, len(self._stays)):
            stay = Rise(0, 0)
            for stand, count in counts:
                if (index, stand) in self.known:
                    stay = stay.then(self._rise_of(place, index, stand).times(count))
            times = 1 if index == START else copies.get(self._stays[index].layer, 1)
            total = total.then(stay.times(times))
        return total

    def _rise_of(self, place: str, index: int, stand: int) -> Rise:
        if (place, index, stand) not in self._rises:
            self._rises[place, index, stand] = self._count(place, index, stand)
        return self._rises[place, index, stand]

    def _count(self, place: str, index: int, stand: int) -> Rise:
        highs = [sum(d.values()) for steps in self.steps[index, stand] for where, d in steps if where == place]
        return Rise(max([0, *highs]), sum(self.added[index, stand][place].values()))


def _sum(a: Bytes, b: Bytes) -> dict[str, int]:
    return {name: n for name in dict.fromkeys((*a, *b)) if (n := a.get(name, 0) + b.get(name, 0))}


def _difference(a: Bytes, b: Bytes) -> dict[str, int]:
    return {name: n for name in dict.fromkeys((*a, *b)) if (n := a.get(name, 0) - b.get(name, 0))}
