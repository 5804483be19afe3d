"""What a plan needs on this model and this device, before it runs: exact bytes, and seconds on virtual lanes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from l2l_core.strategies.fixed_plans import Operations, plain_plan
from l2l_core.strategies.plan import FALL, B
from l2l_core.strategies.plan_memory import simulate_memory
from l2l_core.strategies.plan_timeline import make_plan_trace, time_operations
from l2l_core.strategies.rotor import Chain, RotorSolution, round_up_to_units, solve
from l2l_core.strategies.stage_costs import StageCosts, storage_bytes
from l2l_core.trace import Trace

ROTOR_UNITS = 500  # into which memory is divided for Rotor; sizes are rounded up


@dataclass(frozen=True, eq=False)
class PlanCostModel:
    """Judges plans for one step.

    Attributes:
        costs: of every micro-batch.
        fixed_bytes: weights, buffers and optimizer state.
        optimizer_bytes: of these, the optimizer's state.
        update_bytes: the most that an update needs besides, gradients included.
        figures: of the device, as `Device.figures` has them.
    """

    costs: Sequence[StageCosts]
    fixed_bytes: int
    optimizer_bytes: int
    update_bytes: int
    figures: Mapping[str, Any]

    @property
    def stages(self) -> int:
        """Number of stages, that of the loss included."""
        return self.costs[0].structure.stages

    @property
    def budget(self) -> int | None:
        """Bytes of the device; None if it has no limit."""
        return self.figures.get("memory_bytes")

    def peak_device_bytes(self, operations: Operations) -> int:
        """Return the highest bytes on the device during a step."""
        highest = max(step.peak_bytes for costs in self._distinct_costs for step in simulate_memory(costs, operations))
        return self.fixed_bytes + max(highest, self.update_bytes)

    def peak_host_bytes(self, operations: Operations) -> int:
        """Return the most bytes that wait on the host."""
        return max(step.host_bytes for costs in self._distinct_costs for step in simulate_memory(costs, operations))

    def seconds(self, operations: Operations) -> float:
        """Simulate a step: compute in order, copies on one lane each way; updates are left out."""
        return sum(
            max(each.settled_s for each in time_operations(costs, operations, self._copy_s)) for costs in self.costs
        )

    def trace(self, operations: Operations) -> Trace:
        """Simulate a step, as a trace: its span is `seconds`, its highest bytes are `peak_device_bytes`."""
        weights_bytes = self.fixed_bytes - self.optimizer_bytes
        return make_plan_trace(
            self.costs, operations, self._copy_s, weights_bytes, self.optimizer_bytes, self.update_bytes
        )

    @cached_property
    def _distinct_costs(self) -> list[StageCosts]:
        return list({id(costs): costs for costs in self.costs}.values())

    def _copy_s(self, lane: str, nbytes: int) -> float:
        bytes_per_s = self.figures.get(f"{lane}_bytes_per_s")
        return (self.figures.get("latency_s") or 0.0) + (nbytes / bytes_per_s if bytes_per_s else 0.0)

    # -- the chain that Rotor sees -------------------------------------------------------------------------------------

    @cached_property
    def rotor_solution(self) -> RotorSolution:
        """Rotor's plans for every budget up to what the plan that keeps everything needs."""
        costs = max(self.costs, key=lambda each: each.base_bytes)
        s, n = costs.structure, costs.structure.stages
        unit = max(step.peak_bytes - costs.base_bytes for step in simulate_memory(costs, plain_plan(n))) / ROTOR_UNITS
        inputs = [storage_bytes(s, s.live[i]) for i in range(n)] + [0]
        records = [
            max(costs.record_bytes.get((i, True), 0), costs.record_bytes.get((i, False), 0))
            + storage_bytes(s, s.outputs_of(i))
            for i in range(n)
        ]
        after = [storage_bytes(s, s.live[i + 1]) for i in range(n)]
        run_s = [costs.seconds_of_kind("F0", i) for i in range(n)]
        keep_s = [costs.seconds_of_kind(FALL, i) for i in range(n)]
        chain = Chain(
            round_up_to_units(inputs, unit),
            round_up_to_units(records, unit),
            tuple(run_s),
            tuple(keep_s),
            tuple(costs.seconds_of_kind(B, i) for i in range(n)),
            round_up_to_units([max(0, costs.max_extra_bytes("F0", i) - after[i]) for i in range(n)], unit),
            round_up_to_units([max(0, costs.max_extra_bytes(FALL, i) - records[i]) for i in range(n)], unit),
            round_up_to_units([costs.max_extra_bytes(B, i) for i in range(n)], unit),
        )
        return solve(chain, 2 * ROTOR_UNITS)
