"""The switch that lets edits be judged on the probe, what the probe is, and what it costs."""

from __future__ import annotations

from html import escape
from typing import Any

import ipywidgets

from workbench.pictures import describe_probe
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
        self._switch.observe(self._set_probe, "value")
        self._text = ipywidgets.HTML()
        self.widget = ipywidgets.HBox([self._switch, self._text])
        self.widget.add_class("l2l-buttons")

    def draw(self, snapshot: Snapshot) -> None:
        """Show how the probe stands; it may have been switched elsewhere."""
        assert snapshot.probe is not None  # of a session
        if self._switch.value != snapshot.probe.is_on:
            self._switch.value = snapshot.probe.is_on
        words = f'<span class="l2l-caption">{escape(describe_probe(snapshot.probe))}</span>'
        if self._text.value != words:
            self._text.value = words

    def _set_probe(self, change: Any) -> None:
        if self._session.probe_on != change["new"]:  # otherwise it is `draw` that has set the switch
            self._session.probe_on = change["new"]
