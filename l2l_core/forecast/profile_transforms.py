"""Profiles of longer, deeper or less recomputing steps, made from recorded turns.

Memory changes of turns add up, which is exact where micro-batches, or layers, are equal.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from l2l_core.config import RelayConfig
from l2l_core.forecast.memory_timeline import MemoryTimeline, add_bytes
from l2l_core.forecast.representatives import RepresentedLayer
from l2l_core.schedule_rules import weight_slots
from l2l_core.simulator import BEFORE_FIRST_STAY, ComputeOp, MemorySamples, Profile, StayCost, TurnCost


def extrapolate_profile(profile: Profile, representatives: Sequence[int]) -> Profile:
    """Return a step whose micro-batch `k` costs as much as micro-batch `representatives[k]` of the profile."""
    if list(representatives) == list(range(profile.micro_batches)):
        return profile
    timeline = MemoryTimeline(profile)
    state = dict(timeline.initial)

    def repeated(index: int, turns: Sequence[TurnCost]) -> Iterator[TurnCost]:
        for k, source in enumerate(representatives):
            if (index, source) in timeline.turns:  # not every micro-batch has a turn in every stay
                yield timeline.turns[index, source].continue_from(state)._replace(k=k)

    return profile.map_turns(repeated, settings={**profile.settings, "micro_batches": len(representatives)})


def interpolate_profiles(recomputing: Profile, keeping: Profile, kept: int) -> Profile:
    """Return a step that keeps the graphs of the last `kept` visits of forward, without a run.

    Every turn is taken from the step in which its layer is treated alike: `recomputing` keeps only the graph of its last visit,
    `keeping` at least `kept` graphs (its additional slots are not taken over). The only error is in the bytes that the first
    kept graph shares with the layer before it, which is recomputed here.

    Raises:
        ValueError: the two steps visit different layers, or backward does not visit the last ones of forward in reverse.
    """
    order, other = ([stay.layer for stay in profile.stays] for profile in (recomputing, keeping))
    # The last visit of forward is also the first of backward, unless what the layer keeps beside its outputs is used later.
    last_visit = recomputing.forward_visits - 1
    turned = last_visit + (not recomputing.stays[last_visit].has("backward") and len(order) > last_visit + 1)
    if order != other:
        raise ValueError(f"the steps visit layers in different orders: {order} and {other}")
    forward, backward = order[: last_visit + 1], order[turned:]
    if backward != forward[::-1][: len(backward)]:  # shorter where the first layers and what feeds them are frozen
        raise ValueError(f"backward visits {backward} after {forward}: not in reverse")
    timelines = MemoryTimeline(recomputing), MemoryTimeline(keeping)
    state, time_ratio = dict(timelines[0].initial), _time_ratio(recomputing, keeping)

    def turns_of(index: int, turns: Sequence[TurnCost]) -> Iterator[TurnCost]:
        is_kept = index != BEFORE_FIRST_STAY and last_visit - kept < index < turned + kept
        for turn in turns:
            made = timelines[is_kept].turns[index, turn.k].continue_from(state)
            yield _match_timing(made, turn, time_ratio) if is_kept else made

    return recomputing.map_turns(turns_of)


def _match_timing(turn: TurnCost, reference: TurnCost, time_ratio: float) -> TurnCost:
    """Return the turn with the times of the reference, since two runs of the same operation differ by noise alone."""
    same: dict[tuple[str, str], deque[ComputeOp]] = defaultdict(deque)  # a turn may have several operations of a kind
    for op in reference.ops:
        same[op.kind, op.layer].append(op)

    def timed(op: ComputeOp) -> ComputeOp:
        others = same[op.kind, op.layer]
        if not others:
            return op._replace(seconds=time_ratio * op.seconds)
        other = others.popleft()
        # Backward of the reference includes the recompute.
        seconds = min(other.seconds, time_ratio * op.seconds) if op.kind == "backward" else other.seconds
        return op._replace(seconds=seconds, overhead_s=other.overhead_s)

    return turn._replace(ops=tuple(map(timed, turn.ops)))


def _time_ratio(recomputing: Profile, keeping: Profile) -> float:
    """Return the ratio of the two steps' times in forward, which is the same work in both."""
    first, second = (
        sum(op.seconds for turn in profile.turns for op in turn.ops if op.kind in ("forward", "shell"))
        for profile in (recomputing, keeping)
    )
    return first / second if second else 1.0


def with_slots(profile: Profile, config: RelayConfig, slot_bytes: int) -> Profile:
    """Return the step with the weight slots of `config`; its kept graphs must be those of `config` already."""
    slots = weight_slots(config.ahead, config.resident)
    nbytes = (slots - weight_slots(profile.settings["ahead"], profile.settings["resident"])) * slot_bytes

    def with_more(memory: MemorySamples) -> MemorySamples:
        more = {"device": {"weights": nbytes}}
        return tuple((place, add_bytes(held, more.get(place, {}))) for place, held in memory)

    settings = {**profile.settings, **{name: getattr(config, name) for name in ("ahead", "resident", "keep")}}
    return replace(profile.map_memory(with_more) if nbytes else profile, settings=settings)


class RepeatedStay(NamedTuple):
    """A stay of a profile, placed in another stack."""

    index: int  # in the profile
    stay: StayCost
    layer: RepresentedLayer
    visits: Mapping[str, int]  # visit numbers in the new step, by kind of event


def repeat_stays(stays: Sequence[StayCost], stack: Sequence[RepresentedLayer]) -> list[RepeatedStay]:
    """Repeat every stay for each layer with its costs, in stack order (reversed in backward), and renumber visits."""
    by_source: dict[str, list[RepresentedLayer]] = {}
    for layer in stack:
        by_source.setdefault(layer.source, []).append(layer)
    made: list[RepeatedStay] = []
    for index, stay in enumerate(stays):
        layers = by_source.get(stay.layer, [])
        made += [RepeatedStay(index, stay, each, {}) for each in (layers if stay.has("forward") else reversed(layers))]
    visit = 0
    numbers: list[dict[str, int]] = [{} for _ in made]
    for kind in ("forward", "backward"):  # the stay of the last layer belongs to both
        for at, each in enumerate(made):
            if each.stay.has(kind):
                numbers[at][kind], visit = visit, visit + 1
    return [each._replace(visits=visits) for each, visits in zip(made, numbers, strict=True)]
