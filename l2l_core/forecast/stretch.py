"""A profile of a few micro-batches made into one of many: what repeats is repeated, and the memories add up.

That is exact where micro-batches are alike; the others must be among those that were recorded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from l2l_core.forecast.costs import Memory, TurnCost
from l2l_core.forecast.memory_walk import MemoryWalk, total
from l2l_core.forecast.profile import Profile


def stretch(profile: Profile, stands: Sequence[int]) -> Profile:
    """The step with `len(stands)` micro-batches, the k-th of which is as the profile's micro-batch `stands[k]`."""
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
    """The profile with other memory samples."""

    def changed(index: int, turns: Sequence[TurnCost]) -> Iterator[TurnCost]:
        for turn in turns:
            yield turn._replace(ops=tuple(op._replace(memory=change(op.memory)) for op in turn.ops))

    return replace(profile.with_turns(changed), memory=change(profile.memory))
