"""Policies: each makes a plan from the costs of the stages, the device's budget and its link."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass, fields
from itertools import product

from l2l_core.devices import DeviceOutOfMemory
from l2l_core.strategies import fixed_plans
from l2l_core.strategies.fixed_plans import KEEP, OFFLOAD, RECOMPUTE
from l2l_core.strategies.plan import Operations
from l2l_core.strategies.plan_cost_model import PlanCostModel
from l2l_core.strategies.strategy_table import StrategyBench, StrategyResult
from l2l_core.trace import format_bytes


@dataclass(frozen=True)
class Policy(ABC):
    """Maker of plans; its fields are its settings.

    If no plan fits, `operations` raises DeviceOutOfMemory, which states the smallest budget.

    Example:
        See `Lab`.
    """

    def measure(self, bench: StrategyBench) -> StrategyResult:
        """Run a step by the policy's plan on a copy of the model."""
        return bench.run_policy(self)

    @property
    def name(self) -> str:
        """Name in tables: the class, and the settings that are not at their defaults."""
        chosen = [(each.name, getattr(self, each.name), each.default) for each in fields(self)]
        settings = [
            f"within {format_bytes(value)}" if name == "budget_bytes" else f"{name}={value}"
            for name, value, default in chosen
            if value != default
        ]
        return ", ".join([type(self).__name__, *settings])

    @abstractmethod
    def operations(self, cost_model: PlanCostModel) -> Operations:
        """Make the plan for one micro-batch."""


@dataclass(frozen=True)
class BudgetPolicy(Policy):
    """Policy that chooses the fastest of several plans within a budget.

    Args:
        budget_bytes: budget of the device; default the device's own.
    """

    budget_bytes: int | None = None

    def choose_fastest(
        self, cost_model: PlanCostModel, plans: Iterable[Operations], host_bytes: int | None = None
    ) -> Operations:
        """Choose the fastest plan whose exact peaks fit; the first of several equally fast ones.

        Raises:
            DeviceOutOfMemory: no plan fits; states the smallest budget of the device that would do, or of the host if every
                plan exceeds that one.
        """
        budget = cost_model.budget if self.budget_bytes is None else self.budget_bytes
        best, best_s = None, float("inf")
        device_peaks, host_peaks = [], []
        for plan in plans:
            if host_bytes is not None and (host_peak := cost_model.peak_host_bytes(plan)) > host_bytes:
                host_peaks.append(host_peak)
                continue
            device_peaks.append(cost_model.peak_device_bytes(plan))
            if (budget is None or device_peaks[-1] <= budget) and (seconds := cost_model.seconds(plan)) < best_s:
                best, best_s = plan, seconds
        if best is not None:
            return best
        peaks, limit, place = (device_peaks, budget, "device") if device_peaks else (host_peaks, host_bytes, "host")
        limit, least = limit or 0, min(peaks)
        message = (
            f"{type(self).__name__} has no plan within {format_bytes(limit)} ({limit} bytes) on the {place}: the smallest budget "
            f"for which it has one is {format_bytes(least)} ({least} bytes)"
        )
        error = DeviceOutOfMemory(message, least, limit, {})
        error.least_bytes = least
        raise error


@dataclass(frozen=True)
class Plain(Policy):
    """Keep every record, as plain training does.

    Example:
        >>> from l2l_core.strategies import Lab, Plain
        >>> relay.close()  # a model has one trainer at a time
        >>> lab = Lab(model, batch, loss=nn.CrossEntropyLoss())
        >>> print(lab.plan(Plain()))
        Plain: Fall0 Fall1 Fall2 Fall3 Fall4 Fall5 Fall6 B6 B5 B4 B3 B2 B1 B0
    """

    def operations(self, cost_model: PlanCostModel) -> Operations:
        return fixed_plans.plain_plan(cost_model.stages)


@dataclass(frozen=True)
class Full(Policy):
    """Keep the inputs of stages, and recompute every stage.

    Example:
        >>> from l2l_core.strategies import Full, Lab
        >>> relay.close()  # a model has one trainer at a time
        >>> lab = Lab(model, batch, loss=nn.CrossEntropyLoss())
        >>> print(lab.plan(Full()))
        Full: Fck0 Fck1 Fck2 Fck3 Fck4 Fck5 Fall6 B6 Fall5 B5 Fall4 B4 Fall3 B3 Fall2 B2 Fall1 B1 Fall0 B0
    """

    def operations(self, cost_model: PlanCostModel) -> Operations:
        return fixed_plans.full_plan(cost_model.stages)


@dataclass(frozen=True)
class Periodic(Policy):
    """Recompute segments of `length` stages, by default the square root of their number (Chen et al., arXiv 1604.06174).

    Example:
        >>> from l2l_core.strategies import Lab, Periodic
        >>> relay.close()  # a model has one trainer at a time
        >>> lab = Lab(model, batch, loss=nn.CrossEntropyLoss())
        >>> lab.plan(Periodic(3)).layer_forwards  # six layers, and reruns
        12
    """

    length: int | None = None

    def operations(self, cost_model: PlanCostModel) -> Operations:
        return fixed_plans.periodic_plan(cost_model.stages, self.length)


@dataclass(frozen=True)
class Rotor(BudgetPolicy):
    """Fastest persistent plan for a chain (Beaumont et al., arXiv 1911.13214) whose exact peak fits.

    Example:
        >>> from l2l_core.strategies import Lab, Plain, Rotor
        >>> relay.close()  # a model has one trainer at a time
        >>> lab = Lab(model, (torch.randn(64, 16), torch.randint(4, (64,))), loss=nn.CrossEntropyLoss())
        >>> plain = lab.plan(Plain())
        >>> plan = lab.plan(Rotor(plain.peak_device_bytes - 20_000))
        >>> plain.layer_forwards, plan.layer_forwards > 6  # the device lacks 20 kB, so layers run again
        (6, True)
    """

    def operations(self, cost_model: PlanCostModel) -> Operations:
        solution = cost_model.rotor_solution
        limits = range(len(solution.cost[0, cost_model.stages - 1]))
        # The solver rounds bytes up, so every plan that it finds is evaluated exactly.
        plans = dict.fromkeys(solution.plan(m) for m in limits if solution.seconds(m) < float("inf"))
        return self.choose_fastest(cost_model, [fixed_plans.plain_plan(cost_model.stages), *plans])


@dataclass(frozen=True)
class Offload(Policy):
    """Offload every record but the last ones, and fetch each `ahead` stages before its backward.

    Args:
        ahead: 0 fetches each record when it is needed, synchronously.
        keep: number of stages before the loss that keep their records on the device.

    Example:
        >>> from l2l_core.strategies import Lab, Offload, Plain
        >>> relay.close()  # a model has one trainer at a time
        >>> lab = Lab(model, (torch.randn(64, 16), torch.randint(4, (64,))), loss=nn.CrossEntropyLoss())
        >>> plain, offload = lab.plan(Plain()), lab.plan(Offload(keep=2))
        >>> plain.peak_device_bytes > offload.peak_device_bytes, offload.peak_host_bytes
        (True, 45056)
    """

    ahead: int = 1
    keep: int = 0

    def operations(self, cost_model: PlanCostModel) -> Operations:
        n = cost_model.stages
        return fixed_plans.mixed_plan(fixed_plans.offload_first(n, n - 1 - self.keep), self.ahead)


@dataclass(frozen=True)
class Combined(BudgetPolicy):
    """Keep, recompute or offload each stage: the fastest of all combinations that fits.

    The search is exhaustive, so models of more than `max_layers` layers are refused.

    Args:
        choices: letters of `fixed_plans.py` to choose from.
        max_layers: limit of the search, which evaluates `len(choices) ** layers` plans.

    Example:
        >>> from l2l_core.strategies import Combined, Lab, Plain
        >>> relay.close()  # a model has one trainer at a time
        >>> lab = Lab(model, (torch.randn(64, 16), torch.randint(4, (64,))), loss=nn.CrossEntropyLoss())
        >>> budget = lab.plan(Plain()).peak_device_bytes - 20_000
        >>> lab.plan(Combined(budget, choices="KR")).peak_device_bytes <= budget
        True
    """

    choices: str = KEEP + RECOMPUTE + OFFLOAD
    max_layers: int = 8

    def operations(self, cost_model: PlanCostModel) -> Operations:
        layers = cost_model.stages - 1
        if layers > self.max_layers:
            raise ValueError(
                f"{self.name} would evaluate {len(self.choices)} ** {layers} plans; its search is exhaustive, for up to "
                f"{self.max_layers} layers. Give fewer layers=, or use Karma() or Rotor()"
            )
        plans = (fixed_plans.mixed_plan(choice) for choice in product(self.choices, repeat=layers))
        return self.choose_fastest(cost_model, plans)


@dataclass(frozen=True)
class Karma(BudgetPolicy):
    """Offload all records but those of the last stages that fit, then recompute instead where that is faster.

    A greedy search in the manner of KARMA (Wahib et al., arXiv 2008.11421), which uses a solver: one stage at a time, the
    one with the largest gain.

    Example:
        >>> from l2l_core.strategies import Karma, Lab, Plain
        >>> relay.close()  # a model has one trainer at a time
        >>> lab = Lab(model, (torch.randn(64, 16), torch.randint(4, (64,))), loss=nn.CrossEntropyLoss())
        >>> budget = lab.plan(Plain()).peak_device_bytes - 20_000
        >>> lab.plan(Karma(budget)).peak_device_bytes <= budget
        True
    """

    def operations(self, cost_model: PlanCostModel) -> Operations:
        choices = [fixed_plans.offload_first(cost_model.stages, count) for count in range(cost_model.stages)]
        plans = {fixed_plans.mixed_plan(choice): choice for choice in choices}
        best = self.choose_fastest(cost_model, plans)
        while OFFLOAD in (choice := plans[best]):
            others = [choice[:i] + RECOMPUTE + choice[i + 1 :] for i, letter in enumerate(choice) if letter == OFFLOAD]
            plans = {best: choice} | {fixed_plans.mixed_plan(other): other for other in others}
            previous, best = best, self.choose_fastest(cost_model, plans)
            if best == previous:
                break
        return best


@dataclass(frozen=True)
class PartitionSwap(BudgetPolicy):
    """Offload the records of partitions whose backward is not near, and fetch them one partition ahead.

    Follows TensorFlowMem's rules for values as far as they apply to a chain of stages; weights stay on the device. Chooses
    the fastest plan within both budgets, of partitions of 1, 2, 4, ... stages and of all numbers of near partitions.

    Args:
        host_bytes: budget of offloaded bytes on the host; default no limit.

    Example:
        >>> from l2l_core.strategies import Lab, PartitionSwap, Plain
        >>> relay.close()  # a model has one trainer at a time
        >>> lab = Lab(model, (torch.randn(64, 16), torch.randint(4, (64,))), loss=nn.CrossEntropyLoss())
        >>> budget = lab.plan(Plain()).peak_device_bytes - 20_000
        >>> plan = lab.plan(PartitionSwap(budget))
        >>> plan.peak_device_bytes <= budget, plan.layer_forwards  # no layer runs again
        (True, 6)
    """

    host_bytes: int | None = None

    def operations(self, cost_model: PlanCostModel) -> Operations:
        n = cost_model.stages
        sizes = [2**power for power in range(n.bit_length())]
        plans = {fixed_plans.partition_plan(n, size, near) for size in sizes for near in range(1, -(-n // size) + 1)}
        # Among plans of equal seconds, the one that copies least is chosen.
        return self.choose_fastest(cost_model, sorted(plans, key=len), self.host_bytes)


@dataclass(frozen=True)
class RelayPolicy:
    """The relay, with weights and optimizer state on the host too; it is not a plan over stages.

    Args:
        keep: number of last layers whose weights and graphs stay on the device.
        ahead, stash: as in `RelayConfig`.

    Example:
        >>> from l2l_core.strategies import Lab, Plain, RelayPolicy
        >>> relay.close()  # a model has one trainer at a time
        >>> lab = Lab(model, batch, loss=nn.CrossEntropyLoss())
        >>> plain, relayed = lab.compare([Plain(), RelayPolicy()]).rows
        >>> relayed.peak_device_bytes < plain.peak_device_bytes
        True
    """

    keep: int = 0
    ahead: int = 1
    stash: str = "host"

    def measure(self, bench: StrategyBench) -> StrategyResult:
        """Run steps by relay on a copy of the model."""
        kept = f", {self.keep} graphs kept" if self.keep else ""
        return bench.run_relay(f"Relay, stash on the {self.stash}{kept}", self.keep, self.ahead, self.stash)
