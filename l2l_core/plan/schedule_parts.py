"""Parts of user-defined schedules, and the simplest schedule, `serial`.

The actions within a visit are the relay's: micro-batches in ascending order, their losses, backward, push and update, and the
copies of the stash. A schedule decides when layers are loaded, and into which slots.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from l2l_core.plan.actions import Action
from l2l_core.plan.relay_schedule import ScheduleSettings
from l2l_core.plan.step_plan import StepPlan


class StepVisit(NamedTuple):
    """A visit of a layer in a step, with its actions except for loads.

    Attributes:
        layer: key of the layer.
        is_backward: whether the visit is one of backward. The last visit of forward includes backward of its layer, if each
            micro-batch has a loss.
        actions: in the order of issue. Those of the first visit start with the forwards' first shell code, those of the first
            visit of backward with the turn to it, and those of the last visit end with the push of the shell's gradient.
    """

    layer: str
    is_backward: bool
    actions: tuple[Action, ...]


def visits_of_step(settings: ScheduleSettings, visits: Sequence[str]) -> list[StepVisit]:
    """Return the visits of a step, forward and backward; `visits` are the layers in the order of forward.

    A schedule that loads the layer of each visit before it, and then yields the visit's actions, is complete.
    """
    parts: list[StepVisit] = []
    actions: list[Action] = []
    for action in StepPlan.expected(settings, list(dict.fromkeys(visits)), visits).actions:
        if action.kind not in "AL":
            actions.append(action)
        if action.kind == "E":
            parts.append(StepVisit(action.layer, action.is_backward, tuple(actions)))
            actions = []
    return [*parts[:-1], *(last._replace(actions=(*last.actions, *actions)) for last in parts[-1:])]


class SlotTable:
    """Weight slots of a step, and the layer in each.

    Args:
        count: number of slots, at most `ScheduleSettings.slots`.
    """

    def __init__(self, count: int) -> None:
        self._layers: list[str | None] = [None] * count

    def load(self, layer: str, instead_of: str | None = None) -> Iterator[Action]:
        """Yield the load of a layer, unless it is in a slot already.

        The load takes an empty slot. Without one, it replaces the layer `instead_of`.

        Raises:
            ValueError: no slot is empty, and none holds `instead_of`.
        """
        if layer in self._layers:
            return
        replaced = None if None in self._layers else instead_of
        if replaced not in self._layers:
            raise ValueError(
                f"{layer} cannot be loaded instead of {instead_of}: the slots hold {', '.join(map(str, self._layers))}. Name one "
                "of these layers"
            )
        slot = self._layers.index(replaced)
        self._layers[slot] = layer
        yield Action("L", layer, slot=slot)


def serial(settings: ScheduleSettings, visits: Sequence[str]) -> Iterator[Action]:
    """Yield a step that loads a layer, runs it, and only then loads the next one, into the same slot."""
    slots, previous = SlotTable(1), None
    for visit in visits_of_step(settings, visits):
        yield from slots.load(visit.layer, instead_of=previous)
        yield from visit.actions
        previous = visit.layer
