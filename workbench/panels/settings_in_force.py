"""Line of the header with every setting that differs from its default, and a button that resets those changed since."""

from __future__ import annotations

import ipywidgets

from workbench.panels.controls import make_button, make_row
from workbench.pictures import in_force_html
from workbench.session import Snapshot

_TIP = "Restore the settings that were in force when this workbench was opened"


class SettingsInForce:
    """Settings in force for the next step.

    Attributes:
        widget: the line.
        reset: button, visible if a setting was changed since the session began.
    """

    def __init__(self) -> None:
        self._text = ipywidgets.HTML()
        self.reset = make_button("Reset settings", "undo", _TIP)
        self.widget = make_row(self._text, self.reset)

    def show(self, snapshot: Snapshot) -> None:
        """Show the settings of a snapshot."""
        self._text.value = in_force_html(snapshot)
        self.reset.layout.display = "" if snapshot.changed_from else "none"
