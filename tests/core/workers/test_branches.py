"""Branches of several workers are those of one."""

from pathlib import Path
from typing import Any

import pytest
import torch
from crew import Crew
from crew_branches import branches_beside_alone, raced_beside_alone, switch_apart
from crew_cases import Case, adafactor

ROWS = (4, 4, 4, 4)


def assert_same(answers: list[dict[str, Any]]) -> None:
    for seen in answers:
        assert seen["losses"] == seen["expected"] and not seen["unlike"], seen
        assert seen["steps"] == seen["expected steps"], seen
        assert not any(seen["whole bytes"]), f"layers that are whole after a switch: {seen['whole bytes']}"


@pytest.mark.slow
@pytest.mark.parametrize(
    "case", [Case("gpt2", rows=ROWS), Case("gpt2", rows=ROWS, optimizer=adafactor), Case("bert", rows=ROWS)], ids=str
)
def test_branches_of_other_models(case: Case, two: Crew, tmp_path: Path) -> None:
    assert_same(two.run(branches_beside_alone, case))
    assert_same(two.run(branches_beside_alone, case, str(tmp_path)))


@pytest.mark.slow
def test_branches_of_four_workers(four: Crew, tmp_path: Path) -> None:
    assert_same(four.run(branches_beside_alone, Case("chain", rows=ROWS), str(tmp_path)))


@pytest.mark.slow
def test_workers_that_go_to_different_branches_stay_where_they_are(two: Crew) -> None:
    answers = two.run(switch_apart)
    for seen in answers:
        assert all("'main'" in seen["told"][0] and "'a'" in seen["told"][0] for seen in answers), answers
        assert len(seen["told"]) == 2 and seen["branch"] == "b"
    assert answers[0]["loss"] == answers[1]["loss"]


def test_branches_edits_undo_and_saves_are_those_of_one_worker(two: Crew, tmp_path: Path) -> None:
    assert_same(two.run(branches_beside_alone, Case("chain", rows=ROWS), str(tmp_path)))


@pytest.mark.slow
def test_a_race_of_a_session_is_that_of_one_worker(two: Crew) -> None:
    for seen in two.run(raced_beside_alone):
        together, alone = seen["losses"]
        assert together == alone and [len(losses) for losses in together] == [5, 5]
        ends, expected = seen["ends"][:2], seen["ends"][2:]
        assert all(
            torch.equal(a, b)
            for one, other in zip(ends, expected, strict=True)
            for a, b in zip(one, other, strict=True)
        )
