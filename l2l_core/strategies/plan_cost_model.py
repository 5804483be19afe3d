"""Cost of a plan on one model and device before it runs: exact bytes, and seconds on virtual lanes.

Seconds are simulated from medians of measured operations and the stated link: compute runs in order, copies have one lane
for each direction. Updates follow the last operation and take no time here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

from l2l_core.strategies.fixed_plans import plain_plan
from l2l_core.strategies.plan import F0, FALL, OFF, OFFLOAD_OF, OFFX, B, Operations
from l2l_core.strategies.plan_memory import OperationMemory, simulate_memory
from l2l_core.strategies.rotor import Chain, RotorSolution, round_up_to_units, solve
from l2l_core.strategies.stage_costs import StageCosts
from l2l_core.trace import Event, MemorySample, Trace

ROTOR_UNITS = 500  # number of units into which Rotor divides the memory; sizes are rounded up


class TimedOperation(NamedTuple):
    """An operation on its lane, in seconds since the micro-batch began."""

    memory: OperationMemory
    lane: str
    start_s: float
    stop_s: float
    settled_s: float  # time from which `bytes_after` holds; for a copy, the time at which it is issued


@dataclass(frozen=True, eq=False)
class PlanCostModel:
    """Bytes and seconds of a step by any plan."""

    costs: Sequence[StageCosts]  # of every micro-batch, in order
    fixed_bytes: int  # weights, buffers and optimizer state
    optimizer_bytes: int  # the optimizer state among these
    update_bytes: int  # peak of an update above `fixed_bytes`, including gradients
    figures: Mapping[str, Any]  # of the device, as `Device.figures` returns them

    @property
    def stages(self) -> int:
        """Number of stages, including the loss."""
        return self.costs[0].structure.stages

    @property
    def budget(self) -> int | None:
        """Bytes of the device; None for no limit."""
        return self.figures.get("memory_bytes")

    def peak_device_bytes(self, operations: Operations) -> int:
        """Return the peak bytes on the device during a step."""
        peak = max(each.peak_bytes for costs in self._distinct_costs for each in simulate_memory(costs, operations))
        return self.fixed_bytes + max(peak, self.update_bytes)

    def peak_host_bytes(self, operations: Operations) -> int:
        """Return the peak of offloaded bytes on the host."""
        return max(each.host_bytes for costs in self._distinct_costs for each in simulate_memory(costs, operations))

    @cached_property
    def _distinct_costs(self) -> list[StageCosts]:
        return list({id(costs): costs for costs in self.costs}.values())

    # -- simulated time ------------------------------------------------------------------------------------------------

    def seconds(self, operations: Operations) -> float:
        """Simulate a step and return its seconds, without updates."""
        return sum(max(each.settled_s for each in self._time_operations(costs, operations)) for costs in self.costs)

    def trace(self, operations: Operations) -> Trace:
        """Simulate a step and return its trace; its span is `seconds`, its peak is `peak_device_bytes`.

        Every operation on `compute` has two samples of memory, its peak and the bytes after it; the last one is the update.
        """
        events, samples, began_s, gradient_bytes = [], [], 0.0, 0
        names = self.costs[0].structure.names

        def sample(t_s: float, nbytes: int) -> None:
            sizes = {
                "weights": self.fixed_bytes - self.optimizer_bytes,
                "gradients": gradient_bytes,
                "activations": nbytes - gradient_bytes,
                "optimizer": self.optimizer_bytes,
            }
            samples.append(MemorySample(began_s + t_s, "device", sizes))

        for k, costs in enumerate(self.costs):
            sample(0.0, costs.base_bytes)
            settled_s = 0.0
            for memory, lane, start_s, stop_s, settled_s in self._time_operations(costs, operations):
                kind, i = memory.operation
                event_kind = {"compute": "backward" if kind == B else "forward", "d2h": "stash", "h2d": "fetch"}[lane]
                events.append(
                    Event(lane, event_kind, began_s + start_s, began_s + stop_s, names[i], k, memory.moved_bytes)
                )
                if lane == "compute":
                    sample(stop_s, memory.peak_bytes)
                else:
                    samples.append(MemorySample(began_s + settled_s, "host", {"stash": memory.host_bytes}))
                gradient_bytes += costs.gradient_bytes.get(i, 0) if kind == B else 0
                sample(settled_s, memory.bytes_after)
            began_s += settled_s
            # Gradients of shared parameters, kept apart by micro-batch, have been added to those of the first one.
            gradient_bytes = sum(self.costs[0].gradient_bytes.values())
        sample(0.0, self.update_bytes)
        return Trace.of(events, samples, names={name: name for name in names})

    def _time_operations(self, costs: StageCosts, operations: Operations) -> Iterator[TimedOperation]:
        now = out_s = in_s = 0.0
        sending: list[float] = []
        fetched_s: dict[tuple[str, int], float] = {}
        for memory in simulate_memory(costs, operations):
            kind, i = memory.operation
            if kind in (OFF, OFFX):
                start_s = max(out_s, now)
                out_s = start_s + self._copy_s("d2h", memory.moved_bytes)
                sending.append(out_s)
                yield TimedOperation(memory, "d2h", start_s, out_s, now)
            elif kind in OFFLOAD_OF:
                now = max([now, *sending])  # as in the executor, a fetch follows the end of all sends
                sending.clear()
                start_s = max(in_s, now)
                in_s = start_s + self._copy_s("h2d", memory.moved_bytes)
                fetched_s[OFFLOAD_OF[kind], i] = in_s
                yield TimedOperation(memory, "h2d", start_s, in_s, now)
            else:
                start_s = max(now, fetched_s.pop((OFF, i), 0.0), fetched_s.pop((OFFX, i), 0.0))
                stop_s = start_s + costs.seconds_of(kind, i)
                now = max([stop_s, *sending])
                sending.clear()
                yield TimedOperation(memory, "compute", start_s, stop_s, now)

    def _copy_s(self, lane: str, nbytes: int) -> float:
        bytes_per_s = self.figures.get(f"{lane}_bytes_per_s")
        return (self.figures.get("latency_s") or 0.0) + (nbytes / bytes_per_s if bytes_per_s else 0.0)

    # -- Rotor ---------------------------------------------------------------------------------------------------------

    @cached_property
    def rotor_solution(self) -> RotorSolution:
        """Rotor's plans for every budget up to twice the need of the plan that keeps everything."""
        costs = self._largest_costs
        plain = simulate_memory(costs, plain_plan(self.stages))
        unit = max(each.peak_bytes - costs.base_bytes for each in plain) / ROTOR_UNITS
        return solve(self.chain(unit), 2 * ROTOR_UNITS)

    @property
    def _largest_costs(self) -> StageCosts:
        return max(self.costs, key=lambda each: each.base_bytes)

    def chain(self, unit: float = 1) -> Chain:
        """Return the stages as a chain, with sizes in units of so many bytes, rounded up."""
        costs = self._largest_costs
        s, stages = costs.structure, range(self.stages)
        inputs = [s.storage_bytes(s.live[i]) for i in stages]
        records = [
            max(costs.record_bytes.get((i, True), 0), costs.record_bytes.get((i, False), 0))
            + s.storage_bytes(s.outputs_of(i))
            for i in stages
        ]
        run_extra = [max(0, costs.max_extra_bytes(F0, i) - s.storage_bytes(s.live[i + 1])) for i in stages]
        keep_extra = [max(0, costs.max_extra_bytes(FALL, i) - records[i]) for i in stages]
        return Chain(
            inputs=round_up_to_units([*inputs, 0], unit),
            records=round_up_to_units(records, unit),
            run_s=tuple(costs.seconds_of(F0, i) for i in stages),
            keep_s=tuple(costs.seconds_of(FALL, i) for i in stages),
            backward_s=tuple(costs.seconds_of(B, i) for i in stages),
            run_extra=round_up_to_units(run_extra, unit),
            keep_extra=round_up_to_units(keep_extra, unit),
            backward_extra=round_up_to_units([costs.max_extra_bytes(B, i) for i in stages], unit),
        )
