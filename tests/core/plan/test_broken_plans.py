"""Plans that break one rule each: the check names the first action that cannot run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from l2l_core import PlanError, StepPlan
from l2l_core.plan import SHELL, Action, ScheduleSettings, check_plan

LAYERS = ["L000", "L001", "L002"]
Actions = list[Action]


def expected(**settings: Any) -> StepPlan:
    return StepPlan.expected(ScheduleSettings(**{"micro_batches": 2, **settings}), LAYERS, LAYERS)


def find(actions: Actions, kind: str, layer: str, k: int = -1, is_backward: bool = False) -> int:
    """The index of the first action of this kind."""
    wanted = kind, layer, k, is_backward
    return next(i for i, a in enumerate(actions) if (a.kind, a.layer, a.k, a.is_backward) == wanted)


def removed(kind: str, layer: str, k: int = -1, is_backward: bool = False) -> Callable[[Actions], None]:
    return lambda actions: actions.pop(find(actions, kind, layer, k, is_backward)) and None


def both_removed(actions: Actions) -> None:
    """Push and update of a layer."""
    for kind in "PU":
        actions.pop(find(actions, kind, "L001", -1, True))


def twice(kind: str, layer: str, k: int = -1, is_backward: bool = False) -> Callable[[Actions], None]:
    def change(actions: Actions) -> None:
        index = find(actions, kind, layer, k, is_backward)
        actions.insert(index, actions[index])

    return change


def changed(
    kind: str, layer: str, k: int = -1, is_backward: bool = False, /, **fields: Any
) -> Callable[[Actions], None]:
    def change(actions: Actions) -> None:
        index = find(actions, kind, layer, k, is_backward)
        actions[index] = actions[index]._replace(**fields)

    return change


def swapped(*places: tuple[Any, ...]) -> Callable[[Actions], None]:
    """Two actions in each other's place."""

    def change(actions: Actions) -> None:
        one, other = (find(actions, *place) for place in places)
        actions[one], actions[other] = actions[other], actions[one]

    return change


def inserted(action: Action, *before: Any) -> Callable[[Actions], None]:
    return lambda actions: actions.insert(find(actions, *before), action)


Place = tuple[Any, ...] | int  # of `find`, or counted from behind the last action
BROKEN: dict[str, tuple[Callable[[Actions], None], Place, str]] = {
    "load forgotten": (removed("L", "L001"), ("V", "L001"), "its weights are in no slot"),
    "no such slot": (changed("L", "L001", slot=9), ("L", "L001"), "there are 2 weight slots"),
    "no such layer": (changed("L", "L001", layer="L009"), ("L", "L009"), "no visit of that layer"),
    "loaded over the open layer": (
        inserted(Action("L", "L002", slot=0), "F", "L000", 0),
        ("L", "L002"),
        "slot 0 holds L000, whose visit has not ended",
    ),
    "forward not started": (removed("I", SHELL, 1), ("F", "L000", 1), "was not started"),
    "no such micro-batch": (changed("I", SHELL, 1, k=7), ("I", SHELL, 7), "there are 2 micro-batches"),
    "micro-batches out of order": (swapped(("F", "L000", 0), ("F", "L000", 1)), ("F", "L000", 1), "ascending order"),
    "forward left out": (removed("F", "L000", 1), ("F", "L001", 1), "the next visit of the micro-batch is 0"),
    "forward in another visit": (swapped(("F", "L001", 0), ("F", "L000", 0)), ("F", "L001", 0), "its visit is not open"),
    "forward after T": (
        inserted(Action("F", "L000", 0, 0, True), "B", "L000", 0, True),
        ("F", "L000", 0, True),
        "backward has begun",
    ),
    "loss before its forward": (swapped(("F", "L002", 0), ("X", SHELL, 0)), ("X", SHELL, 0), "its forward is not finished"),
    "losses out of order": (changed("X", SHELL, 0, k=1), ("X", SHELL, 1), "its forward is not finished"),
    "loss left out": (removed("X", SHELL, 1), ("B", "L002", 1), "its loss has not run"),
    "T before the losses": (inserted(Action("T"), "V", "L002"), ("T", ""), "a loss is missing"),
    "gradients out of order": (
        swapped(("B", "L001", 0, True), ("B", "L001", 1, True)),
        ("B", "L001", 1, True),
        "micro-batch 0 is next",
    ),
    "backward left out": (removed("B", "L001", 0, True), ("B", "L001", 1, True), "micro-batch 0 is next"),
    "push left out": (removed("P", "L001", -1, True), ("U", "L001", -1, True), "was not pushed"),
    "push and update left out": (
        both_removed,
        ("E", "L001", -1, True),
        "add P before the end",
    ),
    "push too early": (swapped(("B", "L001", 1, True), ("P", "L001", -1, True)), ("P", "L001", -1, True), "1 of 2"),
    "update too early": (swapped(("U", "L001", -1, True), ("P", "L001", -1, True)), ("U", "L001", -1, True), "not pushed"),
    "no end": (removed("P", SHELL), 0, "append P:shell"),
    "after the end": (lambda actions: actions.append(Action("T")), -1, "ends the step"),
    "visit of another layer": (changed("V", "L001", -1, True, layer="L000"), ("V", "L000", -1, True), "is of L001"),
    "visit numbered wrongly": (changed("V", "L001", visit=5), ("V", "L001"), "visits of forward are numbered"),
}  # fmt: skip


@pytest.mark.all_cases
@pytest.mark.parametrize("name", BROKEN)
def test_the_action_that_breaks_a_rule_is_named(name: str) -> None:
    change, place, message = BROKEN[name]
    plan = expected()
    check_plan(plan)
    actions = list(plan.actions)
    change(actions)
    with pytest.raises(PlanError, match=message) as error:
        check_plan(StepPlan(plan.settings, tuple(actions)))
    assert error.value.index == (len(actions) + place if isinstance(place, int) else find(actions, *place))


@pytest.mark.all_cases
@pytest.mark.parametrize(
    "kind, layer, k, is_backward",
    [("L", "L001", -1, False), ("I", SHELL, 0, False), ("P", "L001", -1, True), ("U", "L001", -1, True)],
)
def test_an_action_that_runs_once_is_refused_the_second_time(kind: str, layer: str, k: int, is_backward: bool) -> None:
    plan = expected()
    actions = list(plan.actions)
    twice(kind, layer, k, is_backward)(actions)
    with pytest.raises(PlanError) as error:
        check_plan(StepPlan(plan.settings, tuple(actions)))
    assert error.value.index == find(actions, kind, layer, k, is_backward) + 1


@pytest.mark.parametrize("k", [0, 1])
def test_a_turn_that_does_not_wait_for_its_tensors_is_refused(k: int) -> None:
    plan = expected(offloads=True)
    actions = list(plan.actions)
    removed("W", "L001", k)(actions)
    with pytest.raises(PlanError, match=f"wait for them before: W{k}") as error:
        check_plan(StepPlan(plan.settings, tuple(actions)))
    assert error.value.index == find(actions, "F", "L001", k)


def test_a_loss_of_one_micro_batch_is_refused_where_the_batch_has_one() -> None:
    plan = expected(loss_per_micro_batch=False)
    actions = list(plan.actions)
    changed("X", SHELL, k=0)(actions)
    with pytest.raises(PlanError, match="the loss is one of the whole batch") as error:
        check_plan(StepPlan(plan.settings, tuple(actions)))
    assert error.value.index == find(actions, "X", SHELL, 0)
