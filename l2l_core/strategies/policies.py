"""Ways to save memory as policies: each makes a plan from what stages cost, what the device holds, and its link."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass, fields
from itertools import product

from l2l_core.devices import DeviceOutOfMemory
from l2l_core.strategies import fixed_plans
from l2l_core.strategies.fixed_plans import KEEP, OFFLOAD, RECOMPUTE, Operations
from l2l_core.strategies.plan_cost_model import PlanCostModel
from l2l_core.strategies.strategy_table import StrategyBench, StrategyResult
from l2l_core.trace import format_bytes


@dataclass(frozen=True)
class Policy(ABC):
    """Makes plans; its fields are its settings.

    Without a plan that fits, `operations` raises DeviceOutOfMemory, which states the smallest budget.
    """

    def measure(self, bench: StrategyBench) -> StrategyResult:
        """Make a step by its plan on a copy, and say what it needed."""
        return bench.run_policy(self)

    @property
    def name(self) -> str:
        """Return what it is called in tables: its class, and what is not as by default."""
        chosen = [(each.name, getattr(self, each.name), each.default) for each in fields(self)]
        said = [
            f"within {format_bytes(value)}" if name == "budget_bytes" else f"{name}={value}"
            for name, value, default in chosen
            if value != default
        ]
        return ", ".join([type(self).__name__, *said])

    @abstractmethod
    def operations(self, cost_model: PlanCostModel) -> Operations:
        """Make the plan for one micro-batch."""


@dataclass(frozen=True)
class Plain(Policy):
    """Keep every record: what plain training does."""

    def operations(self, cost_model: PlanCostModel) -> Operations:
        return fixed_plans.plain_plan(cost_model.stages)


@dataclass(frozen=True)
class Full(Policy):
    """Keep the inputs of stages, and recompute every one."""

    def operations(self, cost_model: PlanCostModel) -> Operations:
        return fixed_plans.full_plan(cost_model.stages)


@dataclass(frozen=True)
class Periodic(Policy):
    """Recompute segments of `length` stages, by default about the root of their number (Chen et al., arXiv 1604.06174)."""

    length: int | None = None

    def operations(self, cost_model: PlanCostModel) -> Operations:
        return fixed_plans.periodic_plan(cost_model.stages, self.length)


@dataclass(frozen=True)
class Rotor(Policy):
    """The fastest persistent plan for a chain (Beaumont et al., arXiv 1911.13214) whose exact peak fits.

    Args:
        budget_bytes: of the device; default the device's own.
    """

    budget_bytes: int | None = None

    def operations(self, cost_model: PlanCostModel) -> Operations:
        solution = cost_model.rotor_solution
        limits = range(len(solution.cost[0, cost_model.stages - 1]))
        # The program's own bytes are rounded up, so what a plan needs is read off the exact walk.
        plans = dict.fromkeys(solution.plan(m) for m in limits if solution.seconds(m) < float("inf"))
        return choose_fastest(
            type(self).__name__, cost_model, [fixed_plans.plain_plan(cost_model.stages), *plans], self.budget_bytes
        )


@dataclass(frozen=True)
class Offload(Policy):
    """Send every record to the host but the last ones, and bring each back `ahead` stages before it is read.

    Args:
        ahead: 0 brings each back when it is needed: synchronous.
        keep: how many stages before the loss keep theirs on the device.
    """

    ahead: int = 1
    keep: int = 0

    def operations(self, cost_model: PlanCostModel) -> Operations:
        sent = max(0, cost_model.stages - 1 - self.keep)
        return fixed_plans.mixed_plan(OFFLOAD * sent + KEEP * (cost_model.stages - 1 - sent), self.ahead)


@dataclass(frozen=True)
class Combined(Policy):
    """For each stage keep, recompute or offload: the fastest of all choices that fits, tried one by one.

    Exhaustive up to `most` layers; above that it is refused, because nothing here would be sure to find the fastest.

    Args:
        budget_bytes: of the device; default the device's own.
        choices: the letters of `fixed_plans.py` to choose from.
        most: 3 ** most plans are walked through.
    """

    budget_bytes: int | None = None
    choices: str = KEEP + RECOMPUTE + OFFLOAD
    max_layers: int = 8

    def operations(self, cost_model: PlanCostModel) -> Operations:
        layers = cost_model.stages - 1
        if layers > self.max_layers:
            raise ValueError(
                f"{self.name} tries {len(self.choices)} ** {layers} plans: it is exhaustive for up to {self.max_layers} layers. Name "
                "fewer layers=, or use Karma() or Rotor()"
            )
        plans = (fixed_plans.mixed_plan(choice) for choice in product(self.choices, repeat=layers))
        return choose_fastest(type(self).__name__, cost_model, plans, self.budget_bytes)


@dataclass(frozen=True)
class Karma(Policy):
    """Send records to the host but those of the last stages that fit, then recompute instead wherever that is faster.

    A greedy search in the manner of KARMA (Wahib et al., arXiv 2008.11421), which has a solver for it: one stage at a time, the
    one that gains most.

    Args:
        budget_bytes: of the device; default the device's own.
    """

    budget_bytes: int | None = None

    def operations(self, cost_model: PlanCostModel) -> Operations:
        layers = cost_model.stages - 1
        swaps = [fixed_plans.mixed_plan(OFFLOAD * sent + KEEP * (layers - sent)) for sent in range(layers + 1)]
        found = choose_fastest(type(self).__name__, cost_model, swaps, self.budget_bytes)
        choice = OFFLOAD * swaps.index(found) + KEEP * (layers - swaps.index(found))
        while OFFLOAD in choice:
            others = [choice[:i] + RECOMPUTE + choice[i + 1 :] for i in range(layers) if choice[i] == OFFLOAD]
            plans = {fixed_plans.mixed_plan(other): other for other in others}
            best = choose_fastest(type(self).__name__, cost_model, [found, *plans], self.budget_bytes)
            if best == found:
                break
            found, choice = best, plans[best]
        return found


@dataclass(frozen=True)
class RelayPolicy:
    """The relay: weights and optimizer state on the host too, one layer on the device at a time. It is no plan over stages.

    Args:
        keep: of how many of the last layers weights and graphs stay on the device.
        ahead, stash: as of `RelayConfig`.
    """

    keep: int = 0
    ahead: int = 1
    stash: str = "host"

    def measure(self, bench: StrategyBench) -> StrategyResult:
        """Make steps by relay on a copy, and say what one needed."""
        kept = f", {self.keep} graphs kept" if self.keep else ""
        return bench.run_relay(f"Relay, stash on the {self.stash}{kept}", self.keep, self.ahead, self.stash)


def choose_fastest(
    name: str,
    cost_model: PlanCostModel,
    plans: Iterable[Operations],
    budget_bytes: int | None,
    host_bytes: int | None = None,
) -> Operations:
    """Choose the fastest plan whose exact peak fits, and no more of which waits on the host than may.

    Raises:
        DeviceOutOfMemory: there is none; it states the smallest budget of the device for which there is one, or of the host,
            if that is what they all exceed.
    """
    budget = cost_model.budget if budget_bytes is None else budget_bytes
    best, best_s, least, least_host = None, float("inf"), None, None
    for plan in plans:
        if host_bytes is not None and (waits := cost_model.peak_host_bytes(plan)) > host_bytes:
            least_host = waits if least_host is None else min(least_host, waits)
            continue
        peak = cost_model.peak_device_bytes(plan)
        least = peak if least is None else min(least, peak)
        if (budget is None or peak <= budget) and (seconds := cost_model.seconds(plan)) < best_s:
            best, best_s = plan, seconds
    if best is None and least is None:
        raise over_budget_error(name, least_host or 0, host_bytes or 0, "on the host")
    if best is None:
        raise over_budget_error(name, least or 0, budget or 0)
    return best


def over_budget_error(name: str, min_bytes: int, budget: int, where: str = "on the device") -> DeviceOutOfMemory:
    """Make the error that a policy has no plan within a budget."""
    error = DeviceOutOfMemory(
        f"{name} has no plan within {format_bytes(budget)} ({budget} bytes) {where}: the smallest budget for which it has one is "
        f"{format_bytes(min_bytes)} ({min_bytes} bytes)",
        min_bytes,
        budget,
        {},
    )
    error.least_bytes = min_bytes
    return error
