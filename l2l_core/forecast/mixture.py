"""A step that keeps some graphs and weights, made of a step that keeps none and of one that keeps at least as many.

Every turn is taken from the step in which its layer is treated alike, and the memories add up, as in `stretch.py`. Nothing is
run for it, so that many such steps can be compared. It is exact but for what the first of the kept graphs holds together with
the layer before it, which is recomputed here and was not there.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from l2l_core.config import RelayConfig
from l2l_core.forecast.memory_walk import MemoryWalk, total
from l2l_core.forecast.stretch import with_memory
from l2l_core.rules import weight_slots
from l2l_core.simulator import START, Memory, Op, Profile, TurnCost


def mixed(recomputing: Profile, keeping: Profile, kept: int) -> Profile:
    """Make the step that keeps the graphs of the last `kept` visits of forward.

    Args:
        recomputing: a step that keeps none but that of its last visit.
        keeping: the same step, keeping at least `kept`; the slots that it needs for that are not taken over.
        kept: how many.

    Raises:
        ValueError: the two steps visit other layers, or not each once there and once back.
    """
    ways = [[stay.layer for stay in profile.stays] for profile in (recomputing, keeping)]
    visits = (len(ways[0]) + 1) // 2
    if ways[0] != ways[1] or ways[0] != ways[0][::-1]:
        raise ValueError(f"the steps go other ways: {ways[0]} and {ways[1]}")
    walks = MemoryWalk(recomputing), MemoryWalk(keeping)
    state, pace = dict(walks[0].first), _pace(recomputing, keeping)

    def turns_of(index: int, turns: Sequence[TurnCost]) -> Iterator[TurnCost]:
        behind = abs(index - (visits - 1))  # visits between this one and the turn
        is_kept = index != START and behind < kept
        walk = walks[1] if is_kept else walks[0]
        for turn in turns:
            walked = walk.turns[index, turn.k]
            yield _timed_as(walked.on(state), turn, pace) if is_kept else walked.on(state)
            state.update((place, total(state[place], added)) for place, added in walked.added.items())

    return recomputing.with_turns(turns_of)


def _timed_as(turn: TurnCost, known: TurnCost, pace: float) -> TurnCost:
    """The turn at the pace of another one, and nothing slower than there: two runs of one thing differ by chance alone."""
    same: dict[tuple[str, str], deque[Op]] = defaultdict(deque)  # a turn may have several operations of a kind
    for op in known.ops:
        same[op.kind, op.layer].append(op)

    def timed(op: Op) -> Op:
        others = same[op.kind, op.layer]
        if not others:
            return op._replace(seconds=pace * op.seconds)
        seconds, overhead_s = others[0].seconds, others.popleft().overhead_s
        if op.kind == "backward":  # there it recomputes as well
            seconds = min(seconds, pace * op.seconds)
        return op._replace(seconds=seconds, overhead_s=overhead_s)

    return turn._replace(ops=tuple(map(timed, turn.ops)))


def _pace(recomputing: Profile, keeping: Profile) -> float:
    """How long work took in one step for a second of the other's, where both did the same: all of forward."""
    sums = [
        sum(op.seconds for turn in profile.turns for op in turn.ops if op.kind in ("forward", "shell"))
        for profile in (recomputing, keeping)
    ]
    return sums[0] / sums[1] if sums[1] else 1.0


def with_slots(profile: Profile, config: RelayConfig, slot_bytes: int) -> Profile:
    """Return the step with as many slots for weights, of so many bytes each, as `config` has; its graphs are kept already."""
    asked = {name: getattr(config, name) for name in ("ahead", "resident", "keep")}
    nbytes = (_slots(asked) - _slots(profile.settings)) * slot_bytes

    def with_more(memory: Memory) -> Memory:
        return tuple(
            (place, {**held, "weights": held.get("weights", 0) + nbytes} if place == "device" else held)
            for place, held in memory
        )

    changed = with_memory(profile, with_more) if nbytes else profile
    return replace(changed, settings={**profile.settings, **asked})


def _slots(settings: Mapping[str, Any]) -> int:
    return weight_slots(settings["ahead"], settings["resident"])
