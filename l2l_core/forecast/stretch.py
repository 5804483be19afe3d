"""A few micro-batches and layers made into many, as `stands.py` has it: what repeats is repeated, and the memories add up.

That is exact where micro-batches, or layers, are alike; the others must be among those that were recorded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from l2l_core.forecast.memory_walk import MemoryWalk, total
from l2l_core.forecast.stands import StandIn
from l2l_core.simulator import Memory, Profile, Stay, TurnCost


def stretch(profile: Profile, stands: Sequence[int]) -> Profile:
    """Make the step with `len(stands)` micro-batches, the k-th of which is as the profile's micro-batch `stands[k]`."""
    if list(stands) == list(range(profile.micro_batches)):
        return profile
    walk = MemoryWalk(profile)
    state = dict(walk.first)

    def repeated(index: int, turns: Sequence[TurnCost]) -> Iterator[TurnCost]:
        for k, stand in enumerate(stands):
            walked = walk.turns.get((index, stand))
            if walked is not None:  # not every micro-batch has a turn in every stay
                yield walked.on(state)._replace(k=k)
                state.update((place, total(state[place], added)) for place, added in walked.added.items())

    return profile.with_turns(repeated, settings={**profile.settings, "micro_batches": len(stands)})


def with_memory(profile: Profile, change: Callable[[Memory], Memory]) -> Profile:
    """Return the profile with what `change` makes of its memory samples."""

    def changed(index: int, turns: Sequence[TurnCost]) -> Iterator[TurnCost]:
        for turn in turns:
            yield turn._replace(ops=tuple(op._replace(memory=change(op.memory)) for op in turn.ops))

    return replace(profile.with_turns(changed), memory=change(profile.memory))


class Repeated(NamedTuple):
    """A stay of a profile as one of another stack."""

    index: int  # in the profile
    stay: Stay
    layer: StandIn
    visits: Mapping[str, int]  # its numbers in the other step, by kind of event


def repeat(stays: Sequence[Stay], stack: Sequence[StandIn]) -> list[Repeated]:
    """Repeat every stay for each layer that has its costs, in the order of the stack, backward in reverse; number visits anew."""
    by_source: dict[str, list[StandIn]] = {}
    for layer in stack:
        by_source.setdefault(layer.source, []).append(layer)
    made: list[Repeated] = []
    for index, stay in enumerate(stays):
        layers = by_source.get(stay.layer, [])
        made += [Repeated(index, stay, each, {}) for each in (layers if stay.has("forward") else reversed(layers))]
    visit = 0
    numbers: list[dict[str, int]] = [{} for _ in made]
    for kind in ("forward", "backward"):  # all of forward comes first, and the stay at the turn is in both
        for at, each in enumerate(made):
            if each.stay.has(kind):
                numbers[at][kind], visit = visit, visit + 1
    return [each._replace(visits=visits) for each, visits in zip(made, numbers, strict=True)]
