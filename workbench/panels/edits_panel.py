"""Edits of the layers during training: form, group, queue, undo, redo, branches, probe and journal."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import ipywidgets

from l2l_core import Edit
from workbench.panels.controls import make_box, make_checkbox, make_list, make_row
from workbench.panels.copy_script import CopyScript
from workbench.panels.edit_controls import BranchControls, ProbeControls, QueueControls
from workbench.panels.edit_form_controls import EditFormControls
from workbench.panels.key_capture import KeyCapture
from workbench.panels.panel import ControlPanel
from workbench.pictures import Table, branches_table, draw_journal, journal_table, shortened
from workbench.session import Session, Snapshot, describe_edit, describe_entry, journal_state_of


class EditsPanel(ControlPanel):
    """Inserts, drops and moves layers between two steps, also during a run.

    Apply queues the edit of the form, which runs after the current step. Options of the form change only with the layers,
    so open dropdowns and selections stay during training.
    """

    source_type = Session
    session: Session
    has_own_caption = True  # in the table of branches

    def build(self) -> ipywidgets.DOMWidget:
        self._drawn_inputs: object = None  # of journal, undo and redo
        self._group: list[Edit] = []
        self.session.counts_flop = True
        title = ipywidgets.HTML('<div class="l2l-heading">Edit the stack of layers</div>')
        self._form = EditFormControls(self._guard, self._enable)
        self._apply = self._button("Apply", "check", "Apply after the current step", self._press_apply)
        self._apply.button_style = "primary"
        tip = "The edits of a group are applied together or not at all"
        self._add = self._button("Add to group", "plus", tip, self._press_add)
        tip = "Skip the check that refuses, for example, a layer of another kind at this position"
        self._force = make_checkbox("force", tip)
        self._undo = self._button("Undo", "undo", "", self.session.undo)
        self._redo = self._button("Redo", "repeat", "", self.session.redo)
        for button in (self._undo, self._redo):
            # fixed, since the label names the edit: otherwise the buttons beside would move
            button.layout.width = "262px"
        self._error_html = ipywidgets.HTML(layout={"display": "none"})
        self._branches = BranchControls(self.session, self._button)
        self._probe, self._queue = ProbeControls(self.session), QueueControls(self.session, self._button)
        self._journal, self._script = ipywidgets.HTML(), CopyScript(self.session.script)
        form = make_box(ipywidgets.HBox, "l2l-form", self._form.widget, self._build_group(), self._build_queue())
        buttons = make_row(self._apply, self._add, self._force, self._undo, self._redo)
        status = self._form.preview, buttons, self._queue.line, self._error_html
        below = self._branches.widget, self._probe.widget, self._journal, self._script
        keys = KeyCapture(layout={"display": "none"})
        return make_box(ipywidgets.VBox, "l2l-edits", title, form, *status, *below, keys)

    def _build_group(self) -> ipywidgets.DOMWidget:
        self._members = make_list(5, "edits of the group")
        self._apply_group = self._button("Apply group", "check", "Apply all edits, or none", self._press_apply_group)
        tip = "Remove the selected edit from the group"
        self._remove_button = self._button("Remove", "times", tip, self._press_remove)
        self._show_group(-1)
        buttons = make_row(self._apply_group, self._remove_button)
        return make_box(ipywidgets.VBox, "l2l-list", _caption("Group: all edits or none"), self._members, buttons)

    def _build_queue(self) -> ipywidgets.DOMWidget:
        parts = _caption("Queue: waiting commands"), self._queue.commands, make_row(self._queue.remove)
        return make_box(ipywidgets.VBox, "l2l-list", *parts)

    def draw(self, snapshot: Snapshot) -> None:
        if self._form.set_layers(snapshot.layers) and self._group:  # the numbers of layers may have changed
            self._show_group(self._members.index if self._members.index is not None else -1)
        shown = snapshot.shown
        is_stale = shown is not None and shown.is_before_edit(snapshot.layers, snapshot.journal)
        self._form.set_flop(None if shown is None or is_stale else shown.flop)
        self._queue.draw(snapshot)
        self._branches.draw(snapshot)
        self._probe.draw(snapshot)
        inputs = snapshot.journal, snapshot.changes, snapshot.can_undo, snapshot.can_redo
        if inputs != self._drawn_inputs:
            self._drawn_inputs, self._journal.value = inputs, draw_journal(snapshot.journal, snapshot.changes)
            self._label_undo_redo(snapshot)
        if (refusal := snapshot.refusal) is not None:
            message = f"Refused after step {refusal.step}: {refusal.message}"
            self._show_error(message, refusal.traceback, refusal.after)
        elif not self._has_error:
            self._hide_error()

    def still(self, snapshot: Snapshot) -> Sequence[Table]:
        several = [branches_table(snapshot.branches)] if len(snapshot.branches) > 1 else []
        return [journal_table(snapshot.journal, snapshot.changes), *several]

    def _still_caption(self, snapshot: Snapshot) -> str:
        return snapshot.state_words

    def _label_undo_redo(self, snapshot: Snapshot) -> None:
        """Label undo and redo with the edits that they would reverse or repeat."""
        state = journal_state_of(snapshot.journal)
        for button, verb, enabled, entries in (
            (self._undo, "Undo", snapshot.can_undo, state.in_force),
            (self._redo, "Redo", snapshot.can_redo, state.undone),
        ):
            edit = describe_entry(entries[-1], snapshot.journal) if enabled and entries else ""
            button.description = f"{verb}: {shortened(edit, 30)}" if edit else verb
            button.tooltip = f"{verb}: {edit}, by relay.{verb.lower()}()" if edit else f"Nothing to {verb.lower()}"
            button.disabled = not enabled

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
        index = self._members.value
        if index is not None:
            del self._group[index]
            self._show_group(min(index, len(self._group) - 1))

    def _press_apply_group(self) -> None:
        if self._group:
            self.session.edit(*self._group, force=self._force.value)
            self._group.clear()
            self._show_group(-1)

    def _show_group(self, index: int) -> None:
        numbers = self._form.numbers
        self._members.options = [(describe_edit(edit, numbers, len(numbers)), i) for i, edit in enumerate(self._group)]
        self._members.value = index if index >= 0 else None
        self._apply_group.disabled = self._remove_button.disabled = not self._group

    def _button(self, label: str, icon: str, tooltip: str, action: Callable[[], Any]) -> ipywidgets.Button:
        def run_action() -> None:
            action()
            self._queue.draw(self.session.snapshot())  # at once

        return super()._button(label, icon, tooltip, run_action)


def _caption(text: str) -> ipywidgets.HTML:
    return ipywidgets.HTML(f'<div class="l2l-caption">{text}</div>')
