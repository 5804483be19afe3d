"""Edits of several workers are those of one."""

import pytest
from crew import Crew
from crew_cases import EDITS, LOOP_EDITS, edit_beside_alone
from crew_evidence import EDITS as MOVES
from crew_evidence import edit_on_unlike_rows, fail_on_one

from l2l_core import Edit


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


@pytest.mark.slow
@pytest.mark.parametrize("edit", MOVES, ids=repr)
@pytest.mark.parametrize("high", [0, 1])
def test_workers_with_unlike_rows_come_to_one_verdict_on_an_edit(edit: Edit, high: int, two: Crew) -> None:
    """Rows of worker 0 decide: on these the model uses the positions of layers, or it does not."""
    one, other = two.run(edit_on_unlike_rows, edit, high)
    for seen in (one, other):
        assert seen["losses"] == seen["expected"] and not seen["differences"], seen
    assert one["refusal"] == other["refusal"]
    assert ("before layer 2 of layers than before an earlier one" in one["refusal"]) == (high == 0)


@pytest.mark.slow
def test_an_edit_that_fails_on_one_worker_is_undone_on_all(two: Crew) -> None:
    one, other = two.run(fail_on_one)
    assert "MemoryError: worker 1 has no room" in one["error"] and "MemoryError" in other["error"]
    for seen in (one, other):
        assert seen["same"] and seen["keys"] == ["L000", "L001", "L002", "L003"] and not seen["journal"], seen
