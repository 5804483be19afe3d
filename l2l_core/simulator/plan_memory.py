"""Memory samples of a plan, from those of a step by another schedule.

They apply while operations, graphs and an offloaded stash keep the order of the profile's step; weight and gradient slots are
then those of the plan. In another order the samples are left out: a profile has no record of which operation frees the bytes
that are missing from the next sample.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise

from l2l_core.plan import Action, StepPlan
from l2l_core.schedule_rules import gradient_slots, weight_slots
from l2l_core.simulator.action_costs import CostedAction
from l2l_core.simulator.profile import Profile
from l2l_core.simulator.step_costs import SHELL, MemorySamples

_OF_STASH = "IFXBWGS"


def plan_memory(profile: Profile, actions: Sequence[CostedAction], plan: StepPlan) -> Profile:
    """Return the profile with the memory samples of a plan that keeps the profile's graphs."""
    slots = _slot_bytes(profile, plan)
    if slots is None or not _computes_in_order(actions) or (plan.settings.offloads and not _moves_alike(profile, plan)):
        return profile.map_memory(lambda memory: ())
    return profile.map_memory(lambda memory: _with_slots(memory, slots)) if any(slots.values()) else profile


def _computes_in_order(actions: Sequence[CostedAction]) -> bool:
    """Whether operations are in the order of the profile."""
    places = [costed.place for costed in actions if costed.kind in "IFXB" and costed.place is not None]
    return all(before[:2] <= after[:2] for before, after in pairwise(places))


def _moves_alike(profile: Profile, plan: StepPlan) -> bool:
    """Whether the plan offloads and fetches as a relay does that overlaps as the profile's step did."""
    visits = [action.layer for action in plan.actions if action.kind == "V" and not action.is_backward]
    own = StepPlan.expected(plan.settings, list(dict.fromkeys(visits)), visits)
    overlaps = plan.settings.ahead > 0, profile.settings.get("ahead", 1) > 0
    return overlaps[0] == overlaps[1] and _turn_actions(own) == _turn_actions(plan)


def _turn_actions(plan: StepPlan) -> list[Action]:
    return [action._replace(keep="input") for action in plan.actions if action.kind in _OF_STASH]


def _slot_bytes(profile: Profile, plan: StepPlan) -> dict[str, int] | None:
    """Return the bytes by which the plan's slots exceed the profile's, by category; None if they are unknown."""
    settings, layers = profile.settings, [cost for key, cost in profile.layers.items() if key != SHELL]
    ahead = settings.get("ahead", 1)
    weights = plan.settings.slots - weight_slots(ahead, settings.get("resident", 0))
    gradients = gradient_slots(plan.settings.ahead) - gradient_slots(ahead)
    pushes_whole = all(profile.layers[key].push_bytes for key in profile.trained if key != SHELL)
    if gradients and (settings.get("compress") or not pushes_whole):
        return None
    return {
        "weights": weights * max(cost.load_bytes for cost in layers),
        "gradients": gradients * max(cost.push_bytes for cost in layers),
    }


def _with_slots(memory: MemorySamples, slots: Mapping[str, int]) -> MemorySamples:
    def add(held: Mapping[str, int]) -> Mapping[str, int]:
        return {**held, **{name: held[name] + nbytes for name, nbytes in slots.items() if name in held}}

    return tuple((place, add(held) if place == "device" else held) for place, held in memory)
