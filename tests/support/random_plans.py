"""Random plans of a step: plans of regular models, for hypothesis, and other orders of a plan's actions that keep all rules."""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import replace

from hypothesis import strategies as st

from l2l_core import PlanError, StepPlan
from l2l_core.plan import Action, ScheduleSettings, check_plan


@st.composite
def plans(draw: st.DrawFn) -> StepPlan:
    """Plans of regular models, with layers that are visited several times."""
    ahead, resident = draw(st.integers(0, 3)), draw(st.integers(0, 2))
    offloads = draw(st.booleans())
    made = ScheduleSettings(
        micro_batches=draw(st.integers(1, 4)),
        ahead=ahead,
        slots=ahead + 1 + resident,
        kept_graphs=draw(st.integers(0, ahead + 1 + resident)),
        loss_per_micro_batch=draw(st.booleans()),
        offloads=offloads,
        later_turns=draw(st.sampled_from([0, 4])) if offloads and ahead else 0,
        announces_loads=draw(st.booleans()),
    )
    visits = draw(st.lists(st.sampled_from(["L000", "L001", "L002", "L003"]), max_size=6))
    visits = [layer for i, layer in enumerate(visits) if i == 0 or visits[i - 1] != layer]
    return StepPlan.expected(made, list(dict.fromkeys(visits)), visits)


def shuffled(plan: StepPlan, rng: random.Random, swaps: int = 300, fixed: str = "") -> StepPlan:
    """A plan whose actions are in another order, which keeps all rules; those of the kinds `fixed` keep theirs."""
    actions = list(plan.actions)
    for _ in range(swaps):
        i = rng.randrange(len(actions) - 1)
        if actions[i].kind in fixed and actions[i + 1].kind in fixed:
            continue
        actions[i], actions[i + 1] = actions[i + 1], actions[i]
        if not keeps_rules(plan, actions):
            actions[i], actions[i + 1] = actions[i + 1], actions[i]
    return replace(plan, actions=tuple(actions))


def keeps_rules(plan: StepPlan, actions: Iterable[Action]) -> bool:
    """Whether a plan with these actions passes the check."""
    try:
        check_plan(replace(plan, actions=tuple(actions)))
    except PlanError:
        return False
    return True
