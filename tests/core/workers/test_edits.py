"""Edits and saves of several workers are those of one."""

from pathlib import Path

from crew import Crew
from crew_cases import EDITS, edit_beside_alone, load_alone, load_and_go_on, save_and_go_on


def test_edits_undo_and_redo_are_those_of_one_worker(two: Crew) -> None:
    for seen in two.run(edit_beside_alone, EDITS):
        assert seen["losses"] == seen["expected"] and not seen["differences"] and not seen["state differs in"], seen
        assert seen["nan"], seen


def test_a_save_goes_on_with_as_many_workers_or_with_one(two: Crew, tmp_path: Path) -> None:
    went_on = two.run(save_and_go_on, str(tmp_path / "save"))
    assert went_on[0] == went_on[1]
    assert two.run(load_and_go_on, str(tmp_path / "save")) == went_on
    assert two.run(load_alone, str(tmp_path / "save")) == went_on
