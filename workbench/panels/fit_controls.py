"""Buttons for settings that fit: a search that proposes some, and a suggestion if the next step would not."""

from __future__ import annotations

import traceback
from collections.abc import Mapping
from concurrent.futures import CancelledError, Future
from html import escape
from typing import Any

import ipywidgets

from l2l_core import Fit, NothingFits
from l2l_core.forecast import WhatFits
from l2l_core.trace import format_bytes
from workbench.panels.controls import make_button, make_row
from workbench.panels.panel import failure_html
from workbench.session import SearchCancelled, Session

_TIP = (
    "Find the fastest settings that fit the device: micro-batches, layers ahead, place of the stash, resident weights, "
    "kept graphs, or depth first with every layer on the device. Rehearses a few steps, trains nothing, and proposes the "
    "settings with reasons; Use applies them"
)


class FitButton:
    """A search for the fastest settings that fit, and its proposal with reasons and a button that applies it.

    Args:
        session: runs the search on its thread.

    Attributes:
        button: starts the search.
        proposal: what was found; hidden before the first search.
    """

    def __init__(self, session: Session) -> None:
        self._session = session
        self.button = make_button("Fit", "magic", _TIP)
        self.button.on_click(lambda _: self._start_search())
        self._use = make_button("", "check", "Use these settings from the next step on", button_style="primary")
        self._use.on_click(lambda _: self._apply())
        self._text = ipywidgets.HTML()
        self._found: Fit | None = None
        self.proposal = ipywidgets.VBox([self._text, self._use], layout={"display": "none"})

    def _start_search(self) -> None:
        self.button.disabled = True
        try:
            self._show_text(
                '<span class="l2l-caption">searching for settings that fit; progress and Cancel are in the header</span>'
            )
            self._session.fit().add_done_callback(self._on_result)
        except Exception as error:
            self._show_failure(error)

    def _on_result(self, future: Future[Fit]) -> None:
        """Show the result; called on the session's thread."""
        self.button.disabled = False
        try:
            self._found = found = future.result()
        except Exception as error:
            self._show_failure(error)
            return
        choice, *reasons = str(found).splitlines()
        if not found.settings:
            reasons.insert(0, "These are the settings in force.")
        more = "".join(f'<br><span class="l2l-caption">{escape(line)}</span>' for line in reasons)
        self._show_text(f'<div class="l2l-forecast"><strong>proposed</strong> {escape(choice)}{more}</div>')
        self._use.description = f"Use {_arguments(found.settings)}"
        self._use.layout.display = "" if found.settings else "none"

    def _apply(self) -> None:
        """Use the proposed settings, also if others were changed since the search."""
        found = self._found
        assert found is not None, "the button is hidden before"
        try:
            self._session.reconfigure(**found.settings)
            self._use.layout.display = "none"
            self._text.value += '<span class="l2l-caption">in force from the next step on</span>'
        except Exception as error:
            self._show_failure(error)

    def _show_failure(self, error: BaseException) -> None:
        self.button.disabled = False
        if isinstance(error, NothingFits | CancelledError | SearchCancelled):
            message = "the search was removed from the queue" if isinstance(error, CancelledError) else str(error)
            self._show_text(f'<span class="l2l-caption">{escape(message)}</span>')
        else:
            self._show_text(failure_html(f"No settings were found: {error}", traceback.format_exc()))

    def _show_text(self, html: str) -> None:
        self._use.layout.display = "none"
        self._text.value, self.proposal.layout.display = html, ""


def _arguments(settings: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}={value}" for name, value in settings.items())


class FitSuggestion:
    """A button that applies suggested settings, with the device bytes that they need; hidden while the next step fits.

    Args:
        session: the session whose settings are changed.
    """

    def __init__(self, session: Session) -> None:
        self._session = session
        self._suggestion: WhatFits | None = None
        self._button = make_button("", "check", "Use these settings for the next step; by the forecast it then fits")
        self._button.on_click(lambda _: self._apply())
        self._text = ipywidgets.HTML()
        self.widget = make_row(self._button, self._text)
        self.show(None)

    def show(self, found: WhatFits | None) -> None:
        """Show a suggestion; None hides the widget."""
        self._suggestion = found
        if found is not None:
            fastest = found.fastest
            self._button.layout.display = "" if fastest is not None else "none"
            self._button.description = f"Use {_arguments(found.settings)}"
            words = (
                f"{format_bytes(fastest.device_bytes)} on the device, by the forecast"
                if fastest is not None
                else "no settings fit with this number of micro-batches: by the forecast, the step needs at least "
                f"{format_bytes(found.smallest.budget_bytes)}. It will try other numbers and name one that fits"
            )
            self._text.value = f'<span class="l2l-caption">{escape(words)}</span>'
        self.widget.layout.display = "" if found is not None else "none"

    def _apply(self) -> None:
        found = self._suggestion  # read once: the thread of the forecasts may replace it
        try:
            if found is not None:
                self._session.reconfigure(**found.settings)
        except Exception as error:
            self._text.value = failure_html(str(error), traceback.format_exc())
