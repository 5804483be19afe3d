"""The switch that lets edits be judged on the probe, what the probe is, and what it costs."""

from __future__ import annotations

from html import escape
from typing import Any

import ipywidgets

from workbench.pictures import probe_words
from workbench.session import Session, Snapshot


class ProbeControls:
    """Shows a checkbox and a line of words.

    Args:
        session: whose probe it is.
    """

    def __init__(self, session: Session) -> None:
        self._session = session
        self._switch = ipywidgets.Checkbox(
            value=session.probe_on,
            description="judge edits on the probe",
            tooltip="Measure the loss of the same few batches before and after every edit",
            indent=False,
            layout={"width": "auto"},
        )
        self._switch.observe(self._turn, "value")
        self._words = ipywidgets.HTML()
        self.widget = ipywidgets.HBox([self._switch, self._words])
        self.widget.add_class("l2l-buttons")

    def draw(self, now: Snapshot) -> None:
        """Show how the probe stands; it may have been switched elsewhere."""
        assert now.probe is not None  # of a session
        if self._switch.value != now.probe.is_on:
            self._switch.value = now.probe.is_on
        words = f'<span class="l2l-caption">{escape(probe_words(now.probe))}</span>'
        if self._words.value != words:
            self._words.value = words

    def _turn(self, change: Any) -> None:
        if self._session.probe_on != change["new"]:  # otherwise it is `draw` that has set the switch
            self._session.probe_on = change["new"]
