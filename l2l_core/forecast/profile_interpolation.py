"""A step that keeps some graphs and weights, made of a step that keeps none and of one that keeps at least as many.

Every turn is taken from the step in which its layer is treated alike, and the memories add up, as in `profile_extrapolation.py`. Nothing is
run for it, so that many such steps can be compared. It is exact but for what the first of the kept graphs holds together with
the layer before it, which is recomputed here and was not there.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from l2l_core.config import RelayConfig
from l2l_core.forecast.memory_timeline import MemoryTimeline, add_bytes
from l2l_core.forecast.profile_extrapolation import map_memory
from l2l_core.schedule_rules import weight_slots
from l2l_core.simulator import BEFORE_FIRST_STAY, ComputeOp, MemorySamples, Profile, TurnCost


def interpolate_profiles(recomputing: Profile, keeping: Profile, kept: int) -> Profile:
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
    walks = MemoryTimeline(recomputing), MemoryTimeline(keeping)
    state, pace = dict(walks[0].initial), _time_ratio(recomputing, keeping)

    def turns_of(index: int, turns: Sequence[TurnCost]) -> Iterator[TurnCost]:
        behind = abs(index - (visits - 1))  # visits between this one and the turn
        is_kept = index != BEFORE_FIRST_STAY and behind < kept
        walk = walks[1] if is_kept else walks[0]
        for turn in turns:
            walked = walk.turns[index, turn.k]
            yield _match_timing(walked.starting_from(state), turn, pace) if is_kept else walked.starting_from(state)
            state.update((place, add_bytes(state[place], added)) for place, added in walked.net_change.items())

    return recomputing.map_turns(turns_of)


def _match_timing(turn: TurnCost, reference: TurnCost, time_ratio: float) -> TurnCost:
    """The turn at the pace of another one, and nothing slower than there: two runs of one thing differ by chance alone."""
    same: dict[tuple[str, str], deque[ComputeOp]] = defaultdict(deque)  # a turn may have several operations of a kind
    for op in reference.ops:
        same[op.kind, op.layer].append(op)

    def timed(op: ComputeOp) -> ComputeOp:
        others = same[op.kind, op.layer]
        if not others:
            return op._replace(seconds=time_ratio * op.seconds)
        seconds, overhead_s = others[0].seconds, others.popleft().overhead_s
        if op.kind == "backward":  # there it recomputes as well
            seconds = min(seconds, time_ratio * op.seconds)
        return op._replace(seconds=seconds, overhead_s=overhead_s)

    return turn._replace(ops=tuple(map(timed, turn.ops)))


def _time_ratio(recomputing: Profile, keeping: Profile) -> float:
    """How long work took in one step for a second of the other's, where both did the same: all of forward."""
    sums = [
        sum(op.seconds for turn in profile.turns for op in turn.ops if op.kind in ("forward", "shell"))
        for profile in (recomputing, keeping)
    ]
    return sums[0] / sums[1] if sums[1] else 1.0


def with_slots(profile: Profile, config: RelayConfig, slot_bytes: int) -> Profile:
    """Return the step with as many slots for weights, of so many bytes each, as `config` has; its graphs are kept already."""
    asked = {name: getattr(config, name) for name in ("ahead", "resident", "keep")}
    nbytes = (_slot_count(asked) - _slot_count(profile.settings)) * slot_bytes

    def with_more(memory: MemorySamples) -> MemorySamples:
        return tuple(
            (place, {**held, "weights": held.get("weights", 0) + nbytes} if place == "device" else held)
            for place, held in memory
        )

    changed = map_memory(profile, with_more) if nbytes else profile
    return replace(changed, settings={**profile.settings, **asked})


def _slot_count(settings: Mapping[str, Any]) -> int:
    return weight_slots(settings["ahead"], settings["resident"])
