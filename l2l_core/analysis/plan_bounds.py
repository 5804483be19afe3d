"""The lane that limits a step of a plan, and the kind of plan that would be faster.

In a plan micro-batches run forward and backward in turn, so the step is one phase.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from l2l_core.analysis.bounds import NEGLIGIBLE_SHARE, Bound, binding_lane, sum_s
from l2l_core.analysis.phases import IDLE, Phase
from l2l_core.trace import Event, TraceLike, format_seconds

WHOLE_STEP = "the step"  # name of the only phase


def find_plan_bounds(trace: TraceLike) -> tuple[Bound, ...]:
    """Return the bound of a step of a plan. Empty without events."""
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
    again_s, update_s = recompute_seconds(compute), sum_s(event for event in compute if event.kind == "update")
    parts: list[str] = []
    if again_s:
        parts.append(f"{format_seconds(again_s)} of it recompute, which a plan that keeps or moves more would save")
    if update_s > NEGLIGIBLE_SHARE * step.span_s:
        parts.append(f"{format_seconds(update_s)} of it the update")
    return ", and ".join(parts) or "it recomputes nothing and hides its copies, so no other plan is faster"


def recompute_seconds(compute: Iterable[Event]) -> float:
    """Return the seconds of recomputation: forwards of layers after the first backward of their micro-batch."""
    in_backward: set[int] = set()
    again: list[Event] = []
    for event in compute:
        if event.kind == "backward":
            in_backward.add(event.k)
        elif event.kind == "forward" and event.k in in_backward:
            again.append(event)
    return sum_s(again)
