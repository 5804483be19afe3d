"""Edits of the stack on all ranks: the form of `EditQuestions`, undo and redo, and the journal."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

import ipywidgets

from workbench.panels.edit_questions import EditQuestions
from workbench.panels.panel import Panel, failure_html
from workbench.pictures import Table, draw_journal, journal_table
from workbench.ranks import Conductor
from workbench.session import Snapshot


class RankEditsPanel(Panel):
    """Grows, drops and moves layers on all ranks between two steps, also while a run is under way."""

    looks_at = Conductor

    def build(self) -> ipywidgets.DOMWidget:
        self._asked: Future[Any] | None = None
        self._title = ipywidgets.HTML('<div class="l2l-heading">Edit the stack of layers, on all workers</div>')
        self._apply = self._button(
            "Apply", "check", "Carry it out on all workers after the current step", self._press_apply
        )
        self._apply.button_style = "primary"
        self._questions = EditQuestions(self._guarded, self._enable)
        self._undo = self._button("Undo", "undo", "Undo the last edit", lambda: self._ask(self.session.undo()))
        self._redo = self._button("Redo", "repeat", "Do it again", lambda: self._ask(self.session.redo()))
        self._trouble, self._journal = ipywidgets.HTML(layout={"display": "none"}), ipywidgets.HTML()
        form, buttons = (
            ipywidgets.HBox([self._questions.widget]),
            ipywidgets.HBox([self._apply, self._undo, self._redo]),
        )
        form.add_class("l2l-form")
        buttons.add_class("l2l-buttons")
        parts = [self._title, form, self._questions.outlook, buttons, self._trouble, self._journal]
        widget = ipywidgets.VBox(parts)
        widget.add_class("l2l-edits")
        return widget

    def draw(self, now: Snapshot) -> None:
        self._questions.follow(now.layers)
        self._undo.disabled, self._redo.disabled = not now.can_undo, not now.can_redo
        self._journal.value = draw_journal(now.journal, now.changes)
        if self._asked is not None and self._asked.done():
            error = None if self._asked.cancelled() else self._asked.exception()
            self._say(str(error) if error is not None else "", "")
            self._asked = None

    def still(self, now: Snapshot) -> Sequence[Table]:
        return [journal_table(now.journal, now.changes)]

    def _enable(self) -> None:
        self._apply.disabled = not self._questions.is_complete

    def _press_apply(self) -> None:
        self._ask(self.session.edit(self._questions.edit()))
        self._questions.reset()

    def _ask(self, asked: Future[Any]) -> None:
        """Show what comes of it, as soon as it is known."""
        self._asked = asked

    def _button(self, words: str, icon: str, tip: str, action: Callable[[], Any]) -> ipywidgets.Button:
        button = ipywidgets.Button(description=words, icon=icon, tooltip=tip, layout={"width": "auto"})
        button.on_click(self._guarded(action))
        return button

    def _guarded(self, action: Callable[[], Any]) -> Callable[..., None]:
        """A widget's callback: an error is shown below the form."""

        def callback(*_: object) -> None:
            with self._drawing:
                try:
                    action()
                except Exception as error:
                    self._say(str(error), traceback.format_exc())

        return callback

    def _say(self, message: str, details: str) -> None:
        self._trouble.value = failure_html(message, details) if message else ""
        self._trouble.layout.display = "" if message else "none"
