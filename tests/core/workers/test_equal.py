"""Several workers train what one would with all micro-batches: to the bit with reduce="ordered", to rounding with "sum"."""

from typing import Any

import pytest
from crew import Crew
from crew_cases import Case, train_beside_plain


def assert_equal(answers: list[dict[str, Any]]) -> None:
    for rank, seen in enumerate(answers):
        assert seen["losses"] == seen["expected"], f"worker {rank}: {seen}"
        assert not seen["differences"] and not seen["state differs in"], f"worker {rank}: {seen}"
        assert seen["nan"] and seen["left whole"], f"worker {rank}: {seen}"


BY_DEFAULT = ["chain", "gpt2", "frozen_layer"]


@pytest.mark.parametrize("name", BY_DEFAULT)
def test_two_workers_equal_plain_training(name: str, two: Crew) -> None:
    assert_equal(two.run(train_beside_plain, Case(name)))
