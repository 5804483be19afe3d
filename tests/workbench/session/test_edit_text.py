"""Descriptions of edits, from values and from the journal."""

from __future__ import annotations

import pytest
from sessions import Layer, make_batches, make_relay
from torch import nn

from l2l_core import Delink, Drop, Duplicate, Edit, Freeze, Insert, Interpolate, Move, Replace, Swap, Unfreeze
from l2l_core.edits.history import JournalEntry
from workbench.session.edit_text import describe_edit, describe_entry

LINEAR = nn.Linear(2, 2)

WORDS: list[tuple[Edit, str]] = [
    (Insert(5), "+ at 5 (identity)"),
    (Insert("L005", like="L004", init="copy"), "+ before L005 like L004 (copy)"),
    (Insert(("decoder.h", 2), init="fresh"), "+ at decoder.h 2 (fresh)"),
    (Insert(("", 4)), "+ at 4 (identity)"),
    (Insert(0, module=LINEAR), "+ Linear at 0"),
    (Duplicate(), "2 × all layers"),
    (Duplicate(slice(2, 5), mode="interleaved"), "2 × layers 2–4, interleaved"),
    (Drop(3), "− layer 3"),
    (Drop("L003", park=None), "− L003"),
    (Drop(("L002", "L004")), "− L002–L004"),
    (Drop(("decoder.h", slice(0, 2))), "− decoder.h 0–1"),
    (Drop(range(1, 2)), "− layers 1"),
    (Swap(2, 7), "2 ⇄ 7"),
    (Swap("L002", "L007"), "L002 ⇄ L007"),
    (Move("L000", "L003"), "L000 to the place of L003"),
    (Replace("L003", LINEAR), "L003 becomes Linear"),
    (Interpolate(1, 2, 0.25), "1 ← 25 % 2"),
    (Freeze(slice(None, 2)), "freeze layers 0–1"),
    (Unfreeze(slice(2, None)), "unfreeze layers 2–end"),
    (Delink(), "delink all layers"),
]


NUMBERS = {f"L{i + 2:03d}": i for i in range(6)}  # two layers were removed
NUMBERED: list[tuple[Edit, str]] = [
    (Insert("L005", like="L004", init="copy"), "+ before 3 · L005 like 2 · L004 (copy)"),
    (Insert(3), "+ at 3 (identity)"),
    (Duplicate(("L002", "L004")), "2 × 0–2 · L002–L004"),
    (Drop("L003"), "− 1 · L003"),
    (Drop("L001"), "− L001"),
    (Swap("L002", "L007"), "0 · L002 ⇄ 5 · L007"),
    (Move("L002", "L003"), "0 · L002 to the place of 1 · L003"),
    (Replace("L003", LINEAR), "1 · L003 becomes Linear"),
    (Interpolate("L002", "L003"), "0 · L002 ← 50 % 1 · L003"),
    (Freeze(("L002", "L003")), "freeze 0–1 · L002–L003"),
    (Unfreeze("L007"), "unfreeze 5 · L007"),
    (Delink(("L002", "L004"), optimizer="fresh"), "delink 0–2 · L002–L004"),
]


@pytest.mark.parametrize(("edit", "words"), NUMBERED, ids=[words for _, words in NUMBERED])
def test_layers_given_by_key_are_named_with_their_number(edit: Edit, words: str) -> None:
    assert describe_edit(edit, NUMBERS) == words
    entry = JournalEntry(0, 1, "edit", repr(edit), -1, False, "kept", 4, 0, 0, places=NUMBERS)
    assert describe_entry(entry, [entry]) == words


@pytest.mark.parametrize(("edit", "words"), WORDS, ids=[words for _, words in WORDS])
def test_edit_is_described_from_value_and_from_repr(edit: Edit, words: str) -> None:
    assert describe_edit(edit) == words
    assert from_print(edit) == words


def from_print(edit: Edit) -> str:
    """Describe an edit from the journal."""
    entry = JournalEntry(0, 1, "edit", repr(edit), -1, False, "kept", 4, 0, 0)
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
    assert words[0] == "+ at 2 (identity); − 0 · L000"
    assert words[2].startswith("undo Replace(") or words[2] == "undo 0 · L001 becomes Sequential"
    assert words[3:] == ["undo + at 2 (identity); − 0 · L000", "redo + at 2 (identity); − 0 · L000", "freeze layer 0"]
