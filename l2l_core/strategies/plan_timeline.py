"""A plan on virtual lanes: when each operation begins and ends, and what is in memory then.

Seconds are simulated, from medians of measured operations and the stated link; bytes are those of the exact walk. Compute goes
in order, copies have one lane each way. Updates come after the last operation and take no time here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from l2l_core.strategies.fixed_plans import Operations
from l2l_core.strategies.plan import OFF, OFFX, PRE, PREX, B
from l2l_core.strategies.plan_memory import OperationMemory, simulate_memory
from l2l_core.strategies.stage_costs import StageCosts
from l2l_core.trace import Event, MemorySample, Trace

CopySecondsFn = Callable[[str, int], float]  # of so many bytes on a lane


class TimedOperation(NamedTuple):
    """One operation on its lane, in seconds since the micro-batch began."""

    step: OperationMemory
    lane: str
    start_s: float
    stop_s: float
    settled_s: float  # when the bytes after it hold: of a copy, when it is asked for


def time_operations(costs: StageCosts, operations: Operations, copy_s: CopySecondsFn) -> Iterator[TimedOperation]:
    """Time a checked plan for one micro-batch."""
    now = out_s = in_s = 0.0
    leaving: list[float] = []
    back_s: dict[tuple[str, int], float] = {}
    for step in simulate_memory(costs, operations):
        kind, i = step.operation
        if kind in (OFF, OFFX):
            start_s = max(out_s, now)
            out_s = start_s + copy_s("d2h", step.moved_bytes)
            leaving.append(out_s)
            yield TimedOperation(step, "d2h", start_s, out_s, now)
        elif kind in (PRE, PREX):
            now = max([now, *leaving])  # as the executor: what leaves has left before anything comes
            leaving.clear()
            start_s = max(in_s, now)
            in_s = start_s + copy_s("h2d", step.moved_bytes)
            back_s[OFF if kind == PRE else OFFX, i] = in_s
            yield TimedOperation(step, "h2d", start_s, in_s, now)
        else:
            start_s = max(now, back_s.pop((OFF, i), 0.0), back_s.pop((OFFX, i), 0.0))
            stop_s = start_s + costs.seconds_of(step.operation)
            now = max([stop_s, *leaving])
            leaving.clear()
            yield TimedOperation(step, "compute", start_s, stop_s, now)


def make_plan_trace(
    micro_batches: Sequence[StageCosts],
    operations: Operations,
    copy_s: CopySecondsFn,
    weights_bytes: int,
    optimizer_bytes: int,
    update_bytes: int,
) -> Trace:
    """Make the trace of a step by a plan, as a relay's `simulate` does: events on lanes, and bytes of device and host.

    Of every operation on `compute` the highest bytes are noted, then those after it; at the end what the update needs.

    Args:
        micro_batches: costs of each, in order.
        weights_bytes, optimizer_bytes: that are on the device all the time, buffers among the weights.
        update_bytes: the most that an update needs besides, gradients included.
    """
    events, samples, began_s, grads = [], [], 0.0, 0
    all_grads = sum(micro_batches[0].gradient_bytes.values())

    def note(t_s: float, nbytes: int) -> None:
        held = {
            "weights": weights_bytes,
            "gradients": grads,
            "activations": nbytes - grads,
            "optimizer": optimizer_bytes,
        }
        samples.append(MemorySample(began_s + t_s, "device", held))

    for k, costs in enumerate(micro_batches):
        names = costs.structure.names
        note(0.0, costs.base_bytes)
        for step, lane, start_s, stop_s, settled_s in time_operations(costs, operations, copy_s):
            kind, i = step.operation
            said = {"compute": "backward" if kind == B else "forward", "d2h": "stash", "h2d": "fetch"}[lane]
            events.append(Event(lane, said, began_s + start_s, began_s + stop_s, names[i], k, step.moved_bytes))
            if lane == "compute":
                note(stop_s, step.peak_bytes)
            else:
                samples.append(MemorySample(began_s + settled_s, "host", {"stash": step.host_bytes}))
            grads += costs.gradient_bytes.get(i, 0) if kind == B else 0
            note(settled_s, step.bytes_after)
        began_s += settled_s
        grads = all_grads  # what a micro-batch has kept apart has been added to them
    note(0.0, update_bytes)
    return Trace.of(events, samples, names={name: name for name in micro_batches[0].structure.names})
