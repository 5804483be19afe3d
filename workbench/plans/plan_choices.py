"""Plans to choose from for the next step; of a way without a plan, why it has none."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from l2l_core import DeviceOutOfMemory
from l2l_core.strategies import Full, Karma, Lab, Offload, Periodic, Plain, Plan, Policy, RelayPolicy, Rotor, Strategy
from l2l_core.trace import format_bytes

DEFAULT_STRATEGIES: Sequence[Strategy] = (Plain(), Full(), Periodic(), Rotor(), Offload(), Karma(), RelayPolicy())


@dataclass(frozen=True)
class PlanChoice:
    """A way to make the next step.

    Attributes:
        name: of the way.
        plan: None where there is none.
        why: there is none.
    """

    name: str
    plan: Plan | None
    reason: str = ""

    def fits(self, memory_bytes: int | None) -> bool:
        """Whether there is a plan, and a device of so much memory (None: no limit) has room for it."""
        return self.plan is not None and (memory_bytes is None or self.plan.peak_device_bytes <= memory_bytes)

    def describe(self, memory_bytes: int | None) -> str:
        """Say what a step by it needs, and whether it fits; or why there is no plan."""
        plan = self.plan
        if plan is None:
            return self.reason
        needs = f"{format_bytes(plan.peak_device_bytes)} of device memory"
        if memory_bytes is not None:
            needs += f", which {'fits' if self.fits(memory_bytes) else 'does not fit'} in {format_bytes(memory_bytes)}"
        host = f", {format_bytes(plan.peak_host_bytes)} on the host" if plan.peak_host_bytes else ""
        return f"{needs}{host}; {plan.layer_forwards} layer forwards per micro-batch"


def make_choices(lab: Lab, strategies: Sequence[Strategy | Plan]) -> list[PlanChoice]:
    """Make the plans of these ways for the lab's device; a way may be a plan already.

    Raises:
        TypeError: something else.
    """
    return [_make_choice(lab, way) for way in strategies]


def fastest_choice(choices: Sequence[PlanChoice], memory_bytes: int | None) -> PlanChoice | None:
    """Return the choice of the least simulated seconds that fits; where none fits, the one that needs least."""
    with_plans = [(choice, choice.plan) for choice in choices if choice.plan is not None]
    fitting = [(plan.seconds, choice) for choice, plan in with_plans if choice.fits(memory_bytes)]
    needing = [(plan.peak_device_bytes, choice) for choice, plan in with_plans]
    return min(fitting or needing, key=lambda each: each[0], default=(0, None))[1]


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
        return PlanChoice(
            "Relay",
            None,
            "Relay is no plan over stages: Workbench(Relay(model, ...), batches) steps with it",
        )
    if callable(getattr(strategy, "row", None)):
        return PlanChoice(
            name, None, f"{name} is no plan over stages: workbench.Ways(lab.compare([...])) shows what it needs"
        )
    raise TypeError(f"{strategy!r} is a {name}: give policies, as Rotor(), or plans, as lab.plan([...])")
