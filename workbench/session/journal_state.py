"""Which edits of a journal are in force, and which one an undo or a redo would turn to."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from l2l_core.edits import JournalEntry


class JournalState(NamedTuple):
    """Edits by what has become of them, the last one last."""

    in_force: tuple[JournalEntry, ...]
    undone: tuple[JournalEntry, ...]  # that a redo would bring back


def journal_state_of(journal: Sequence[JournalEntry]) -> JournalState:
    """Follow the journal from its first line to its last."""
    done: list[JournalEntry] = []
    undone: list[JournalEntry] = []
    for entry in journal:
        if entry.kind == "edit":
            done.append(entry)
            undone.clear()
        elif entry.kind == "undo" and done:
            undone.append(done.pop())
        elif undone:
            done.append(undone.pop())
    return JournalState(tuple(done), tuple(undone))
