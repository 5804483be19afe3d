"""A few micro-batches and layers made into many, as `representatives.py` has it: what repeats is repeated, and the memories add up.

That is exact where micro-batches, or layers, are alike; the others must be among those that were recorded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from l2l_core.forecast.memory_timeline import MemoryTimeline, add_bytes
from l2l_core.forecast.representatives import RepresentedLayer
from l2l_core.simulator import MemorySamples, Profile, StayCost, TurnCost


def extrapolate_profile(profile: Profile, representatives: Sequence[int]) -> Profile:
    """Make the step with `len(stands)` micro-batches, the k-th of which is as the profile's micro-batch `stands[k]`."""
    if list(representatives) == list(range(profile.micro_batches)):
        return profile
    walk = MemoryTimeline(profile)
    state = dict(walk.initial)

    def repeated(index: int, turns: Sequence[TurnCost]) -> Iterator[TurnCost]:
        for k, stand in enumerate(representatives):
            walked = walk.turns.get((index, stand))
            if walked is not None:  # not every micro-batch has a turn in every stay
                yield walked.starting_from(state)._replace(k=k)
                state.update((place, add_bytes(state[place], added)) for place, added in walked.net_change.items())

    return profile.map_turns(repeated, settings={**profile.settings, "micro_batches": len(representatives)})


def map_memory(profile: Profile, change: Callable[[MemorySamples], MemorySamples]) -> Profile:
    """Return the profile with what `change` makes of its memory samples."""

    def changed(index: int, turns: Sequence[TurnCost]) -> Iterator[TurnCost]:
        for turn in turns:
            yield turn._replace(ops=tuple(op._replace(memory=change(op.memory)) for op in turn.ops))

    return replace(profile.map_turns(changed), memory=change(profile.memory))


class RepeatedStay(NamedTuple):
    """A stay of a profile as one of another stack."""

    index: int  # in the profile
    stay: StayCost
    layer: RepresentedLayer
    visits: Mapping[str, int]  # its numbers in the other step, by kind of event


def repeat_stays(stays: Sequence[StayCost], stack: Sequence[RepresentedLayer]) -> list[RepeatedStay]:
    """Repeat every stay for each layer that has its costs, in the order of the stack, backward in reverse; number visits anew."""
    by_source: dict[str, list[RepresentedLayer]] = {}
    for layer in stack:
        by_source.setdefault(layer.source, []).append(layer)
    made: list[RepeatedStay] = []
    for index, stay in enumerate(stays):
        layers = by_source.get(stay.layer, [])
        made += [RepeatedStay(index, stay, each, {}) for each in (layers if stay.has("forward") else reversed(layers))]
    visit = 0
    numbers: list[dict[str, int]] = [{} for _ in made]
    for kind in ("forward", "backward"):  # all of forward comes first, and the stay at the turn is in both
        for at, each in enumerate(made):
            if each.stay.has(kind):
                numbers[at][kind], visit = visit, visit + 1
    return [each._replace(visits=visits) for each, visits in zip(made, numbers, strict=True)]
