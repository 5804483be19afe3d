"""The edits that the layers slider of a what-if means, as buttons beside Apply."""

from __future__ import annotations

import traceback
from collections.abc import Sequence
from concurrent.futures import CancelledError, Future
from functools import partial
from html import escape

import ipywidgets

from workbench.panels.panel import failure_html
from workbench.pictures import waits_for
from workbench.session import LayerRow, Session
from workbench.what_if import DepthEdit, depth_edits

_MOST = 2  # ways to another depth


class DepthOffer:
    """Offers a line for each way to the depth of the slider: a button, what it does, and its code. Hidden at the present depth.

    Args:
        session: is asked for the edit.
    """

    def __init__(self, session: Session) -> None:
        self._session = session
        self._offers: Sequence[DepthEdit] = ()
        self._for: object = None  # depth and layers of the offers
        self._buttons = [ipywidgets.Button(icon="check", layout={"width": "auto"}) for _ in range(_MOST)]
        self._words = [ipywidgets.HTML() for _ in range(_MOST)]
        self._note = ipywidgets.HTML()
        self._rows = [ipywidgets.HBox([*pair]) for pair in zip(self._buttons, self._words, strict=True)]
        for i, (row, button) in enumerate(zip(self._rows, self._buttons, strict=True)):
            row.add_class("l2l-buttons")
            button.on_click(lambda _, i=i: self._press(i))
        self.widget = ipywidgets.VBox([*self._rows, self._note])
        self.widget.add_class("l2l-offer")
        self.follow((), 0)

    def follow(self, layers: Sequence[LayerRow], depth: int) -> None:
        """Offer what leads from these layers to that depth."""
        known = depth, [(row.key, row.stack) for row in layers]
        if known == self._for:
            return
        self._for, why = known, ""
        try:
            self._offers = depth_edits(layers, depth) if layers else ()
        except ValueError as error:
            self._offers, why = (), f"layers: {error}"
        for i, (row, button, words) in enumerate(zip(self._rows, self._buttons, self._words, strict=True)):
            row.layout.display = "" if i < len(self._offers) else "none"
            if i < len(self._offers):
                offer = self._offers[i]
                button.description, button.tooltip = offer.title, offer.words
                words.value = f"{escape(offer.words)}<br><code>{escape(offer.code)}</code>"
        if self._offers or why:
            self._say(why)
        self.widget.layout.display = "" if self._offers or why or self._note.value else "none"

    def _press(self, i: int) -> None:
        offer = self._offers[i]
        try:
            future = self._session.edit(*offer.edits)
            now = self._session.snapshot()
            self._say(f"{offer.title}: {waits_for(now)}, place {len(now.queued)} in the queue" if now.queued else "")
            future.add_done_callback(partial(self._tell, offer))
        except Exception as error:
            self._note.value = failure_html(str(error), traceback.format_exc())

    def _tell(self, offer: DepthEdit, future: Future[object]) -> None:
        """The edit's turn has come. On the session's thread."""
        try:
            future.result()
            self._say(f"{offer.title}: done")
        except CancelledError:
            self._say(f"{offer.title}: taken out of the queue")
        except Exception as error:
            self._note.value = failure_html(f"{offer.title}: {error}", traceback.format_exc(), "Nothing was changed.")

    def _say(self, words: str) -> None:
        self._note.value = f'<span class="l2l-caption">{escape(words)}</span>' if words else ""
