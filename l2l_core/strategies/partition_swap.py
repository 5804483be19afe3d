"""Partition and swap, within two budgets: stages in partitions, whose records wait on the host until shortly before use.

After TensorFlowMem's rules for values, as far as a chain of stages has them: partitions of a fixed number of operations run
one after another; what is used many partitions later goes to the host, and comes back shortly before. Here an operation is a
stage, and sizes are searched for, since two budgets bind: what is not on the device waits on the host, which is finite too.
What is not here: variables on the host, which are a relay's (`RelayPolicy`); weights stay on the device, as in all plans.
"""

from __future__ import annotations

from dataclasses import dataclass

from l2l_core.strategies.fixed_plans import Operations
from l2l_core.strategies.plan import FALL, OFF, PRE, B, Operation
from l2l_core.strategies.plan_cost_model import PlanCostModel
from l2l_core.strategies.policies import Policy, choose_fastest


@dataclass(frozen=True)
class PartitionSwap(Policy):
    """Send what partitions keep to the host, if their backward is not near, and bring it back a partition ahead.

    The fastest within both budgets, of partitions of 1, 2, 4, ... stages, and of all numbers of partitions that count as near.

    Args:
        budget_bytes: of the device; default the device's own.
        host_bytes: that may wait on the host; default without a limit.
    """

    budget_bytes: int | None = None
    host_bytes: int | None = None

    def operations(self, cost_model: PlanCostModel) -> Operations:
        n = cost_model.stages
        sizes = [2**power for power in range(n.bit_length())]
        plans = {partition_plan(n, size, near) for size in sizes for near in range(1, -(-n // size) + 1)}
        # Of plans that take as long, the one that moves least is first.
        return choose_fastest(
            type(self).__name__, cost_model, sorted(plans, key=len), self.budget_bytes, self.host_bytes
        )


def partition_plan(n: int, size: int, near: int) -> Operations:
    """Keep every record: of the last `near` partitions of `size` stages on the device, of those before on the host."""
    last = (n - 1) // size
    sent = [i for i in range(n - 1) if i // size <= last - near]
    steps = []
    for i in range(n):
        steps += [Operation(FALL, i), *([Operation(OFF, i)] if i in sent else [])]
    for i in reversed(range(n)):
        while sent and sent[-1] // size >= i // size - 1:
            steps.append(Operation(PRE, sent.pop()))
        steps.append(Operation(B, i))
    return tuple(steps)
