"""The edits that the layers slider of a what-if means, as buttons beside Apply."""

from __future__ import annotations

import traceback
from collections.abc import Sequence
from concurrent.futures import CancelledError, Future
from functools import partial
from html import escape

import ipywidgets

from workbench.panels.panel import failure_html
from workbench.pictures import describe_wait
from workbench.session import LayerRow, Session
from workbench.what_if import DepthEdit, depth_edits

_MAX_SUGGESTIONS = 2  # ways to another depth


class DepthSuggestions:
    """Offers a line for each way to the depth of the slider: a button, what it does, and its code. Hidden at the present depth.

    Args:
        session: is asked for the edit.
    """

    def __init__(self, session: Session) -> None:
        self._session = session
        self._edits: Sequence[DepthEdit] = ()
        self._shown_inputs: object = None  # depth and layers of the offers
        self._buttons = [ipywidgets.Button(icon="check", layout={"width": "auto"}) for _ in range(_MAX_SUGGESTIONS)]
        self._texts = [ipywidgets.HTML() for _ in range(_MAX_SUGGESTIONS)]
        self._note = ipywidgets.HTML()
        self._rows = [ipywidgets.HBox([*pair]) for pair in zip(self._buttons, self._texts, strict=True)]
        for i, (row, button) in enumerate(zip(self._rows, self._buttons, strict=True)):
            row.add_class("l2l-buttons")
            button.on_click(lambda _, i=i: self._apply(i))
        self.widget = ipywidgets.VBox([*self._rows, self._note])
        self.widget.add_class("l2l-offer")
        self.update((), 0)

    def update(self, layers: Sequence[LayerRow], depth: int) -> None:
        """Offer what leads from these layers to that depth."""
        known = depth, [(row.key, row.stack) for row in layers]
        if known == self._shown_inputs:
            return
        self._shown_inputs, why = known, ""
        try:
            self._edits = depth_edits(layers, depth) if layers else ()
        except ValueError as error:
            self._edits, why = (), f"layers: {error}"
        for i, (row, button, words) in enumerate(zip(self._rows, self._buttons, self._texts, strict=True)):
            row.layout.display = "" if i < len(self._edits) else "none"
            if i < len(self._edits):
                offer = self._edits[i]
                button.description, button.tooltip = offer.title, offer.description
                words.value = f"{escape(offer.description)}<br><code>{escape(offer.code)}</code>"
        if self._edits or why:
            self._show_note(why)
        self.widget.layout.display = "" if self._edits or why or self._note.value else "none"

    def _apply(self, i: int) -> None:
        offer = self._edits[i]
        try:
            future = self._session.edit(*offer.edits)
            snapshot = self._session.snapshot()
            self._show_note(
                f"{offer.title}: {describe_wait(snapshot)}, place {len(snapshot.queued)} in the queue"
                if snapshot.queued
                else ""
            )
            future.add_done_callback(partial(self._on_result, offer))
        except Exception as error:
            self._note.value = failure_html(str(error), traceback.format_exc())

    def _on_result(self, edit: DepthEdit, future: Future[object]) -> None:
        """The edit's turn has come. On the session's thread."""
        try:
            future.result()
            self._show_note(f"{edit.title}: done")
        except CancelledError:
            self._show_note(f"{edit.title}: taken out of the queue")
        except Exception as error:
            self._note.value = failure_html(f"{edit.title}: {error}", traceback.format_exc(), "Nothing was changed.")

    def _show_note(self, words: str) -> None:
        self._note.value = f'<span class="l2l-caption">{escape(words)}</span>' if words else ""
