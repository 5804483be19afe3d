"""Which layer is visited next, found from where micro-batches wait; here they only say where they go."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from l2l_core.step.visit_scheduler import VisitScheduler


@dataclass(eq=False)
class Layer:
    key: str


@dataclass(eq=False)
class Stop:
    """A call, as far as the order looks at it."""

    unit: Layer
    visit: int = -1


@dataclass(eq=False)
class Walker:
    """A paused forward that makes these calls, one after the other."""

    k: int
    way: list[Layer]
    calls: list[Stop] = field(default_factory=list)
    waiting_call: Stop | None = None

    def go_on(self) -> None:
        if self.waiting_call is not None:
            self.calls.append(self.waiting_call)
        self.waiting_call = Stop(self.way.pop(0)) if self.way else None


LAYERS = {name: Layer(name) for name in "ABC"}


def order_of(expected: str, *ways: str) -> Any:
    walkers = [Walker(k, [LAYERS[name] for name in way]) for k, way in enumerate(ways)]
    for walker in walkers:
        walker.go_on()
    made: Any = VisitScheduler(walkers, list(LAYERS.values()), [LAYERS[name] for name in expected])  # type: ignore[arg-type]
    return made


def walk(order: Any) -> list[tuple[str, list[int]]]:
    """Go through the layers as the loop does: every visit's layer, and the micro-batches that ran there."""
    ran = []
    while (unit := order.next_unit()) is not None:
        visit = order.begin_visit(unit)
        turns = []
        for walker, _ in order.iter_turns(visit):
            visit.calls.append(walker.waiting_call)
            walker.go_on()
            turns.append(walker.k)
        ran.append((unit.key, turns))
    return ran


def test_one_visit_serves_all_that_go_the_same_way() -> None:
    order = order_of("ABC", "ABC", "ABC", "ABC")
    assert walk(order) == [("A", [0, 1, 2]), ("B", [0, 1, 2]), ("C", [0, 1, 2])]
    assert not order.is_irregular() and order.visit_counts == {"A": 1, "B": 1, "C": 1}


def test_the_least_advanced_go_first_so_that_others_are_caught_up_with() -> None:
    order = order_of("ABC", "ABC", "AC", "C")
    assert walk(order) == [("A", [0, 1]), ("B", [0]), ("C", [0, 1, 2])]
    assert order.is_irregular()


def test_a_layer_that_comes_again_is_looked_for_behind_where_a_micro_batch_is() -> None:
    assert walk(order_of("ABA", "AA", "ABA")) == [("A", [0, 1]), ("B", [1]), ("A", [0, 1])]


def test_what_nobody_expected_is_visited_all_the_same() -> None:
    order = order_of("AB", "CBA", "AB")
    assert "".join(key for key, _ in walk(order)) == "".join(layer.key for layer in order.layer_order)
    assert ["".join(call.unit.key for call in walker.calls) for walker in order.forwards] == ["CBA", "AB"]


def test_backward_goes_on_counting() -> None:
    order = order_of("ABC", "ABC", "ABC")
    walk(order)
    assert [visit.index for visit in order.visits] == [0, 1, 2]
    assert [(visit.unit.key, order.backward_index(visit)) for visit in order.begin_backward()] == [
        ("C", 3),
        ("B", 4),
        ("A", 5),
    ]
    assert [[call.visit for call in visit.calls] for visit in order.visits] == [[5, 5], [4, 4], [3, 3]]


def following(order: Any) -> Sequence[tuple[int, str, int] | None]:
    """By turn of the next visit: micro-batch, layer and visit of the call whose input may arrive meanwhile."""
    visit = order.begin_visit(order.next_unit())
    said = []
    for walker, coming in order.iter_turns(visit):
        call = coming[0] if coming else None
        of = next((w.k for w in order.forwards if call is w.waiting_call or call in w.calls), None) if call else None
        said.append((of, call.unit.key, call.visit) if call else None)
        visit.calls.append(walker.waiting_call)
        walker.go_on()
    return said


def test_while_one_runs_the_input_of_the_next_one_may_arrive() -> None:
    """Turns:  A k=0  A k=1  |  B k=0  B k=1  |  backward: B k=0
    Next:      A k=1  B k=0     B k=1  B k=0, whose graph goes back in visit 2
    """
    order = order_of("AB", "AB", "AB")
    assert following(order) == [(1, "A", 0), (0, "B", 1)]
    assert following(order) == [(1, "B", 1), (0, "B", 2)]


def test_with_one_micro_batch_nothing_is_known_before_the_turn() -> None:
    order = order_of("ABC", "ABC")
    assert [following(order) for _ in range(3)] == [[None], [None], [(0, "B", 4)]]
