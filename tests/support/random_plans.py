"""Random plans of a step: other orders of its actions that keep all rules."""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import replace

from l2l_core import PlanError, StepPlan
from l2l_core.plan import Action, check_plan


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
