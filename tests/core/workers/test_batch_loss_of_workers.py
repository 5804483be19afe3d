"""One loss over the outputs of all workers: to the bit with reduce="ordered", to rounding with "sum"."""

from typing import Any

import pytest
from batch_losses import CASES
from crew import Crew
from crew_batch_loss import train_together

SETTINGS = [{}, {"stash": "host", "update": "deferred", "max_grad_norm": 0.05}, {"keep": 1, "ahead": 0}]


def check(answers: list[dict[str, Any]], exact: bool) -> None:
    for seen in answers:
        assert seen["losses"] == (seen["expected"] if exact else pytest.approx(seen["expected"], rel=1e-4))
        assert seen["different"] == 0 if exact else seen["different"] < 1e-3
        assert seen["verified"] == exact
        assert seen["evaluated"] == answers[0]["evaluated"]


@pytest.mark.all_cases
@pytest.mark.parametrize("name", CASES)
def test_two_workers_equal_plain_training(name: str, two: Crew) -> None:
    check(two.run(train_together, name, "ordered", {}), exact=True)


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_four_workers_with_other_settings(settings: dict[str, Any], four: Crew) -> None:
    check(four.run(train_together, "temperature", "ordered", settings), exact=True)


def test_sums_of_workers(two: Crew) -> None:
    check(two.run(train_together, "two_towers", "sum", {}), exact=False)
