"""What a pass intends: the relay's own way is to recompute all layers but the last one, which is not loaded twice."""

from __future__ import annotations

from typing import Any

import pytest

from l2l_core.step import PassPlan
from l2l_core.step.micro_batch import KEEP_UNTIL_SUSPENDED, RECOMPUTE


@pytest.mark.parametrize("count", [1, 2, 5])
def test_backward_begins_with_the_layer_that_is_there(count: int) -> None:
    order: Any = [f"L{i:03}" for i in range(count)]
    way = PassPlan(order).forward_then_backward
    assert way[:count] == order and way[count - 1 :] == order[::-1]


def test_the_graph_of_the_last_visit_alone_is_kept() -> None:
    order: Any = ["A", "B", "A"]
    assert [PassPlan(order).policy_for(visit) for visit in range(3)] == [RECOMPUTE, RECOMPUTE, KEEP_UNTIL_SUSPENDED]
    assert PassPlan(order).policy_for(3) is RECOMPUTE, "a visit that was not expected"
