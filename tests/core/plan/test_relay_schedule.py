"""Order of visits and turns, found from the layers at which micro-batches wait. No model runs here."""

from __future__ import annotations

from dataclasses import replace

import pytest

from l2l_core.plan import Action, ActionResult, RelaySchedule, ScheduleSettings

DEFAULT, OFFLOADS = ScheduleSettings(), ScheduleSettings(offloads=True)


def run(expected: str, *calls: str, settings: ScheduleSettings = DEFAULT) -> list[Action]:
    """Actions of a step whose k-th micro-batch calls the layers in `calls[k]`, one letter each."""
    settings = replace(settings, micro_batches=len(calls))
    remaining = [list(each) for each in calls]
    done: list[Action] = []
    kept: dict[int, int] = {}  # the visit in which a micro-batch's last layer kept its graph

    def answer(action: Action) -> ActionResult | None:
        if action.kind == "X":
            return ActionResult(has_graph=kept.get(action.k) == action_visit())
        if action.kind not in "IF":
            return None
        if action.kind == "F":
            assert remaining[action.k].pop(0) == action.layer
            kept[action.k] = action.visit if action.keep != "input" else -1
        return ActionResult(remaining[action.k][0] if remaining[action.k] else None, action.kind == "F")

    def action_visit() -> int:
        begun = [each for each in done if each.kind in "VE"]
        return begun[-1].visit if begun and begun[-1].kind == "V" else -2

    schedule = RelaySchedule(settings, "ABC", expected).train()
    told: ActionResult | None = None
    while True:
        try:
            action = schedule.send(told)
        except StopIteration:
            return done
        done.append(action)
        told = answer(action)


def visits(actions: list[Action], is_backward: bool = False) -> list[tuple[str, list[int]]]:
    """The layer of each visit, and the micro-batches that it runs."""
    kind = "B" if is_backward else "F"
    begun = [each for each in actions if each.kind == "V" and each.is_backward == is_backward]
    return [
        (each.layer, [a.k for a in actions if (a.kind, a.visit, a.is_backward) == (kind, each.visit, is_backward)])
        for each in begun
    ]


def test_one_visit_serves_all_that_go_the_same_way() -> None:
    assert visits(run("ABC", "ABC", "ABC", "ABC")) == [("A", [0, 1, 2]), ("B", [0, 1, 2]), ("C", [0, 1, 2])]


def test_the_least_advanced_go_first_so_that_others_are_caught_up_with() -> None:
    actions = run("ABC", "ABC", "AC", "C")
    assert visits(actions) == [("A", [0, 1]), ("B", [0]), ("C", [0, 1, 2])]
    assert visits(actions, is_backward=True) == [("B", [0]), ("A", [0, 1])]


def test_a_layer_that_comes_again_is_looked_for_behind_where_a_micro_batch_is() -> None:
    assert visits(run("ABA", "AA", "ABA")) == [("A", [0, 1]), ("B", [1]), ("A", [0, 1])]


def test_an_unexpected_layer_is_visited_all_the_same() -> None:
    actions = run("AB", "CBA", "AB")
    ran = [(layer, k) for layer, turns in visits(actions) for k in turns]
    assert ["".join(layer for layer, j in ran if j == k) for k in range(2)] == ["CBA", "AB"]
    undone = [(a.layer, a.k) for a in actions if a.kind == "B"]
    assert ["".join(layer for layer, j in undone if j == k) for k in range(2)] == ["ABC", "BA"]
    assert sorted(a.layer for a in actions if a.kind == "U") == ["A", "B", "C"]


def test_losses_run_in_ascending_order_and_the_last_layer_goes_back_at_once() -> None:
    actions = run("ABC", "ABC", "AC")
    assert [a.k for a in actions if a.kind == "X"] == [0, 1]
    assert [(a.kind, a.k) for a in actions if a.layer == "C" and a.kind in "FB"] == [
        ("F", 0),
        ("B", 0),
        ("F", 1),
        ("B", 1),
    ]


@pytest.mark.parametrize("kept", [0, 1, 2])
def test_the_last_visits_keep_their_graphs(kept: int) -> None:
    actions = run("ABC", "ABC", settings=ScheduleSettings(kept_graphs=kept))
    keep = {a.layer: a.keep for a in actions if a.kind == "F"}
    assert keep == {"A": "input", "B": "graph" if kept > 1 else "input", "C": "graph" if kept else "turn"}


def test_one_loss_of_the_batch_keeps_no_graph_and_undoes_every_visit() -> None:
    actions = run("ABC", "ABC", "ABC", settings=ScheduleSettings(loss_per_micro_batch=False))
    assert {a.keep for a in actions if a.kind == "F"} == {"input"}
    assert visits(actions, is_backward=True) == [("C", [0, 1]), ("B", [0, 1]), ("A", [0, 1])]


def test_a_graph_that_no_loss_took_is_dropped_at_the_end_of_the_turn() -> None:
    actions = run("A", "A", "AB")  # B was not expected, so that the loss of k = 0 waits for nothing, that of k = 1 does
    assert [(a.kind, a.k) for a in actions if a.kind in "FXBD"][:5] == [
        ("F", 0),
        ("X", 0),
        ("B", 0),
        ("F", 1),
        ("D", 1),
    ]


# -- weight slots --------------------------------------------------------------------------------------------------------


def loads(actions: list[Action]) -> list[tuple[str, int]]:
    return [(a.layer, a.slot) for a in actions if a.kind == "L"]


def test_backward_begins_with_the_layers_that_are_loaded() -> None:
    assert loads(run("ABC", "ABC")) == [("A", 0), ("B", 1), ("C", 0), ("A", 0)]


def test_resident_slots_save_loads() -> None:
    assert loads(run("ABC", "ABC", settings=ScheduleSettings(slots=3))) == [("A", 0), ("B", 1), ("C", 2)]


def test_without_overlap_one_slot_is_enough() -> None:
    actions = run("ABC", "ABC", settings=ScheduleSettings(ahead=0, slots=1))
    assert loads(actions) == [("A", 0), ("B", 0), ("C", 0), ("B", 0), ("A", 0)]


def test_loads_are_announced_where_the_store_reads_ahead() -> None:
    actions = run("ABC", "ABC", settings=ScheduleSettings(announces_loads=True))
    assert [a.layers for a in actions if a.kind == "A"] == [("A", "B", "C"), ("C",), ("A",), ("A",), ()]


# -- stash ---------------------------------------------------------------------------------------------------------------


def fetches(actions: list[Action], visit: int) -> list[tuple[int, str, int, bool] | None]:
    """By turn of a forward visit: the turn whose tensors are fetched meanwhile."""
    found: list[tuple[int, str, int, bool] | None] = []
    for position, action in enumerate(actions):
        if (action.kind, action.visit, action.is_backward) == ("W", visit, False):
            after = actions[position + 1]
            found.append((after.k, after.layer, after.visit, after.is_backward) if after.kind == "G" else None)
    return found


def test_while_one_runs_the_input_of_the_next_one_may_arrive() -> None:
    actions = run("AB", "AB", "AB", settings=OFFLOADS)
    assert fetches(actions, 0) == [(1, "A", 0, False), (0, "B", 1, False)]
    assert fetches(actions, 1) == [(1, "B", 1, False), (0, "A", 0, True)]


def test_with_one_micro_batch_the_next_turn_is_known_at_the_end_alone() -> None:
    actions = run("ABC", "ABC", settings=OFFLOADS)
    assert [fetches(actions, visit) for visit in range(3)] == [[None], [None], [(0, "B", 1, True)]]


def test_without_overlap_nothing_is_fetched_ahead() -> None:
    actions = run("ABC", "ABC", "ABC", settings=ScheduleSettings(ahead=0, slots=1, offloads=True))
    assert not [a for a in actions if a.kind in "GH"] and len([a for a in actions if a.kind == "W"]) == 10
