"""The journal as a table, and its edits in force."""

from __future__ import annotations

import xml.etree.ElementTree as ET
from dataclasses import replace
from typing import Literal

from l2l_core.edits.history import JournalEntry
from workbench.pictures.edit_journal import MAX_ENTRIES, draw_journal, journal_table
from workbench.pictures.theme import GREEN, VERMILION
from workbench.session.probe_verdict import PENDING, LossChange, ProbeLosses
from workbench.session.snapshot_values import Change, journal_state_of


def entry(
    number: int, kind: Literal["edit", "undo", "redo"] = "edit", of: int = -1, what: str = "Drop(layers=3)"
) -> JournalEntry:
    return JournalEntry(number, 10 + number, kind, what, of, False, "parked (memory)", 7, -72, -320)


def change(number: int, before: list[float], after: list[float]) -> Change:
    """Return a session's record of an edit."""
    judged = LossChange(ProbeLosses(tuple(before), 0.1), ProbeLosses(tuple(after), 0.1))
    return Change(10 + number, "an edit", entry=number, judged=judged)


def lines(journal: list[JournalEntry], changes: list[Change] | None = None) -> list[list[str]]:
    """Return the cells of the HTML table by line."""
    root = ET.fromstring(draw_journal(journal, changes or []))
    return [["".join(cell.itertext()) for cell in row] for row in root.iter("tr")][1:]


def test_edits_that_are_in_force_and_those_that_a_redo_brings_back() -> None:
    journal = [entry(0), entry(1), entry(2, "undo", 1), entry(3, "undo", 0), entry(4, "redo", 0)]
    turns = journal_state_of(journal)
    assert [e.number for e in turns.in_force] == [0] and [e.number for e in turns.undone] == [1]
    turns = journal_state_of([*journal, entry(5)])
    assert [e.number for e in turns.in_force] == [0, 5] and turns.undone == ()


def test_newest_first_with_signs_and_what_was_undone() -> None:
    journal = [entry(0), replace(entry(1, "undo", 0), params=72, nbytes=320, preserves_function=True)]
    undo, edit = lines(journal, [change(0, [0.5, 1.0], [0.75, 1.25]), change(1, [0.75, 1.25], [0.5, 1.0])])
    assert undo[:4] == ["1", "11", "undid: dropped layer 3", "1 → 0.75, ▼ −0.25 ± 0 over 2 batches"]
    assert undo[4:8] == ["7", "+72", "+320 B", "the same"]
    assert edit[:4] == ["0", "10", "undone: dropped layer 3", "0.75 → 1, ▲ +0.25 ± 0 over 2 batches"]
    assert edit[4:] == ["7", "−72", "−320 B", "another", "parked (memory)"]


def test_colour_is_for_what_is_larger_than_its_spread_alone() -> None:
    """Up and down differ in their marks, not only in colour; other cells have neither colour nor mark."""
    losses = {"worse": [2.1, 3.12], "better": [1.9, 2.88], "unclear": [2.2, 2.9], "same": [2.0, 3.0]}
    drawn = {name: draw_journal([entry(0)], [change(0, [2.0, 3.0], after)]) for name, after in losses.items()}
    drawn["not measured"] = draw_journal([entry(0)])
    colours = {name: [colour for colour in (VERMILION, GREEN) if colour in html] for name, html in drawn.items()}
    assert colours == {"worse": [VERMILION], "better": [GREEN], "unclear": [], "same": [], "not measured": []}
    rows = {name: html.partition("<tbody>")[2] for name, html in drawn.items()}
    assert {name: [mark for mark in "▲▼" if mark in html] for name, html in rows.items()} == {
        "worse": ["▲"], "better": ["▼"], "unclear": [], "same": [], "not measured": [],
    }  # fmt: skip
    assert "no change (0 exactly)" in rows["same"] and "not measured" in rows["not measured"]
    assert [name for name, html in rows.items() if "l2l-unknown" in html] == ["not measured"]


def test_an_unmeasured_edit_has_a_reason() -> None:
    journal = [entry(i) for i in range(4)]
    changes = [
        Change(10, "an edit", entry=0, why_not="OSError: <no> disk"),
        Change(11, "an edit", entry=1, why_not=PENDING),
        Change(12, "settings"),
        change(3, [1.0], [1.5]),
    ]
    output = [line[3] for line in lines(journal, changes)]
    assert output == ["1 → 1.5, +0.5 (one batch)", "not measured", "measuring…", "not measured: OSError: <no> disk"]


def test_an_empty_journal_describes_its_contents() -> None:
    ((output,),) = lines([])
    assert "No edit yet" in output
    assert journal_table([]).rows == []


def test_what_people_name_is_escaped() -> None:
    odd = entry(0, what="Swap(a='<b>', b='&')")
    assert lines([odd])[0][2] == "swapped <b> and &"


def test_a_long_journal_is_truncated_with_a_note() -> None:
    journal = [entry(i) for i in range(3 * MAX_ENTRIES)]
    changes = [change(i, [1.2345, 2.3456, 1.7], [1.3456, 2.5, 1.9]) for i in range(3 * MAX_ENTRIES)]
    shown = lines(journal, changes)
    assert len(shown) == MAX_ENTRIES + 1 and shown[0][0] == str(3 * MAX_ENTRIES - 1)
    assert shown[-1] == [f"… {2 * MAX_ENTRIES} earlier"]
    assert len(draw_journal(journal, changes)) < 60_000


def test_the_table_in_words() -> None:
    table = journal_table([entry(0), entry(1, "undo", 0)], [change(0, [2.0, 3.0], [2.1, 3.12])])
    assert table.rows[0][3] == "not measured"
    assert table.rows[1] == (
        "0", "10", "dropped layer 3", "2.5 → 2.61, ▲ +0.11 ± 0.014 over 2 batches",
        "7", "-72", "−320 B", "another", "parked (memory)", "undone",
    )  # fmt: skip
    assert len(table.header) == len(table.rows[0])
