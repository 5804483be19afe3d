"""Branches as a small table: where each stands, and what it costs to keep."""

from __future__ import annotations

from collections.abc import Sequence

from l2l_core.edits import Branch
from l2l_core.trace import format_bytes
from workbench.pictures.picture import Table

_HEADER = ("branch", "", "step", "layers", "loss", "host bytes")


def branches_table(branches: Sequence[Branch]) -> Table:
    """Make a table with one line per branch; its bytes are those that the branch holds beside the present state."""
    rows = [
        (
            branch.name,
            "● present" if branch.active else "",
            str(branch.steps),
            str(branch.layers),
            "–" if branch.loss is None else f"{branch.loss:.4g}",
            "–" if branch.active else format_bytes(branch.nbytes),  # the present one is the live state itself
        )
        for branch in branches
    ]
    return Table("Branches", _HEADER, rows)
