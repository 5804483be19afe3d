"""Descriptions of edits, from values and from the journal."""

from __future__ import annotations

import pytest
from sessions import Layer, make_batches, make_relay
from torch import nn

from l2l_core import (
    Delink,
    Drop,
    Duplicate,
    Edit,
    Freeze,
    Insert,
    Interpolate,
    Loops,
    Move,
    Replace,
    Swap,
    Unfreeze,
    Unroll,
)
from l2l_core.edits.history import JournalEntry
from workbench.session.edit_text import describe_edit, describe_entry

LINEAR = nn.Linear(2, 2)

WORDS: list[tuple[Edit, str]] = [
    (Insert(5), "insert at 5 (identity)"),
    (Insert("L005", like="L004", init="copy"), "insert before L005 like L004 (copy)"),
    (Insert(("decoder.h", 2), init="fresh"), "insert at decoder.h 2 (fresh)"),
    (Insert(("", 4)), "insert at 4 (identity)"),
    (Insert(0, module=LINEAR), "insert Linear at 0"),
    (Duplicate(), "duplicate all layers"),
    (Duplicate(slice(2, 5), mode="interleaved"), "duplicate layers 2 to 4, interleaved"),
    (Drop(3), "drop layer 3"),
    (Drop("L003", park=None), "drop L003"),
    (Drop(("L002", "L004")), "drop L002 to L004"),
    (Drop(("decoder.h", slice(0, 2))), "drop decoder.h 0 to 1"),
    (Drop(range(1, 2)), "drop layers 1"),
    (Swap(2, 7), "swap 2 and 7"),
    (Swap("L002", "L007"), "swap L002 and L007"),
    (Move("L000", "L003"), "move L000 to the place of L003"),
    (Replace("L003", LINEAR), "replace L003 by Linear"),
    (Interpolate(1, 2, 0.25), "mix 25 % of 2 into 1"),
    (Freeze(slice(None, 2)), "freeze layers 0 to 1"),
    (Unfreeze(slice(2, None)), "unfreeze layers 2 to the last"),
    (Delink(), "delink all layers"),
    (Loops(3), "loop the stack 3 times"),
    (Loops(3, "core.layers", "core.n_loops"), "loop core.layers 3 times (core.n_loops)"),
    (Unroll(), "unroll the loops of the stack into layers"),
]


NUMBERS = {f"L{i + 2:03d}": i for i in range(6)}  # two layers were removed
NUMBERED: list[tuple[Edit, str]] = [
    (Insert("L005", like="L004", init="copy"), "insert before 3 · L005 like 2 · L004 (copy)"),
    (Insert(3), "insert at 3 (identity)"),
    (Duplicate(("L002", "L004")), "duplicate 0 to 2"),
    (Drop("L003"), "drop 1 · L003"),
    (Drop("L001"), "drop L001"),
    (Swap("L002", "L007"), "swap 0 · L002 and 5 · L007"),
    (Move("L002", "L003"), "move 0 · L002 to the place of 1 · L003"),
    (Replace("L003", LINEAR), "replace 1 · L003 by Linear"),
    (Interpolate("L002", "L003"), "mix 50 % of 1 · L003 into 0 · L002"),
    (Freeze(("L002", "L003")), "freeze 0 to 1"),
    (Unfreeze("L007"), "unfreeze 5 · L007"),
    (Delink(("L002", "L004"), optimizer="fresh"), "delink 0 to 2"),
]


@pytest.mark.parametrize(("edit", "words"), NUMBERED, ids=[words for _, words in NUMBERED])
def test_layers_given_by_key_are_named_with_their_number(edit: Edit, words: str) -> None:
    assert describe_edit(edit, NUMBERS) == words
    entry = JournalEntry(0, 1, "edit", repr(edit), -1, False, "kept", 9, 0, 0, places=NUMBERS)
    assert describe_entry(entry, [entry]) == done(words)


@pytest.mark.parametrize(("edit", "words"), WORDS, ids=[words for _, words in WORDS])
def test_edit_is_described_from_value_and_from_repr(edit: Edit, words: str) -> None:
    assert describe_edit(edit) == words
    assert from_print(edit) == done(words)


def done(words: str) -> str:
    """The same edit after it was applied."""
    verb, _, rest = words.partition(" ")
    past = {"drop": "dropped", "swap": "swapped", "freeze": "froze", "unfreeze": "unfroze", "insert": "inserted"}
    return f"{past.get(verb, verb.rstrip('e') + 'ed')} {rest}"


def test_an_insertion_behind_all_layers_is_named_by_that_place() -> None:
    assert describe_edit(Insert(("h", 4)), count=4) == "insert after the last layer (identity)"
    assert describe_edit(Insert(("h", 3)), count=4) == "insert at h 3 (identity)"
    entry = JournalEntry(0, 1, "edit", repr(Insert(4)), -1, True, "fresh", 5, 0, 0)
    assert describe_entry(entry, [entry]) == "inserted after the last layer (identity)"
    both = JournalEntry(0, 1, "edit", f"{Insert(4)!r}; {Drop(0)!r}", -1, True, "fresh", 4, 0, 0)
    assert describe_entry(both, [both]) == "inserted at 4 (identity); dropped layer 0"


def from_print(edit: Edit) -> str:
    """Describe an edit from the journal."""
    entry = JournalEntry(0, 1, "edit", repr(edit), -1, False, "kept", 9, 0, 0)
    return describe_entry(entry, [entry])


def test_edit_of_the_user_is_described_by_its_repr() -> None:
    class Odd(Edit):
        def __repr__(self) -> str:
            return "Odd(1)"

        def execute(self, editor: object, do: object) -> None: ...

    assert describe_edit(Odd()) == "Odd(1)"
    assert from_print(Odd()) == "Odd(1)"


def test_journal_with_undo_groups_and_modules_of_several_lines() -> None:
    with make_relay() as relay:
        relay.step(make_batches()[0])
        relay.apply(Insert(2), Drop("L000"))
        back = relay.apply(Replace("L001", nn.Sequential(Layer(), nn.Identity())))
        relay.undo(), relay.undo(), relay.redo()
        relay.apply(Freeze(0))
        journal = relay.journal
        assert describe_edit(back).startswith("back from ")
    words = [describe_entry(entry, journal) for entry in journal]
    assert words[0] == "inserted at 2 (identity); dropped 0 · L000"
    assert words[2].startswith("undid: Replace(") or words[2] == "undid: replaced 0 · L001 by Sequential"
    assert words[3:] == [f"undid: {words[0]}", f"redid: {words[0]}", "froze layer 0"]
