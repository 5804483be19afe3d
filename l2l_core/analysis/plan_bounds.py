"""What a step by a plan was waiting for, and which other plan would help: a relay's settings would not.

A plan has one step for all micro-batches, which run forward and backward in turn; so it is taken as a whole.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from l2l_core.analysis.bounds import NEGLIGIBLE_SHARE, Bound, binding_lane
from l2l_core.analysis.phases import IDLE, Phase
from l2l_core.trace import Event, TraceLike, format_seconds

WHOLE_STEP = "the step"  # what the only phase is called


def find_plan_bounds(trace: TraceLike) -> tuple[Bound, ...]:
    """Say what binds a step by a plan, and what would help. Empty without events."""
    lanes = trace.lanes
    events = [event for lane in lanes.values() for event in lane]
    if not events:
        return ()
    step = Phase(WHOLE_STEP, min(e.start_s for e in events), max(e.stop_s for e in events), lanes)
    lane = binding_lane(step)
    return (
        Bound(
            phase=WHOLE_STEP,
            span_s=step.span_s,
            busy_s=step.busy_s,
            lane=lane,
            exposed_s=step.exposed_s[lane],
            idle_s=step.idle_s,
            floor_s=max(step.busy_s.values()),
            advice=_advise(step, lane, lanes["compute"]),
            settings={},
        ),
    )


def _advise(step: Phase, lane: str, compute: Sequence[Event]) -> str:
    if lane == IDLE:
        return "overhead between operations, not the link; larger micro-batches make it count for less"
    if lane != "compute":
        return "a faster link, or a plan that recomputes instead of moving, would save up to that"
    again_s, update_s = recompute_seconds(compute), _sum_s(event for event in compute if event.kind == "update")
    said = []
    if again_s:
        said.append(f"{format_seconds(again_s)} of it recompute, which a plan that keeps or moves more would save")
    if update_s > NEGLIGIBLE_SHARE * step.span_s:
        said.append(f"{format_seconds(update_s)} of it the update")
    return ", and ".join(said) or "it recomputes nothing and hides its copies, so no other plan is faster"


def recompute_seconds(compute: Iterable[Event]) -> float:
    """Add up the seconds of layers that ran forward again: those after the first backward of their micro-batch."""
    turned: set[int] = set()
    again = []
    for event in compute:
        if event.kind == "backward":
            turned.add(event.k)
        elif event.kind == "forward" and event.k in turned:
            again.append(event)
    return _sum_s(again)


def _sum_s(events: Iterable[Event]) -> float:
    return math.fsum(event.stop_s - event.start_s for event in events)
