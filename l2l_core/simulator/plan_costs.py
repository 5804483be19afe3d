"""Costs of a given plan, from the profile of a step by another schedule.

An action costs as much as in the profile. Two costs depend on the order of the actions:

- Recomputes. If the plan recomputes a layer whose graph the profile's step kept, backward takes the seconds of the forward
  longer; in the opposite case it takes as much less.
- Bytes of an offloaded stash. If a turn is not offloaded at its end, its bytes are added to the micro-batch's next offload;
  tensors that were not offloaded are not fetched.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise

from l2l_core.plan import SHELL, Action, StepPlan, Turn
from l2l_core.schedule_rules import kept_layer_count
from l2l_core.simulator.action_costs import CostedAction, CostPlace, CostPlaces, StepShape
from l2l_core.simulator.profile import Profile
from l2l_core.simulator.step_costs import ComputeOp, TurnCost

_Call = tuple[int, int]  # forward visit and micro-batch


def cost_plan(profile: Profile, plan: StepPlan) -> tuple[Profile, list[CostedAction]]:
    """Return the actions of a checked plan with their costs, which are in the returned profile.

    Raises:
        ValueError: the profile is of a step that visits other layers, or of one that has no plan.
    """
    places = CostPlaces(StepShape.of(profile))
    _check_profile(profile, plan, places)
    walk = _PlanWalk(profile, places, plan)
    actions = [costed for action in plan.actions for costed in walk.run(action)]
    calls, kept = places.backward.keys(), _kept_calls(profile, places)
    forward_s = {call: _forward_seconds(profile.turns, place) for call, place in places.forward.items()}
    more_s = {places.backward[call].turn: forward_s[call] for call in walk.recomputed & kept}
    more_s |= {places.backward[call].turn: -forward_s[call] for call in calls - walk.recomputed - kept}
    if more_s or not _computes_in_order(actions):
        profile = _without_memory(profile)
    return _change_recomputes(profile, more_s), actions


def _check_profile(profile: Profile, plan: StepPlan, places: CostPlaces) -> None:
    visits = [action.layer for action in plan.actions if action.kind == "V" and not action.is_backward]
    everywhere, trained = [*range(len(places.visits))], {visit for visit, _ in places.backward}
    per_micro_batch = any(k >= 0 for k in places.loss)
    frozen = [places.visits[visit] for visit in everywhere if visit not in trained]
    reasons = {
        f"the profile's step has {_losses(per_micro_batch)}, and the plan {_losses(not per_micro_batch)}": (
            plan.settings.loss_per_micro_batch != per_micro_batch
        ),
        f"the plan visits {_listed(visits)}, and the profile's step visits {_listed(places.visits)}": (
            visits != places.visits
        ),
        "micro-batches of the profile call layers in different orders, and a plan has one order for all": any(
            way != everywhere for way in places.ways.values()
        ),
        f"layer {_listed(frozen)} has no backward in the profile (frozen, before every trained parameter?), and the plan "
        "has one": bool(frozen),
    }
    for reason, holds in reasons.items():
        if holds:
            raise ValueError(
                f"{reason}. Take plan and profile from one model: relay.plan(batch) and Profile.of(relay.step(batch).trace); or "
                "simulate without a plan"
            )


def _losses(per_micro_batch: bool) -> str:
    return "a loss of each micro-batch" if per_micro_batch else "one loss of the batch"


def _listed(layers: Sequence[str]) -> str:
    return ", ".join([*layers[:3], "..."] if len(layers) > 4 else layers)


def _kept_calls(profile: Profile, places: CostPlaces) -> set[_Call]:
    """Return the calls that the profile's step did not recompute."""
    kept = kept_layer_count(profile.settings, len(places.visits)) if profile.settings.get("keep") else 0
    first = len(places.visits) - kept
    return {
        call for call, place in places.backward.items() if call[0] >= first or place.turn == places.forward[call].turn
    }


def _forward_seconds(turns: Sequence[TurnCost], place: CostPlace) -> float:
    return sum(op.seconds for op in turns[place.turn].ops[place.start : place.stop] if op.kind == "forward")


def _computes_in_order(actions: Sequence[CostedAction]) -> bool:
    """Whether operations are in the profile's order, so that its memory samples apply."""
    places = [costed.place for costed in actions if costed.kind in "IFXB" and costed.place is not None]
    return all(before[:2] <= after[:2] for before, after in pairwise(places))


def _without_memory(profile: Profile) -> Profile:
    def changed(_: int, turns: Sequence[TurnCost]) -> Iterator[TurnCost]:
        for turn in turns:
            yield turn._replace(ops=tuple(op._replace(memory=()) for op in turn.ops))

    return replace(profile.map_turns(changed), memory=())


def _change_recomputes(profile: Profile, seconds: Mapping[int, float]) -> Profile:
    """Return the profile with other seconds of backward, by number of turn."""
    numbers = iter(range(len(profile.turns)))

    def op(one: ComputeOp, more_s: float) -> ComputeOp:
        return one._replace(seconds=max(0.0, one.seconds + more_s)) if one.kind == "backward" else one

    def changed(_: int, turns: Sequence[TurnCost]) -> Iterator[TurnCost]:
        for turn, number in zip(turns, numbers, strict=False):
            more_s = seconds.get(number, 0.0)
            yield turn._replace(ops=tuple(op(one, more_s) for one in turn.ops)) if more_s else turn

    return profile.map_turns(changed) if seconds else profile


class _PlanWalk:
    """State of the device between two actions, as far as costs depend on it."""

    def __init__(self, profile: Profile, places: CostPlaces, plan: StepPlan) -> None:
        self._turns, self._places = profile.turns, places
        self.recomputed: set[_Call] = set()
        self._last_push = {action.layer: action for action in plan.actions if action.kind == "P"}
        self._slots = [""] * plan.settings.slots
        self._visit: Action | None = None  # the open one
        self._begun = 0  # visits of forward that have begun
        self._calls: dict[int, list[int]] = defaultdict(list)  # of each forward visit, not back-propagated yet
        self._graphs: dict[_Call, str] = {}  # kept ones, and how long
        self._position = dict.fromkeys(range(plan.settings.micro_batches), 0)
        self._new_bytes: dict[int, int] = defaultdict(int)  # made by a micro-batch since its last offload
        self._offloads: dict[int, int] = defaultdict(int)  # of each micro-batch
        # Number of offloads when the layer's input was made, and when forward had read it
        self._made: dict[_Call, int] = {}
        self._read: dict[_Call, int] = {}

    def run(self, action: Action) -> Iterator[CostedAction]:
        """Yield the action with its costs, unless it takes neither time nor space."""
        kind, k, call = action.kind, action.k, (action.visit, action.k)
        if kind == "I":
            self._made[0, k] = 0
            yield self._compute(action, self._places.start.get(k))
        elif kind == "F":
            self._calls[action.visit].append(k)
            self._position[k] += 1
            self._read[call] = self._made[action.visit + 1, k] = self._offloads[k]
            if action.keep != "input":
                self._graphs[call] = action.keep
            yield self._compute(action, self._places.forward[call])
        elif kind == "X":
            yield self._compute(action, self._places.loss.get(k))
        elif kind == "B":
            self._calls[action.visit].remove(k)
            if self._graphs.pop(call, None) is None:
                self.recomputed.add(call)
            yield self._compute(action, self._places.backward[call])
        elif kind in "WG":
            yield from self._fetch(action)
        elif kind == "S":
            self._drop_graph(action)
            yield self._offload(action)
        elif kind == "D":
            self._drop_graph(action)
        else:
            yield from self._run_of_layer(action)

    def _run_of_layer(self, action: Action) -> Iterator[CostedAction]:
        kind, layer = action.kind, action.layer
        if kind == "L":
            self._graphs = {call: keep for call, keep in self._graphs.items() if not self._evicts(call, action)}
            self._slots[action.slot] = layer
        elif kind == "V":
            self._visit = action
            self._begun += not action.is_backward
        elif kind == "E":
            if not action.is_backward:
                self._drop_graphs(action.visit, self._calls[action.visit])
            self._visit = None
        if kind in "ALVU" or (kind == "P" and self._last_push[layer] == action):
            yield CostedAction(kind, action)

    # -- graphs --------------------------------------------------------------------------------------------------------

    def _evicts(self, call: _Call, load: Action) -> bool:
        return self._places.visits[call[0]] == self._slots[load.slot]

    def _drop_graph(self, action: Action) -> None:
        visit = self._visit
        if visit is not None and action.visit >= 0 and not action.is_backward:
            self._drop_graphs(visit.visit, self._calls[visit.visit][-1:])

    def _drop_graphs(self, visit: int, calls: Sequence[int]) -> None:
        for k in calls:
            if self._graphs.get((visit, k)) == "turn":
                del self._graphs[visit, k]

    # -- stash ---------------------------------------------------------------------------------------------------------

    def _compute(self, action: Action, place: CostPlace | None) -> CostedAction:
        if place is not None and (place.start == 0 or action.kind == "I"):
            self._new_bytes[action.k] += self._turns[place.turn].stash_bytes
        return CostedAction(action.kind, action, place)

    def _fetch(self, action: Action) -> Iterator[CostedAction]:
        """Yield a wait or a fetch; neither does anything if the micro-batch is elsewhere, as in the loop."""
        place = self._find_turn(action.turn)
        if place is not None:
            k, since = action.k, self._read if action.is_backward else self._made
            visit = action.visit if action.is_backward else self._position[k]
            is_away = self._offloads[k] > since[visit, k]
            yield CostedAction(action.kind, action, place, nbytes=self._turns[place.turn].fetch_bytes if is_away else 0)

    def _find_turn(self, turn: Turn) -> CostPlace | None:
        k, layer, visit, is_backward = turn
        if is_backward:
            if k not in self._calls.get(visit, ()) or self._places.visits[visit] != layer:
                return None
            # The number that the loop gives it: the visits that have begun are counted, whether or not others follow
            return self._places.backward[visit, k]._replace(visit=2 * self._begun - 1 - visit)
        waits_for = self._places.visits[self._position[k] :][:1]
        place = self._places.forward[self._position[k], k] if waits_for == [layer] else None
        return place and place._replace(visit=visit)

    def _offload(self, action: Action) -> CostedAction:
        k = action.k
        place = self._places.start.get(k) if action.layer == SHELL else self._places.of_turn(action.turn)
        nbytes = self._new_bytes.pop(k, 0)
        self._offloads[k] += 1
        return CostedAction(action.kind, action, place, nbytes=nbytes)
