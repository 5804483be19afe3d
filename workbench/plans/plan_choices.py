"""Plans to select for the next step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from l2l_core import DeviceOutOfMemory
from l2l_core.strategies import Full, Karma, Lab, Offload, Periodic, Plain, Plan, Policy, RelayPolicy, Rotor, Strategy
from l2l_core.trace import format_bytes

DEFAULT_STRATEGIES: Sequence[Strategy] = (Plain(), Full(), Periodic(), Rotor(), Offload(), Karma(), RelayPolicy())


@dataclass(frozen=True)
class PlanChoice:
    """A strategy for the next step.

    Attributes:
        name: name of the strategy.
        plan: its plan, if there is one.
        reason: reason for having no plan.
    """

    name: str
    plan: Plan | None
    reason: str = ""

    def fits(self, memory_bytes: int | None) -> bool:
        """Return True if there is a plan and it fits in `memory_bytes` of device memory (None: no limit)."""
        return self.plan is not None and (memory_bytes is None or self.plan.peak_device_bytes <= memory_bytes)

    def describe(self, memory_bytes: int | None) -> str:
        """Return the memory and forwards of a step and whether it fits, or the reason for having no plan."""
        plan = self.plan
        if plan is None:
            return self.reason
        needs = f"{format_bytes(plan.peak_device_bytes)} of device memory"
        if memory_bytes is not None:
            needs += f", which {'fits' if self.fits(memory_bytes) else 'does not fit'} in {format_bytes(memory_bytes)}"
        host = f", {format_bytes(plan.peak_host_bytes)} on the host" if plan.peak_host_bytes else ""
        return f"{needs}{host}; {plan.layer_forwards} layer forwards per micro-batch"


def make_choices(lab: Lab, strategies: Sequence[Strategy | Plan]) -> list[PlanChoice]:
    """Return the plans of strategies for the lab's device; plans are taken as they are.

    Raises:
        TypeError: an element is neither a strategy nor a plan.
    """
    return [_make_choice(lab, strategy) for strategy in strategies]


def fastest_choice(choices: Sequence[PlanChoice], memory_bytes: int | None) -> PlanChoice | None:
    """Return the fastest choice that fits, by simulated seconds; if none fits, the one with the lowest peak."""
    plans = [(choice, choice.plan) for choice in choices if choice.plan is not None]
    fitting = [(plan.seconds, choice) for choice, plan in plans if choice.fits(memory_bytes)]
    peaks = [(plan.peak_device_bytes, choice) for choice, plan in plans]
    return min(fitting or peaks, key=lambda each: each[0], default=(0, None))[1]


def _make_choice(lab: Lab, strategy: Strategy | Plan) -> PlanChoice:
    if isinstance(strategy, Plan):
        return PlanChoice(strategy.name, strategy)
    if isinstance(strategy, Policy):
        try:
            return PlanChoice(strategy.name, lab.plan(strategy))
        except (DeviceOutOfMemory, ValueError) as error:
            return PlanChoice(strategy.name, None, str(error))
    name = type(strategy).__name__
    if isinstance(strategy, RelayPolicy):
        remedy = "use Workbench(Relay(model, ...), batches)"
        return PlanChoice("Relay", None, f"Relay is not a plan over stages: {remedy}")
    if callable(getattr(strategy, "measure", None)):
        remedy = "workbench.Ways(lab.compare([...])) shows its needs"
        return PlanChoice(name, None, f"{name} is not a plan over stages: {remedy}")
    raise TypeError(f"{strategy!r} is a {name}: give policies, as Rotor(), or plans, as lab.plan([...])")
