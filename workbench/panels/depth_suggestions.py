"""Buttons for edits that lead to the depth of a what-if question."""

from __future__ import annotations

import traceback
from collections.abc import Sequence
from concurrent.futures import CancelledError, Future
from functools import partial
from html import escape

import ipywidgets

from workbench.panels.controls import make_box, make_button, make_row
from workbench.panels.panel import failure_html
from workbench.pictures import describe_wait
from workbench.session import LayerRow, Session
from workbench.what_if import DepthEdit, depth_edits

_MAX_SUGGESTIONS = 2


class DepthSuggestions:
    """One line per edit that leads to the slider's depth; hidden at the current depth.

    Args:
        session: the session that is edited.
    """

    def __init__(self, session: Session) -> None:
        self._session = session
        self._edits: Sequence[DepthEdit] = ()
        self._shown_inputs: object = None  # depth and layers
        self._buttons = [make_button("", "check", "") for _ in range(_MAX_SUGGESTIONS)]
        self._texts = [ipywidgets.HTML() for _ in range(_MAX_SUGGESTIONS)]
        self._note = ipywidgets.HTML()
        self._rows = [make_row(*pair) for pair in zip(self._buttons, self._texts, strict=True)]
        for i, button in enumerate(self._buttons):
            button.on_click(lambda _, i=i: self._apply(i))
        self.widget = make_box(ipywidgets.VBox, "l2l-offer", *self._rows, self._note)
        self.update((), 0)

    def update(self, layers: Sequence[LayerRow], depth: int) -> None:
        """Show the edits that lead from these layers to `depth`."""
        inputs = depth, [(row.key, row.stack) for row in layers]
        if inputs == self._shown_inputs:
            return
        self._shown_inputs, reason = inputs, ""
        try:
            self._edits = depth_edits(layers, depth) if layers else ()
        except ValueError as error:
            self._edits, reason = (), f"layers: {error}"
        for i, (row, button, text) in enumerate(zip(self._rows, self._buttons, self._texts, strict=True)):
            row.layout.display = "" if i < len(self._edits) else "none"
            if i < len(self._edits):
                edit = self._edits[i]
                button.description, button.tooltip = edit.title, edit.description
                text.value = f"{escape(edit.description)}<br><code>{escape(edit.code)}</code>"
        if self._edits or reason:
            self._show_note(reason)
        self.widget.layout.display = "" if self._edits or reason or self._note.value else "none"

    def _apply(self, i: int) -> None:
        edit = self._edits[i]
        try:
            future = self._session.edit(*edit.edits)
            snapshot = self._session.snapshot()
            place = f"{edit.title}: {describe_wait(snapshot)}, place {len(snapshot.queued)} in the queue"
            self._show_note(place if snapshot.queued else "")
            future.add_done_callback(partial(self._on_result, edit))
        except Exception as error:
            self._note.value = failure_html(str(error), traceback.format_exc())

    def _on_result(self, edit: DepthEdit, future: Future[object]) -> None:
        """Show the result of an edit; called on the session's thread."""
        try:
            future.result()
            self._show_note(f"{edit.title}: done")
        except CancelledError:
            self._show_note(f"{edit.title}: taken out of the queue")
        except Exception as error:
            self._note.value = failure_html(f"{edit.title}: {error}", traceback.format_exc(), "Nothing was changed.")

    def _show_note(self, words: str) -> None:
        self._note.value = f'<span class="l2l-caption">{escape(words)}</span>' if words else ""
