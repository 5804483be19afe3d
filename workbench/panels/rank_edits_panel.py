"""Edits of the layers on all ranks: form, undo, redo and journal."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

import ipywidgets

from workbench.panels.controls import make_box, make_row
from workbench.panels.edit_form_controls import EditFormControls
from workbench.panels.panel import ControlPanel
from workbench.pictures import Table, draw_journal, journal_table
from workbench.ranks import RankController
from workbench.session import Snapshot


class RankEditsPanel(ControlPanel):
    """Inserts, drops and moves layers on all ranks between two steps, also during a run."""

    source_type = RankController
    session: RankController

    def build(self) -> ipywidgets.DOMWidget:
        self._pending_edit: Future[Any] | None = None
        self._title = ipywidgets.HTML('<div class="l2l-heading">Edit the stack of layers, on all workers</div>')
        tip = "Apply the edit on all workers after the current step"
        self._apply = self._button("Apply", "check", tip, self._press_apply)
        self._apply.button_style = "primary"
        self._form = EditFormControls(self._guard, self._enable)
        self._undo = self._button("Undo", "undo", "Undo the last edit", lambda: self._track(self.session.undo()))
        self._redo = self._button("Redo", "repeat", "Redo the edit", lambda: self._track(self.session.redo()))
        self._error_html, self._journal = ipywidgets.HTML(layout={"display": "none"}), ipywidgets.HTML()
        form = make_box(ipywidgets.HBox, "l2l-form", self._form.widget)
        buttons = make_row(self._apply, self._undo, self._redo)
        parts = self._title, form, self._form.preview, buttons, self._error_html, self._journal
        return make_box(ipywidgets.VBox, "l2l-edits", *parts)

    def draw(self, snapshot: Snapshot) -> None:
        self._form.set_layers(snapshot.layers)
        self._undo.disabled, self._redo.disabled = not snapshot.can_undo, not snapshot.can_redo
        self._journal.value = draw_journal(snapshot.journal, snapshot.changes)
        if self._pending_edit is not None and self._pending_edit.done():
            error = None if self._pending_edit.cancelled() else self._pending_edit.exception()
            if error is not None:
                self._show_error(str(error), "")
            else:
                self._hide_error()
            self._pending_edit = None

    def still(self, snapshot: Snapshot) -> Sequence[Table]:
        return [journal_table(snapshot.journal, snapshot.changes)]

    def _enable(self) -> None:
        self._apply.disabled = not self._form.is_complete

    def _press_apply(self) -> None:
        self._track(self.session.edit(self._form.edit()))
        self._form.reset()

    def _track(self, future: Future[Any]) -> None:
        """Let `draw` show the result of a command."""
        self._pending_edit = future
