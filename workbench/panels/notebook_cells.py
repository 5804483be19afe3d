"""The notebook cell that is running, and widgets made by its previous run.

Running a cell again replaces its output, but the kernel is not notified that the old widgets are gone. So widgets made in a
cell are closed when that cell runs again.
"""

from __future__ import annotations

from typing import Any, Protocol
from weakref import WeakSet

from IPython import get_ipython


class Closable(Protocol):
    """A widget that a cell can close."""

    def close(self, wait: bool = True) -> None: ...


# By cell: the id of its last run, and the widgets made in it; weak, since closed widgets may be freed before the next run.
_cells: dict[str, tuple[str, WeakSet[Any]]] = {}


def is_notebook() -> bool:
    """Return True in a notebook, False in plain Python and in IPython in a terminal."""
    # only the shell of a kernel has the request that it executes
    return hasattr(get_ipython(), "get_parent")


def register_in_cell(widget: Closable) -> None:
    """Register a widget made in the running cell and close the widgets of the cell's earlier runs."""
    parent: Any = get_ipython().get_parent() if is_notebook() else {}  # type: ignore[union-attr]  # not None in a notebook
    cell, run = parent.get("metadata", {}).get("cellId", ""), parent.get("header", {}).get("msg_id", "")
    if not cell:
        return
    last_run, widgets = _cells.get(cell, ("", WeakSet()))
    if last_run != run:  # widgets of the same run stay: one cell may display several
        for old in list(widgets):
            old.close(wait=False)  # waiting for the end of a long step would block this cell
        widgets = WeakSet()
    widgets.add(widget)
    _cells[cell] = run, widgets
