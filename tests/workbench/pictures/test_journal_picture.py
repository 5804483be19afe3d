"""The journal as a table, and which of its edits are in force."""

from __future__ import annotations

import xml.etree.ElementTree as ET
from dataclasses import replace
from typing import Literal

from l2l_core.edits.history import Entry
from workbench.pictures.journal import MOST, draw_journal, journal_table
from workbench.session.journal_state import turns_of


def entry(
    number: int, kind: Literal["edit", "undo", "redo"] = "edit", of: int = -1, what: str = "Drop(layers=3)"
) -> Entry:
    return Entry(number, 10 + number, kind, what, of, False, "parked (memory)", 7, -72, -320, 0.5, 0.75)


def lines(journal: list[Entry]) -> list[list[str]]:
    """Cells of the drawn table, by line."""
    root = ET.fromstring(draw_journal(journal))
    return [["".join(cell.itertext()) for cell in row] for row in root.iter("tr")][1:]


def test_edits_that_are_in_force_and_those_that_a_redo_brings_back() -> None:
    journal = [entry(0), entry(1), entry(2, "undo", 1), entry(3, "undo", 0), entry(4, "redo", 0)]
    turns = turns_of(journal)
    assert [e.number for e in turns.in_force] == [0] and [e.number for e in turns.undone] == [1]
    turns = turns_of([*journal, entry(5)])
    assert [e.number for e in turns.in_force] == [0, 5] and turns.undone == ()


def test_newest_first_with_signs_and_what_was_undone() -> None:
    journal = [entry(0), replace(entry(1, "undo", 0), loss_after=None, params=72, nbytes=320, preserves_function=True)]
    undo, edit = lines(journal)
    assert undo[:4] == ["1", "11", "undo − layer 3", "0.5 → … "]
    assert undo[4:8] == ["7", "+72", "+320 B", "= same"]
    assert edit[:4] == ["0", "10", "undone: − layer 3", "0.5 → 0.75 ▲ +0.25"]
    assert edit[4:] == ["7", "−72", "−320 B", "≠ other", "parked (memory)"]
    better = lines([replace(entry(0), loss_after=0.25)])
    assert "▼ −0.25" in better[0][3]


def test_an_empty_journal_says_what_will_be_there() -> None:
    ((said,),) = lines([])
    assert "No edit yet" in said
    assert journal_table([]).rows == []


def test_what_people_name_is_escaped() -> None:
    odd = entry(0, what="Swap(a='<b>', b='&')")
    assert lines([odd])[0][2] == "<b> ⇄ &"


def test_a_long_journal_is_cut_and_says_so() -> None:
    journal = [entry(i) for i in range(3 * MOST)]
    shown = lines(journal)
    assert len(shown) == MOST + 1 and shown[0][0] == str(3 * MOST - 1)
    assert shown[-1] == [f"… {2 * MOST} earlier"]
    assert len(draw_journal(journal)) < 60_000


def test_the_table_in_words() -> None:
    table = journal_table([entry(0), entry(1, "undo", 0)])
    assert table.rows[1] == (
        "0", "10", "− layer 3", "0.5 → 0.75", "7", "-72", "−320 B", "≠ other", "parked (memory)", "undone",
    )  # fmt: skip
    assert len(table.header) == len(table.rows[0])
