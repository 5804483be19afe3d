"""Edits of the stack while it trains: a form, the queue, undo and redo, and the journal."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Sequence
from typing import Any

import ipywidgets

from l2l_core import Edit
from workbench.panels.choices import make_list
from workbench.panels.copy_script import CopyScript
from workbench.panels.edit_controls import BranchControls
from workbench.panels.edit_form_controls import EditFormControls
from workbench.panels.key_capture import KeyCapture
from workbench.panels.panel import Panel, failure_html
from workbench.panels.probe_controls import ProbeControls
from workbench.panels.queue import QueueControls
from workbench.pictures import Table, branches_table, draw_journal, journal_table, shortened
from workbench.session import Session, Snapshot, describe_edit, describe_entry, journal_state_of

_TITLE = '<div class="l2l-heading">Edit the stack of layers</div>'


class EditsPanel(Panel):
    """Grows, drops and moves layers between two steps, also while a run is under way.

    Apply puts the edit of the form into the queue; its turn comes when the step under way is over. Choices change only when
    the stack does: what a person has open or chosen stays while training goes on. All controls are native ones, with
    labels: Tab reaches them, arrow keys choose, Space and Enter press.
    """

    source_type = Session
    has_own_caption = True  # in the table of branches

    def build(self) -> ipywidgets.DOMWidget:
        self._drawn_inputs: object = None  # the journal that is shown, and what can be undone and redone
        self._has_error = False  # a refusal that no session knows of
        self._group: list[Edit] = []
        self._title = ipywidgets.HTML()
        self._form = EditFormControls(self._guard, self._enable)
        self._apply = self._button("Apply", "check", "Carry it out after the current step", self._press_apply)
        self._apply.button_style = "primary"
        self._add = self._button(
            "Add to group", "plus", "Edits of a group are all carried out, or none", self._press_add
        )
        self._force = ipywidgets.Checkbox(
            description="force",
            tooltip="Also carry out an edit that only looks wrong, such as a layer of another kind at this position",
            indent=False,
            layout={"width": "auto"},
        )
        self._undo = self._button("Undo", "undo", "", self.session.undo)
        self._redo = self._button("Redo", "repeat", "", self.session.redo)
        for button in (self._undo, self._redo):
            # they name what they would turn to; with a width of their own, nothing beside them moves
            button.layout.width = "212px"
        self._error_html = ipywidgets.HTML(layout={"display": "none"})
        self._branches = BranchControls(self.session, self._button)
        self._probe, self._queue = ProbeControls(self.session), QueueControls(self.session, self._button)
        self._journal, self._script = ipywidgets.HTML(), CopyScript(self.session.script)
        form = _box(ipywidgets.HBox, "l2l-form", self._form.widget, self._build_group(), self._build_queue())
        buttons = _box(ipywidgets.HBox, "l2l-buttons", self._apply, self._add, self._force, self._undo, self._redo)
        outlook, branches, probe = self._form.preview, self._branches.widget, self._probe.widget
        parts = [
            self._title,
            form,
            outlook,
            buttons,
            self._queue.line,
            self._error_html,
            branches,
            probe,
            self._journal,
        ]
        return _box(ipywidgets.VBox, "l2l-edits", *parts, self._script, KeyCapture(layout={"display": "none"}))

    def _build_group(self) -> ipywidgets.DOMWidget:
        self._members = make_list(5)
        self._apply_group = self._button("Apply group", "check", "All of them, or none", self._press_apply_group)
        self._remove_button = self._button(
            "Remove", "times", "Take the chosen edit out of the group", self._press_remove
        )
        self._show_group(-1)
        buttons = _box(ipywidgets.HBox, "l2l-buttons", self._apply_group, self._remove_button)
        return _box(ipywidgets.VBox, "l2l-list", _caption("Group: all of it, or nothing"), self._members, buttons)

    def _build_queue(self) -> ipywidgets.DOMWidget:
        buttons = _box(ipywidgets.HBox, "l2l-buttons", self._queue.remove)
        return _box(ipywidgets.VBox, "l2l-list", _caption("Queue: waits for its turn"), self._queue.commands, buttons)

    def draw(self, snapshot: Snapshot) -> None:
        self._title.value = _TITLE  # `fail` writes over it, so every frame writes it again
        if self._form.set_layers(snapshot.layers) and self._group:  # the layers have other numbers
            self._show_group(self._members.index if self._members.index is not None else -1)
        self._queue.draw(snapshot)
        self._branches.draw(snapshot)
        self._probe.draw(snapshot)
        known = snapshot.journal, snapshot.changes, snapshot.can_undo, snapshot.can_redo
        if known != self._drawn_inputs:
            self._drawn_inputs, self._journal.value = known, draw_journal(snapshot.journal, snapshot.changes)
            self._label_undo_redo(snapshot)
        if snapshot.refusal is not None:
            self._show_error(
                f"Refused after step {snapshot.refusal.step}: {snapshot.refusal.message}",
                snapshot.refusal.traceback,
                snapshot.refusal.after,
            )
        elif not self._has_error:
            self._error_html.layout.display = "none"

    def still(self, snapshot: Snapshot) -> Sequence[Table]:
        several = [branches_table(snapshot.branches)] if len(snapshot.branches) > 1 else []
        return [journal_table(snapshot.journal, snapshot.changes), *several]

    def _still_caption(self, snapshot: Snapshot) -> str:
        return snapshot.state_words

    def _label_undo_redo(self, snapshot: Snapshot) -> None:
        """Undo and redo, named by what they would turn to."""
        turns = journal_state_of(snapshot.journal)
        for button, word, able, last in (
            (self._undo, "Undo", snapshot.can_undo, turns.in_force),
            (self._redo, "Redo", snapshot.can_redo, turns.undone),
        ):
            words = describe_entry(last[-1], snapshot.journal) if able and last else ""
            button.description = f"{word} {shortened(words, 22)}".strip()
            button.tooltip = f"{word} {words}: relay.{word.lower()}()" if words else f"Nothing to {word.lower()}"
            button.disabled = not able

    # -- buttons -------------------------------------------------------------------------------------------------------

    def _enable(self) -> None:
        self._apply.disabled = self._add.disabled = not self._form.is_complete

    def _press_apply(self) -> None:
        self.session.edit(self._form.edit(), force=self._force.value)
        self._form.reset()

    def _press_add(self) -> None:
        self._group.append(self._form.edit())
        self._form.reset()
        self._show_group(len(self._group) - 1)

    def _press_remove(self) -> None:
        at = self._members.value
        if at is not None:
            del self._group[at]
            self._show_group(min(at, len(self._group) - 1))

    def _press_apply_group(self) -> None:
        if self._group:
            self.session.edit(*self._group, force=self._force.value)
            self._group.clear()
            self._show_group(-1)

    def _show_group(self, at: int) -> None:
        numbers = self._form.numbers
        self._members.options = [(describe_edit(edit, numbers), i) for i, edit in enumerate(self._group)]
        self._members.value = at if at >= 0 else None
        self._apply_group.disabled = self._remove_button.disabled = not self._group

    def _button(self, label: str, icon: str, tip: str, action: Callable[[], Any]) -> ipywidgets.Button:
        button = ipywidgets.Button(description=label, icon=icon, tooltip=tip, layout={"width": "auto"})
        button.on_click(self._guard(lambda: self._run_action(action)))
        return button

    def _run_action(self, action: Callable[[], Any]) -> None:
        """Do it, and show at once what waits."""
        action()
        self._queue.draw(self.session.snapshot())

    def _guard(self, action: Callable[[], Any]) -> Callable[..., None]:
        """A widget's callback: an error is shown below the form."""

        def callback(*_: object) -> None:
            # waits for a frame that is being drawn: while the form follows the layers, it takes every change for its own
            with self._drawing:
                try:
                    self._has_error = False
                    action()
                except Exception as error:
                    self._has_error = True
                    self._show_error(str(error), traceback.format_exc())

        return callback

    def _show_error(self, message: str, details: str, after: str = "") -> None:
        self._error_html.value = failure_html(message, details, after)
        self._error_html.layout.display = ""


def _box(kind: type[ipywidgets.Box], name: str, *children: ipywidgets.DOMWidget) -> ipywidgets.DOMWidget:
    box = kind(children)
    box.add_class(name)
    return box


def _caption(words: str) -> ipywidgets.HTML:
    return ipywidgets.HTML(f'<div class="l2l-caption">{words}</div>')
