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
from itertools import count

from l2l_core.plan import Action, StepPlan
from l2l_core.schedule_rules import kept_layer_count
from l2l_core.simulator.action_costs import ActionWalk, CostedAction, CostPlace, CostPlaces, StepShape
from l2l_core.simulator.plan_memory import plan_memory
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
    actions = list(filter(None, map(walk.run, plan.actions)))
    calls, kept = places.backward.keys(), _kept_calls(profile, places)
    forward_s = {call: _forward_seconds(profile.turns, place) for call, place in places.forward.items()}
    more_s = {places.backward[call].turn: forward_s[call] for call in walk.recomputed & kept}
    more_s |= {places.backward[call].turn: -forward_s[call] for call in calls - walk.recomputed - kept}
    if more_s:  # the bytes of a graph are not in a profile
        return _change_recomputes(profile.map_memory(lambda memory: ()), more_s), actions
    return plan_memory(profile, actions, plan), actions


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


def _change_recomputes(profile: Profile, seconds: Mapping[int, float]) -> Profile:
    """Return the profile with other seconds of backward, by number of turn."""
    numbers = count()

    def changed(_: int, turns: Sequence[TurnCost]) -> Iterator[TurnCost]:
        for turn in turns:
            more_s = seconds.get(next(numbers), 0.0)
            yield turn._replace(ops=tuple(_change_backward(turn.ops, more_s))) if more_s else turn

    return profile.map_turns(changed)


def _change_backward(ops: Sequence[ComputeOp], more_s: float) -> Iterator[ComputeOp]:
    """Yield operations whose backward takes so much longer; a wait may have split it in several."""
    for op in ops:
        seconds = max(0.0, op.seconds + more_s) if op.kind == "backward" else op.seconds
        more_s -= seconds - op.seconds
        yield op._replace(seconds=seconds)


class _PlanWalk(ActionWalk):
    """Also follows the graphs that are kept, and the bytes that the plan moves."""

    def __init__(self, profile: Profile, places: CostPlaces, plan: StepPlan) -> None:
        super().__init__(places)
        self._turns = profile.turns
        self.recomputed: set[_Call] = set()
        self._slots = [""] * plan.settings.slots
        self._visit: Action | None = None  # the open one
        self._graphs: dict[_Call, str] = {}  # kept ones, and how long
        self._new_bytes: dict[int, int] = defaultdict(int)  # made by a micro-batch since its last offload
        self._offloads: dict[int, int] = defaultdict(int)  # of each micro-batch
        # Number of offloads when the layer's input was made, and when forward had read it
        self._made: dict[_Call, int] = defaultdict(int)
        self._read: dict[_Call, int] = {}

    def run(self, action: Action) -> CostedAction | None:
        self._follow_graphs(action)
        costed = super().run(action)
        if costed is None or action.kind not in "IFXBWGS":
            return costed
        if action.kind in "WGS":
            return costed._replace(nbytes=self._moved_bytes(action, costed.place))
        self._add_new_bytes(action, costed.place)
        return costed

    # -- graphs --------------------------------------------------------------------------------------------------------

    def _follow_graphs(self, action: Action) -> None:
        kind, call = action.kind, (action.visit, action.k)
        if kind == "F" and action.keep != "input":
            self._graphs[call] = action.keep
        elif kind == "B" and self._graphs.pop(call, None) is None:
            self.recomputed.add(call)
        elif kind == "L":
            self._evict(action.slot)
            self._slots[action.slot] = action.layer
        elif kind == "V":
            self._visit = action
        elif kind in "DS" and self._visit is not None and action.visit >= 0 and not action.is_backward:
            visit = self._visit.visit
            self._drop_graphs(visit, [k for number, k in self._calls if number == visit][-1:])
        elif kind == "E":
            self._visit = None
            if not action.is_backward:
                self._drop_graphs(action.visit, [k for number, k in self._calls if number == action.visit])

    def _evict(self, slot: int) -> None:
        """Drop the graphs that have saved the weights in a slot."""
        held = self._slots[slot]
        self._graphs = {call: keep for call, keep in self._graphs.items() if self.places.visits[call[0]] != held}

    def _drop_graphs(self, visit: int, calls: Sequence[int]) -> None:
        for k in calls:
            if self._graphs.get((visit, k)) == "turn":
                del self._graphs[visit, k]

    # -- stash ---------------------------------------------------------------------------------------------------------

    def _add_new_bytes(self, action: Action, place: CostPlace | None) -> None:
        if place is not None and place.start == 0:
            self._new_bytes[action.k] += self._turns[place.turn].stash_bytes
        if action.kind == "F":
            call = action.visit, action.k
            self._read[call] = self._made[action.visit + 1, action.k] = self._offloads[action.k]

    def _moved_bytes(self, action: Action, place: CostPlace | None) -> int:
        k = action.k
        if action.kind == "S":
            self._offloads[k] += 1
            return self._new_bytes.pop(k, 0)
        assert place is not None
        since = self._read[action.visit, k] if action.is_backward else self._made[self._position[k], k]
        return self._turns[place.turn].fetch_bytes if self._offloads[k] > since else 0
