"""Which worker waits for which, and for how long: arithmetic on the events of traces.

Workers begin what they do together when the last of them has come; whoever came before it has waited for that one. A wait is
exposed where compute had nothing to do meanwhile: only that makes a step longer.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from l2l_core.trace import NETWORK_LANES, Event, Interval, TraceLike, intersect, merge, total_length

STEP_BEGIN = "begin"  # where a wait is that comes before the step's first event


@dataclass(frozen=True, slots=True)
class Wait:
    """How long one worker has waited for another in a step.

    Attributes:
        rank, last: the worker that waited, and the one that came last.
        where: "begin" (of the step), "gather" (of weights) or "reduce" (of gradients, and for the end of the step).
        seconds: in all.
        exposed_s: of these, while compute did nothing.
    """

    rank: int
    last: int
    where: str
    seconds: float
    exposed_s: float


def find_waits(trace: TraceLike) -> tuple[Wait, ...]:
    """Say for whom the worker with this trace has waited, and where; empty for one that is alone."""
    worker, lanes = trace.worker, trace.lanes
    found = [Wait(worker.rank, worker.last, STEP_BEGIN, worker.waited_s, worker.waited_s)] if worker.waited_s else []
    computes = merge((event.start_s, event.stop_s) for event in lanes["compute"])
    for lane in [lane for lane in NETWORK_LANES if lane in lanes]:
        by_last = defaultdict(list)
        for event in (event for event in lanes[lane] if event.stalled_s):
            by_last[event.last].append(wait_interval(event))
        for last, waits in sorted(by_last.items()):
            whole = merge(waits)
            seconds = total_length(whole)
            found.append(
                Wait(worker.rank, last, lane, seconds, max(0.0, seconds - total_length(intersect(whole, computes))))
            )
    return tuple(found)


def wait_interval(event: Event) -> Interval:
    """Say when a worker waited for the last one, before they could exchange anything."""
    return event.start_s - event.stalled_s, event.start_s
