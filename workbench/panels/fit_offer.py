"""A button for settings that fit, where the next step would not: found by forecasts, and applied when pressed."""

from __future__ import annotations

import traceback
from html import escape

import ipywidgets

from l2l_core.forecast import WhatFits
from l2l_core.trace import format_bytes
from workbench.panels.panel import failure_html
from workbench.session import Session


class FitSuggestion:
    """Offers the settings that were found, as a button with what they would need; hidden while the next step fits.

    Args:
        session: gets the settings.
    """

    def __init__(self, session: Session) -> None:
        self._session = session
        self._suggestion: WhatFits | None = None
        self._button = ipywidgets.Button(icon="check", layout={"width": "auto"})
        self._button.on_click(lambda _: self._apply())
        self._text = ipywidgets.HTML()
        self.widget = ipywidgets.HBox([self._button, self._text], layout={"display": "none"})
        self.widget.add_class("l2l-buttons")

    def show(self, found: WhatFits | None) -> None:
        """Offer what was found; None if nothing is needed, or nothing is known."""
        self._suggestion = found
        if found is not None:
            settings, fastest = found.settings, found.fastest
            self._button.layout.display = "" if fastest is not None else "none"
            self._button.description = f"Use {', '.join(f'{name}={value}' for name, value in settings.items())}"
            self._button.tooltip = "Use these settings for the next step; by the forecast it then fits"
            words = (
                f"{format_bytes(fastest.device_bytes)} on the device, by the forecast"
                if fastest is not None
                else "with this number of micro-batches no settings fit: the least is "
                f"{format_bytes(found.smallest.budget_bytes)}, by the forecast; the step will try other numbers "
                "and say what fits"
            )
            self._text.value = f'<span class="l2l-caption">{escape(words)}</span>'
        self.widget.layout.display = "" if found is not None else "none"

    def _apply(self) -> None:
        found = self._suggestion  # once: the thread of the forecasts may replace it meanwhile
        try:
            if found is not None:
                self._session.reconfigure(**found.settings)
        except Exception as error:
            self._text.value = failure_html(str(error), traceback.format_exc())
