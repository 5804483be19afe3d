"""Edits of several workers are those of one."""

import pytest
from crew import Crew
from crew_cases import EDITS, LOOP_EDITS, edit_beside_alone


@pytest.mark.slow
def test_edits_undo_and_redo_are_those_of_one_worker(two: Crew) -> None:
    for seen in two.run(edit_beside_alone, EDITS):
        assert seen["losses"] == seen["expected"] and not seen["differences"] and not seen["state differs in"], seen
        assert seen["nan"], seen


@pytest.mark.slow
def test_loops_and_unrolled_layers_are_those_of_one_worker(two: Crew) -> None:
    for seen in two.run(edit_beside_alone, LOOP_EDITS, "looped"):
        assert seen["losses"] == seen["expected"] and not seen["differences"] and not seen["state differs in"], seen
        assert seen["nan"], seen
