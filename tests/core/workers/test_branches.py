"""Branches of several workers are those of one."""

from pathlib import Path
from typing import Any

import pytest
from crew import Crew
from crew_branches import branches_beside_alone, switch_apart


def assert_same(answers: list[dict[str, Any]]) -> None:
    for seen in answers:
        assert seen["losses"] == seen["expected"] and not seen["unlike"], seen
        assert seen["steps"] == seen["expected steps"], seen
        assert not any(seen["whole bytes"]), f"layers that are whole after a switch: {seen['whole bytes']}"


def test_branches_edits_and_undo_are_those_of_one_worker(two: Crew) -> None:
    assert_same(two.run(branches_beside_alone, True))


@pytest.mark.slow
def test_branches_where_parameters_have_one_owner(two: Crew) -> None:
    assert_same(two.run(branches_beside_alone, False))


@pytest.mark.slow
def test_branches_of_four_workers(four: Crew) -> None:
    assert_same(four.run(branches_beside_alone, True))


def test_workers_that_go_to_different_branches_stay_where_they_are(two: Crew) -> None:
    answers = two.run(switch_apart)
    for seen in answers:
        assert all("'main'" in seen["told"][0] and "'a'" in seen["told"][0] for seen in answers), answers
        assert len(seen["told"]) == 2 and seen["branch"] == "b"
    assert answers[0]["loss"] == answers[1]["loss"]


def test_branches_are_saved_in_parts_and_loaded(two: Crew, tmp_path: Path) -> None:
    assert_same(two.run(branches_beside_alone, True, str(tmp_path)))
