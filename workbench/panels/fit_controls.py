"""A button that has the relay look for its own settings: the fastest that fit, used from the next step on, and why these."""

from __future__ import annotations

import traceback
from concurrent.futures import CancelledError, Future
from html import escape

import ipywidgets

from l2l_core import Fit, NothingFits
from workbench.panels.panel import failure_html
from workbench.session import Session

_TIP = (
    "Find the fastest settings that fit the device: micro-batches, layers ahead, place of the stash, weights that stay, "
    "graphs that are kept, or all of it and one micro-batch after another. A few steps are rehearsed and nothing is trained"
)


class FitButton:
    """Looks for settings when pressed, and says in `words` what was chosen and why.

    Args:
        session: looks, on its thread, and has the settings then.
    """

    def __init__(self, session: Session) -> None:
        self._session = session
        self.button = ipywidgets.Button(description="Fit", icon="magic", tooltip=_TIP, layout={"width": "auto"})
        self.button.on_click(lambda _: self._start_search())
        self.text = ipywidgets.HTML(layout={"display": "none"})

    def _start_search(self) -> None:
        self.button.disabled = True
        try:
            self._show_text('<span class="l2l-caption">looking for settings that fit …</span>')
            self._session.fit().add_done_callback(self._on_result)
        except Exception as error:
            self._show_failure(error)

    def _on_result(self, future: Future[Fit]) -> None:
        """The search is over; on the session's thread."""
        self.button.disabled = False
        try:
            choice, *why = str(future.result()).splitlines()
        except Exception as error:
            self._show_failure(error)
            return
        more = "".join(f'<br><span class="l2l-caption">{escape(line)}</span>' for line in why)
        self._show_text(f'<div class="l2l-forecast"><strong>chosen</strong> {escape(choice)}{more}</div>')

    def _show_failure(self, error: BaseException) -> None:
        self.button.disabled = False
        if isinstance(error, NothingFits | CancelledError):
            words = "it was taken out of the queue" if isinstance(error, CancelledError) else str(error)
            self._show_text(f'<span class="l2l-caption">{escape(words)}</span>')
        else:
            self._show_text(failure_html(f"No settings were found: {error}", traceback.format_exc()))

    def _show_text(self, html: str) -> None:
        self.text.value, self.text.layout.display = html, ""
