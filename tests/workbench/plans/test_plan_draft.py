"""A plan under edit: moves, words, text, undo, and the rule that is broken."""

from __future__ import annotations

import random

import pytest

from l2l_core import StepPlan
from l2l_core.plan import ScheduleSettings
from workbench.plans import PlanDraft, describe
from workbench.plans.plan_draft import BAR

LAYERS = ["L000", "L001", "L002"]
OWN = """
plan micro_batches=2 ahead=1 slots=2
-   -     I0 I1
0   L000  L:L000>0 L:L001>1 | F0 F1
1   L001  L:L002>0 | F0 F1
2   L002  | F0/turn X0 B0 F1/turn X1 B1 P U
-   -     T
1'  L001  L:L000>0 | B0 B1 P U
0'  L000  | B0 B1 P U
-   -     P:shell
"""


def expected(**settings: object) -> StepPlan:
    return StepPlan.expected(ScheduleSettings(2, **settings), LAYERS, LAYERS)  # type: ignore[arg-type]


def draft_at(word: str, line: int) -> PlanDraft:
    """A draft of the plan above in which the word in this line is selected."""
    draft = PlanDraft(StepPlan.parse(OWN))
    draft.select(next(index for index, each in draft.lines[line].words if each == word))
    assert draft.selected_action is not None
    return draft


def row(draft: PlanDraft, line: int) -> str:
    return " ".join(word for _, word in draft.lines[line].words)


def test_one_place_earlier_and_later_in_the_order_of_issue() -> None:
    draft = draft_at("L:L001>1", 1)
    assert draft.shift(1) and row(draft, 1) == "L:L000>0 | L:L001>1 F0 F1" and draft.error is None
    assert draft.shift(1) and draft.shift(1) and row(draft, 1) == "L:L000>0 | F0 F1 L:L001>1"
    assert draft.shift(1) and (row(draft, 1), row(draft, 2)) == ("L:L000>0 | F0 F1", "L:L001>1 L:L002>0 | F0 F1")
    for _ in range(5):
        assert draft.shift(-1)
    assert row(draft, 1) == "L:L001>1 L:L000>0 | F0 F1"
    assert draft.selected_action is not None and draft.selected_action.layer == "L001", "the selection moves, too"
    draft.select(0)
    assert not draft.shift(-1) and not draft.shift_line(-1), "nothing is before the first action"


def test_a_line_up_and_down_on_the_same_side_of_the_bar() -> None:
    draft = draft_at("L:L002>0", 2)
    assert draft.shift_line(-1) and row(draft, 1) == "L:L000>0 L:L001>1 L:L002>0 | F0 F1"
    assert draft.shift_line(1) and draft.shift_line(1) and row(draft, 3).startswith("L:L002>0 | F0/turn")
    draft = draft_at("B1", 5)
    assert draft.shift_line(1) and row(draft, 6) == "| B0 B1 P U B1:L001@1'"


def test_a_drop_is_before_the_action_at_its_place() -> None:
    draft = draft_at("L:L002>0", 2)
    first = draft.lines[1].words[0][0]
    assert draft.move(draft.selected, first) and row(draft, 1) == "L:L002>0 L:L000>0 L:L001>1 | F0 F1"
    assert not draft.move(draft.selected, draft.selected + 1), "its own place"
    assert draft.move(draft.selected, draft.lines[1].end) and row(draft, 1).endswith("F1 L:L002>0")
    bar = next(index for index, word in draft.lines[1].words if word == BAR)
    assert not draft.move(bar, 0) and not draft.move(draft.lines[1].end, 0), "a visit stays where it is"


def test_words_are_written_added_and_removed() -> None:
    draft = draft_at("L:L002>0", 2)
    assert draft.write(draft.selected, "L:L002>1") and row(draft, 2) == "L:L002>1 | F0 F1"
    assert "visit 1): its weights are in no slot" in str(draft.error), "L001 was in slot 1"
    assert draft.insert(draft.selected, "L:L001>0") and row(draft, 2) == "L:L002>1 L:L001>0 | F0 F1"
    assert "visit 1 in backward): its weights" in str(draft.error), "they are now in slot 0"
    assert draft.selected_action is not None and draft.selected_action.layer == "L001"
    assert draft.remove() and row(draft, 2) == "L:L002>1 | F0 F1"
    assert draft.selected == draft.lines[2].words[0][0], "the bar behind it is no action to select"
    for word, why in [("Q0", "is no action"), ("F0 F1", "not one action"), ("", "not one action"), ("A", "as in `A:")]:
        before = draft.plan
        with pytest.raises(ValueError, match=why):
            draft.write(draft.lines[2].words[0][0], word)
        assert draft.plan is before
    with pytest.raises(ValueError, match="lacks its layer"):
        draft.insert(0, "F0")  # outside of visits


def test_the_first_broken_rule_is_known_with_its_action() -> None:
    draft = draft_at("F1", 1)
    assert draft.shift(-1) and draft.error is not None
    assert draft.plan.actions[draft.error.index].k == 1 and "ascending order" in str(draft.error)
    draft = draft_at("P:shell", 7)
    assert draft.remove() and draft.error is not None and draft.error.index == len(draft.plan.actions)
    assert draft.lines[-1].last == draft.error.index - 1


def test_changes_are_undone_and_made_again() -> None:
    draft = draft_at("L:L002>0", 2)
    start = draft.plan
    assert not draft.undo() and not draft.redo() and not draft.can_undo
    draft.shift_line(-1), draft.shift(1)
    end = draft.plan
    assert draft.undo() and draft.undo() and draft.plan is start and not draft.undo()
    assert draft.selected_action is not None and draft.selected_action.layer == "L002"
    assert draft.redo() and draft.redo() and draft.plan is end and not draft.can_redo
    draft.undo(), draft.remove()
    assert not draft.can_redo, "another change"


def test_a_text_that_is_typed_is_one_change() -> None:
    draft = PlanDraft(StepPlan.parse(OWN))
    start = draft.plan
    for text in (
        OWN.replace("L:L002>0", "L:L002>9"),
        OWN.replace("L:L002>0", "L:L002>1"),
        OWN.replace("ahead=1", "ahead=0"),
    ):
        assert draft.set_text(text)
    assert draft.plan.settings.ahead == 0 and not draft.set_text(str(draft.plan))
    for text, why in [("", "empty"), ("plan\n0 L000 F0", "one `|`"), (OWN.replace("I0", "A"), "as in `A:")]:
        with pytest.raises(ValueError, match=why):
            draft.set_text(text)
    assert draft.undo() and draft.plan is start
    draft.set_plan(expected(offloads=True))
    assert not draft.set_plan(expected(offloads=True)) and draft.undo() and draft.plan is start


@pytest.mark.parametrize("offloads", [False, True])
@pytest.mark.parametrize("seed", range(4))
def test_lines_name_every_action_after_any_changes(seed: int, offloads: bool) -> None:
    rng, draft = random.Random(seed), PlanDraft(expected(offloads=offloads))
    for _ in range(80):
        draft.select(rng.randrange(len(draft.plan.actions)))
        change = rng.choice([draft.undo, draft.remove, lambda: draft.shift(rng.choice([-1, 1]))])
        rng.choice([change, lambda: draft.shift_line(rng.choice([-1, 1]))])()
        actions, words = draft.plan.actions, [word for line in draft.lines for word in line.words]
        assert [index for index, _ in words] == [i for i, action in enumerate(actions) if action.kind != "E"]
        assert all(word[0] == (BAR if actions[i].kind == "V" else actions[i].kind) for i, word in words)
        assert draft.lines[-1].last == len(actions) - 1
        assert StepPlan.parse(str(draft.plan)) == draft.plan
        assert all(describe(action) for action in actions)
