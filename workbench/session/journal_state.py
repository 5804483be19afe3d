"""Which edits of a journal are in force, and which one an undo or a redo would turn to."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from l2l_core.edits import Entry


class Turns(NamedTuple):
    """Edits by what has become of them, the last one last."""

    in_force: tuple[Entry, ...]
    undone: tuple[Entry, ...]  # that a redo would bring back


def turns_of(journal: Sequence[Entry]) -> Turns:
    """Follow the journal from its first line to its last."""
    done: list[Entry] = []
    undone: list[Entry] = []
    for entry in journal:
        if entry.kind == "edit":
            done.append(entry)
            undone.clear()
        elif entry.kind == "undo" and done:
            undone.append(done.pop())
        elif undone:
            done.append(undone.pop())
    return Turns(tuple(done), tuple(undone))
