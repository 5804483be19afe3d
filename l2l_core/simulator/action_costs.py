"""The actions of a step, each with the place of its costs in a profile.

`RelaySchedule` decides the actions; the profile answers which layer each micro-batch calls next. Steps depth first, and steps
whose micro-batches are merged, have no such schedule: their stays are taken one after another, as they were recorded.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from typing import NamedTuple

from l2l_core.plan import SHELL, Action, ActionResult, RelaySchedule, ScheduleSettings, SlotChoice, Turn, run_schedule
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
    """An action with its costs."""

    kind: str
    action: Action
    place: CostPlace | None = None
    nbytes: int = -1  # of a copy of the stash; -1 if the turn's are meant
    later: tuple[CostPlace, ...] = ()  # of `H`


class TurnShape(NamedTuple):
    """Where the operations of a turn are divided: forward up to `loss`, loss up to `backward`, backward up to `stop`."""

    k: int
    loss: int
    backward: int
    stop: int

    @staticmethod
    def of(turn: TurnCost) -> TurnShape:
        """Divide the operations of a turn."""
        kinds = [op[0] for op in turn.ops]
        stop = len(kinds)
        backward = kinds.index("backward") if "backward" in kinds else stop
        loss = kinds.index("loss") if "loss" in kinds[:backward] else backward
        if "forward" in kinds[:loss]:
            return TurnShape(turn.k, loss, backward, stop)
        return TurnShape(turn.k, 0, backward if loss < backward else 0, stop)


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
            tuple(TurnShape.of(turn) for turn in profile.start),
            tuple(StayShape(stay.layer, stay.visit, tuple(map(TurnShape.of, stay.turns))) for stay in profile.stays),
        )

    @property
    def is_merged(self) -> bool:
        """True if the micro-batches of a stay are merged."""
        return any(turn.k < 0 for turn in self.start)

    @property
    def loss_per_micro_batch(self) -> bool:
        """True if every micro-batch has a loss."""
        return any(turn.k >= 0 and turn.loss < turn.backward for stay in self.stays for turn in stay.turns)


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
        for turn in shape.start:
            self.start[turn.k] = CostPlace(number, 0, turn.stop, SHELL, BEFORE_FIRST_STAY)
            self.ways[turn.k] = []
            number += 1
        count = sum(any(turn.loss for turn in stay.turns) for stay in shape.stays)
        for layer, visit, turns in shape.stays:
            is_forward = any(turn.loss for turn in turns)
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

    def of_turn(self, turn: Turn) -> CostPlace | None:
        """Return the costs of a turn; None if the micro-batch has none in that visit."""
        return (self.backward if turn.is_backward else self.forward).get((turn.visit, turn.k))

    def has_graph(self, k: int) -> bool:
        """Whether the last layer's backward is in the turn of the loss."""
        loss, last = self.loss.get(k), self.backward.get((self.ways[k][-1], k)) if self.ways[k] else None
        return loss is not None and last is not None and last.turn == loss.turn


@lru_cache(maxsize=16)
def actions_of_step(shape: StepShape, settings: ScheduleSettings, depth_first: bool) -> tuple[CostedAction, ...]:
    """Return the actions of a step of this shape, as far as they take time or space."""
    if depth_first or shape.is_merged:
        return tuple(_recorded_actions(shape, settings))
    places = CostPlaces(shape)
    schedule = RelaySchedule(settings, shape.layers, places.visits).train()
    return tuple(add_costs(list(run_schedule(schedule, _Answers(places).answer)), places))


class _Answers:
    """Answers of a profile to a schedule."""

    def __init__(self, places: CostPlaces) -> None:
        self._places, self._position = places, dict.fromkeys(places.ways, 0)

    def answer(self, action: Action) -> ActionResult | None:
        """Return the result of an action."""
        kind, k = action.kind, action.k
        if kind == "X":
            return ActionResult(has_graph=k >= 0 and self._places.has_graph(k))
        if kind not in "IF":
            return None
        self._position[k] += kind == "F"
        way, position = self._places.ways[k], self._position[k]
        waits_for = self._places.visits[way[position]] if position < len(way) else None
        return ActionResult(waits_for, (action.visit, k) in self._places.backward)


def add_costs(actions: Sequence[Action], places: CostPlaces) -> Iterator[CostedAction]:
    """Yield the actions with their costs, without those that take neither time nor space."""
    last_push = {action.layer: index for index, action in enumerate(actions) if action.kind == "P"}
    finished: set[int] = set()  # micro-batches whose loss has run
    for index, action in enumerate(actions):
        kind, layer, k, visit, is_backward = action[:5]
        if kind == "F":
            yield CostedAction(kind, action, places.forward[visit, k])
        elif kind == "B":
            yield CostedAction(kind, action, places.backward[visit, k])
        elif kind == "X":
            finished.add(k)
            yield CostedAction(kind, action, places.loss.get(k))
        elif kind == "S" and layer == SHELL:
            yield CostedAction(kind, action, None if k in finished else places.start.get(k))
        elif kind in "WGS":
            yield CostedAction(kind, action, places.of_turn(Turn(k, layer, visit, is_backward)))
        elif kind == "I":
            yield CostedAction(kind, action, places.start.get(k))
        elif kind == "H":
            later = (places.of_turn(turn) for turn in action.turns)
            yield CostedAction(kind, action, later=tuple(place for place in later if place is not None))
        elif kind in "ALVU" or (kind == "P" and last_push[layer] == index):
            yield CostedAction(kind, action)


# -- steps without a schedule --------------------------------------------------------------------------------------------


def _recorded_actions(shape: StepShape, settings: ScheduleSettings) -> Iterator[CostedAction]:
    """Yield the actions of the stays in their order."""
    for number, turn in enumerate(shape.start):
        place = CostPlace(number, 0, turn.stop, SHELL, BEFORE_FIRST_STAY)
        yield CostedAction("I", Action("I", SHELL, turn.k), place)
        if settings.offloads:
            yield CostedAction("S", Action("S", SHELL, turn.k), place)
    last_backward = {
        stay.layer: index for index, stay in enumerate(shape.stays) if any(t.backward < t.stop for t in stay.turns)
    }
    slots = SlotChoice(settings.ahead, settings.slots, [stay.layer for stay in shape.stays], settings.announces_loads)
    places = list(_turn_places(shape))
    number = 0
    for index, (layer, visit, turns) in enumerate(shape.stays):
        is_backward = not any(turn.loss for turn in turns)
        yield from _without_costs(slots.begin_visit(layer))
        yield CostedAction("V", Action("V", layer, visit=visit, is_backward=is_backward))
        slots.end_visit()
        for turn in turns:
            yield from _turn_actions(turn, places[number : number + 2], settings)
            number += 1
        if last_backward.get(layer) == index:
            yield from _without_costs(Action(kind, layer, visit=visit, is_backward=is_backward) for kind in "PU")
    yield CostedAction("P", Action("P", SHELL))


def _turn_actions(turn: TurnShape, places: Sequence[CostPlace], settings: ScheduleSettings) -> Iterator[CostedAction]:
    """Yield the actions of a turn; `places` are those of the turn and of the next one, if any."""
    k, loss, backward, stop = turn
    place, layer = places[0], places[0].layer
    if settings.offloads:
        yield CostedAction("W", Action("W", layer, k), place)
        for upcoming in places[1:] if settings.ahead else ():
            yield CostedAction("G", Action("G", upcoming.layer, k), upcoming)
    for kind, first, end in (("F", 0, loss), ("X", loss, backward), ("B", backward, stop)):
        if first < end:
            yield CostedAction(kind, Action(kind, layer, k), place._replace(start=first, stop=end))
    if settings.offloads:
        yield CostedAction("S", Action("S", layer, k), place)


def _turn_places(shape: StepShape) -> Iterator[CostPlace]:
    number = len(shape.start)
    for layer, visit, turns in shape.stays:
        for turn in turns:
            yield CostPlace(number, 0, turn.stop, layer, visit)
            number += 1


def _without_costs(actions: Iterable[Action]) -> Iterator[CostedAction]:
    for action in actions:
        yield CostedAction(action.kind, action)
