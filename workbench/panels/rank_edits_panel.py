"""Edits of the stack on all ranks: the form of `EditQuestions`, undo and redo, and the journal."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

import ipywidgets

from workbench.panels.edit_form_controls import EditFormControls
from workbench.panels.panel import Panel, failure_html
from workbench.pictures import Table, draw_journal, journal_table
from workbench.ranks import RankController
from workbench.session import Snapshot


class RankEditsPanel(Panel):
    """Grows, drops and moves layers on all ranks between two steps, also while a run is under way."""

    source_type = RankController

    def build(self) -> ipywidgets.DOMWidget:
        self._pending_edit: Future[Any] | None = None
        self._title = ipywidgets.HTML('<div class="l2l-heading">Edit the stack of layers, on all workers</div>')
        self._apply = self._button(
            "Apply", "check", "Carry it out on all workers after the current step", self._press_apply
        )
        self._apply.button_style = "primary"
        self._form = EditFormControls(self._guard, self._enable)
        self._undo = self._button("Undo", "undo", "Undo the last edit", lambda: self._track_edit(self.session.undo()))
        self._redo = self._button("Redo", "repeat", "Do it again", lambda: self._track_edit(self.session.redo()))
        self._error_html, self._journal = ipywidgets.HTML(layout={"display": "none"}), ipywidgets.HTML()
        form, buttons = (
            ipywidgets.HBox([self._form.widget]),
            ipywidgets.HBox([self._apply, self._undo, self._redo]),
        )
        form.add_class("l2l-form")
        buttons.add_class("l2l-buttons")
        parts = [self._title, form, self._form.preview, buttons, self._error_html, self._journal]
        widget = ipywidgets.VBox(parts)
        widget.add_class("l2l-edits")
        return widget

    def draw(self, snapshot: Snapshot) -> None:
        self._form.set_layers(snapshot.layers)
        self._undo.disabled, self._redo.disabled = not snapshot.can_undo, not snapshot.can_redo
        self._journal.value = draw_journal(snapshot.journal, snapshot.changes)
        if self._pending_edit is not None and self._pending_edit.done():
            error = None if self._pending_edit.cancelled() else self._pending_edit.exception()
            self._show_error(str(error) if error is not None else "", "")
            self._pending_edit = None

    def still(self, snapshot: Snapshot) -> Sequence[Table]:
        return [journal_table(snapshot.journal, snapshot.changes)]

    def _enable(self) -> None:
        self._apply.disabled = not self._form.is_complete

    def _press_apply(self) -> None:
        self._track_edit(self.session.edit(self._form.edit()))
        self._form.reset()

    def _track_edit(self, future: Future[Any]) -> None:
        """Show what comes of it, as soon as it is known."""
        self._pending_edit = future

    def _button(self, label: str, icon: str, tip: str, action: Callable[[], Any]) -> ipywidgets.Button:
        button = ipywidgets.Button(description=label, icon=icon, tooltip=tip, layout={"width": "auto"})
        button.on_click(self._guard(action))
        return button

    def _guard(self, action: Callable[[], Any]) -> Callable[..., None]:
        """A widget's callback: an error is shown below the form."""

        def callback(*_: object) -> None:
            with self._drawing:
                try:
                    action()
                except Exception as error:
                    self._show_error(str(error), traceback.format_exc())

        return callback

    def _show_error(self, message: str, details: str) -> None:
        self._error_html.value = failure_html(message, details) if message else ""
        self._error_html.layout.display = "" if message else "none"
