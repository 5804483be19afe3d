"""The actions of a step, each with the place of its costs in a profile.

`RelaySchedule` decides the actions; the profile has the layer that each micro-batch calls next. Steps depth first, and steps
whose micro-batches are merged, have no such schedule: their stays are taken one after another, as they were recorded.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import NamedTuple

from l2l_core.plan import SHELL, Action, ActionResult, RelaySchedule, ScheduleSettings, SlotChoice, run_schedule
from l2l_core.simulator.profile import Profile
from l2l_core.simulator.step_costs import BEFORE_FIRST_STAY, TurnCost


class CostPlace(NamedTuple):
    """Operations `start` to `stop` of a turn."""

    turn: int  # position in `Profile.turns`
    start: int
    stop: int
    layer: str
    visit: int  # number of the turn's visit in a trace


class CostedAction(NamedTuple):
    """Fields of an `Action` that the simulator uses, and the place of its costs."""

    kind: str
    layer: str
    place: CostPlace | None = None
    nbytes: int = -1  # of a copy of the stash; -1 if the turn's are meant
    slot: int = -1
    is_backward: bool = False
    layers: tuple[str, ...] = ()  # of `A`
    later: tuple[CostPlace, ...] = ()  # of `H`


# Micro-batch of a turn, and where its operations are divided: forward up to the first number, loss up to the second, backward
# up to the third, the number of operations. A plain tuple, since a step has thousands.
TurnShape = tuple[int, int, int, int]


def _turn_shape(turn: TurnCost) -> TurnShape:
    kinds = [op[0] for op in turn.ops]
    stop = len(kinds)
    if stop and kinds[0] == "backward":
        return turn.k, 0, 0, stop
    backward = kinds.index("backward") if "backward" in kinds else stop
    loss = kinds.index("loss") if "loss" in kinds[:backward] else backward
    if "forward" in kinds[:loss]:
        return turn.k, loss, backward, stop
    return turn.k, 0, backward if loss < backward else 0, stop


class StayShape(NamedTuple):
    """A stay without its costs."""

    layer: str
    visit: int
    turns: tuple[TurnShape, ...]


class StepShape(NamedTuple):
    """A step without its costs; steps of one shape have the same actions."""

    layers: tuple[str, ...]
    start: tuple[TurnShape, ...]
    stays: tuple[StayShape, ...]

    @staticmethod
    def of(profile: Profile) -> StepShape:
        """Return the shape of a profile."""
        return StepShape(
            tuple(key for key in profile.layers if key != SHELL),
            tuple(map(_turn_shape, profile.start)),
            tuple(StayShape(stay.layer, stay.visit, tuple(map(_turn_shape, stay.turns))) for stay in profile.stays),
        )

    @property
    def is_merged(self) -> bool:
        """True if the micro-batches of a stay are merged."""
        return any(k < 0 for k, *_ in self.start)

    @property
    def loss_per_micro_batch(self) -> bool:
        """True if every micro-batch has a loss."""
        return any(k >= 0 and loss < backward for stay in self.stays for k, loss, backward, _ in stay.turns)


class CostPlaces:
    """Costs by visit and micro-batch; visits have the numbers of `Action.visit`."""

    def __init__(self, shape: StepShape) -> None:
        self.start: dict[int, CostPlace] = {}
        self.forward: dict[tuple[int, int], CostPlace] = {}
        self.loss: dict[int, CostPlace] = {}
        self.backward: dict[tuple[int, int], CostPlace] = {}
        self.visits: list[str] = []  # layers of the forward visits
        self.ways: dict[int, list[int]] = {}  # visits of each micro-batch
        number = 0
        for k, _, _, stop in shape.start:
            self.start[k] = CostPlace(number, 0, stop, SHELL, BEFORE_FIRST_STAY)
            self.ways[k] = []
            number += 1
        count = sum(any(loss for _, loss, _, _ in stay.turns) for stay in shape.stays)
        for layer, visit, turns in shape.stays:
            is_forward = any(loss for _, loss, _, _ in turns)
            undone = len(self.visits) if is_forward else 2 * count - 1 - visit
            for k, loss, backward, stop in turns:
                if loss:
                    self.forward[undone, k] = CostPlace(number, 0, loss, layer, visit)
                    self.ways.setdefault(k, []).append(undone)
                if loss < backward:
                    self.loss[k] = CostPlace(number, loss, backward, layer, visit)
                if backward < stop:
                    self.backward[undone, k] = CostPlace(number, backward, stop, layer, visit)
                number += 1
            if is_forward:
                self.visits.append(layer)

    def has_graph(self, k: int) -> bool:
        """Whether the last layer's backward is in the turn of the loss."""
        loss, last = self.loss.get(k), self.backward.get((self.ways[k][-1], k)) if self.ways[k] else None
        return loss is not None and last is not None and last.turn == loss.turn


@lru_cache(maxsize=8)
def actions_of_step(shape: StepShape, settings: ScheduleSettings, depth_first: bool) -> tuple[CostedAction, ...]:
    """Return the actions of a step of this shape, as far as they take time or space."""
    if depth_first or shape.is_merged:
        return tuple(_recorded_actions(shape, settings))
    places = CostPlaces(shape)
    schedule = RelaySchedule(settings, shape.layers, places.visits).train()
    walk = ActionWalk(places)
    return tuple(filter(None, map(walk.run, run_schedule(schedule, _RecordedResults(places).of))))


class _RecordedResults:
    """Results of actions, as a profile has recorded them."""

    def __init__(self, places: CostPlaces) -> None:
        self._places = places
        self._calls = {k: iter(self._results(k)) for k in places.ways}

    def _results(self, k: int) -> Iterator[ActionResult]:
        """Yield the results of starting micro-batch `k`, and of its forwards."""
        way, needs_backward = self._places.ways[k], False
        for visit in way:
            yield ActionResult(self._places.visits[visit], needs_backward)
            needs_backward = (visit, k) in self._places.backward
        yield ActionResult(None, needs_backward)

    def of(self, action: Action) -> ActionResult | None:
        """Return the result of an action."""
        if action.kind in "IF":
            return next(self._calls[action.k])
        return (
            ActionResult(has_graph=action.k >= 0 and self._places.has_graph(action.k)) if action.kind == "X" else None
        )


class ActionWalk:
    """Finds the costs of actions, one after another: those of a turn depend on where its micro-batch is."""

    def __init__(self, places: CostPlaces) -> None:
        self.places = places
        self._position = dict.fromkeys(places.ways, 0)
        self._begun = 0  # visits of forward
        self._calls: dict[tuple[int, int], None] = {}  # visit and micro-batch, not back-propagated yet
        self._pushes = Counter(places.visits[visit] for visit in {visit for visit, _ in places.backward})
        self._finished: set[int] = set()  # micro-batches whose loss has run

    def run(self, action: Action) -> CostedAction | None:
        """Return the action with its costs; None if it takes neither time nor space."""
        kind, layer, k, visit, is_backward, slot, _, layers, _ = action
        place: CostPlace | None = None
        if kind in "WG":
            if (place := self._find_turn((k, layer, visit, is_backward))) is None:
                return None
        elif kind == "F":
            self._position[k] += 1
            self._calls[visit, k] = None
            place = self.places.forward[visit, k]
        elif kind == "B":
            del self._calls[visit, k]
            place = self.places.backward[visit, k]
        elif kind == "S":
            place = self._offloaded_turn(action)
        elif kind == "X":
            self._finished.add(k)
            place = self.places.loss.get(k)
        elif kind == "I":
            place = self.places.start.get(k)
        elif kind == "V":
            self._begun += not is_backward
        elif kind == "H":
            return CostedAction(kind, layer, later=tuple(filter(None, map(self._find_turn, action.turns))))
        elif kind in "DET" or (kind == "P" and not self._is_last_push(layer)):
            return None
        return CostedAction(kind, layer, place, -1, slot, is_backward, layers)

    def _offloaded_turn(self, action: Action) -> CostPlace | None:
        _, layer, k, visit, is_backward, *_ = action
        if layer == SHELL:  # a profile counts the bytes of this offload in the start
            return None if k in self._finished else self.places.start.get(k)
        return (self.places.backward if is_backward else self.places.forward).get((visit, k))

    def _find_turn(self, turn: tuple[int, str, int, bool]) -> CostPlace | None:
        """Return the costs of a turn; None if the micro-batch is elsewhere, and the loop does nothing."""
        k, layer, visit, is_backward = turn
        if is_backward:
            if (visit, k) not in self._calls or self.places.visits[visit] != layer:
                return None
            # The number that the loop gives it: the visits that have begun are counted, whether or not others follow
            place, number = self.places.backward.get((visit, k)), 2 * self._begun - 1 - visit
        else:
            way, position = self.places.ways[k], self._position[k]
            if position == len(way) or self.places.visits[way[position]] != layer:
                return None
            place, number = self.places.forward[way[position], k], visit
        return place if place is None or place.visit == number else place._replace(visit=number)

    def _is_last_push(self, layer: str) -> bool:
        """Whether no later visit adds to the layer's gradient."""
        self._pushes[layer] -= 1
        return self._pushes[layer] <= 0


# -- steps without a schedule --------------------------------------------------------------------------------------------


def _recorded_actions(shape: StepShape, settings: ScheduleSettings) -> Iterator[CostedAction]:
    """Yield the actions of the stays in their order."""
    for number, (_, _, _, stop) in enumerate(shape.start):
        place = CostPlace(number, 0, stop, SHELL, BEFORE_FIRST_STAY)
        yield CostedAction("I", SHELL, place)
        if settings.offloads:
            yield CostedAction("S", SHELL, place)
    last_backward = {
        stay.layer: index
        for index, stay in enumerate(shape.stays)
        if any(backward < stop for _, _, backward, stop in stay.turns)
    }
    slots = SlotChoice(settings.ahead, settings.slots, [stay.layer for stay in shape.stays], settings.announces_loads)
    places = list(_turn_places(shape))
    number = 0
    for index, (layer, _, turns) in enumerate(shape.stays):
        is_backward = not any(loss for _, loss, _, _ in turns)
        for action in slots.begin_visit(layer):
            yield CostedAction(action.kind, action.layer, slot=action.slot, layers=action.layers)
        yield CostedAction("V", layer, is_backward=is_backward)
        slots.end_visit()
        for turn in turns:
            yield from _turn_actions(turn, places[number : number + 2], settings)
            number += 1
        if last_backward.get(layer) == index:
            yield CostedAction("P", layer)
            yield CostedAction("U", layer)
    yield CostedAction("P", SHELL)


def _turn_actions(turn: TurnShape, places: Sequence[CostPlace], settings: ScheduleSettings) -> Iterator[CostedAction]:
    """Yield the actions of a turn; `places` are those of the turn and of the next one, if any."""
    _, loss, backward, stop = turn
    place, layer = places[0], places[0].layer
    if settings.offloads:
        yield CostedAction("W", layer, place)
        for upcoming in places[1:] if settings.ahead else ():
            yield CostedAction("G", upcoming.layer, upcoming)
    for kind, first, end in (("F", 0, loss), ("X", loss, backward), ("B", backward, stop)):
        if first < end:
            yield CostedAction(kind, layer, place._replace(start=first, stop=end))
    if settings.offloads:
        yield CostedAction("S", layer, place)


def _turn_places(shape: StepShape) -> Iterator[CostPlace]:
    number = len(shape.start)
    for layer, visit, turns in shape.stays:
        for _, _, _, stop in turns:
            yield CostPlace(number, 0, stop, layer, visit)
            number += 1
