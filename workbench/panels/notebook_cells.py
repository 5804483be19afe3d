"""Which cell of a notebook runs now, and what the run before of the same cell has left behind.

Running a cell again replaces its output, but nothing tells the kernel that the widgets of the old output are gone. So
whatever is made in a cell is closed when that cell runs again.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any, Protocol
from weakref import WeakSet

from IPython import get_ipython


class Closable(Protocol):
    def close(self, wait: bool = True) -> None: ...


class _CellRun:
    """What one run of a cell has made."""

    def __init__(self, run: str) -> None:
        self.run = run
        self.made: WeakSet[Any] = WeakSet()  # weak: what was closed may go before its cell runs again


_cells: dict[str, _CellRun] = defaultdict(lambda: _CellRun(""))


def is_notebook() -> bool:
    """Tell whether there is a notebook; otherwise it is Python, or IPython in a terminal."""
    # only a kernel's shell knows the message that it answers; get_ipython() is None in plain Python
    return hasattr(get_ipython(), "get_parent")


def current_cell() -> tuple[str, str]:
    """Return identities of the cell that runs and of this run of it; empty strings outside of a notebook."""
    parent = get_ipython().get_parent() if is_notebook() else {}
    return parent.get("metadata", {}).get("cellId", ""), parent.get("header", {}).get("msg_id", "")


def register_in_cell(widget: Closable) -> None:
    """Note that `made` was made in this run of this cell, and close what an earlier run has made."""
    cell, run = current_cell()
    if not cell:
        return
    # what this same run has made stays: one cell may show several
    if _cells[cell].run != run:
        for old in list(_cells[cell].made):
            old.close(wait=False)  # it may be in the middle of a long step, and this cell would stand still
        _cells[cell] = _CellRun(run)
    _cells[cell].made.add(widget)
