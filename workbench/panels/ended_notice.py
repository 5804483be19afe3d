"""The notice of an ended session, and disabled controls."""

from __future__ import annotations

from collections.abc import Iterator
from html import escape
from typing import Any

import ipywidgets

from workbench.session import Snapshot


class EndedNotice:
    """The line above all panels with the reason why the session ended and the remedy; hidden while it is open."""

    def __init__(self) -> None:
        self.widget = ipywidgets.HTML(layout={"display": "none"})

    def draw(self, snapshot: Snapshot) -> None:
        """Show the notice once the session has ended, even if its last step is still in progress."""
        self.widget.value = (
            f'<div class="l2l-ended" role="status">{escape(snapshot.ended)}</div>' if snapshot.ended else ""
        )
        self.widget.layout.display = "" if snapshot.ended else "none"


def disable_controls(widget: ipywidgets.Widget) -> None:
    """Disable every control in a widget and stop players."""
    for one in _descendants(widget):
        if one.has_trait("playing"):  # a player counts in the page and would continue with disabled buttons
            one.playing = False
        if one.has_trait("disabled"):
            one.disabled = True


def _descendants(widget: Any) -> Iterator[Any]:
    yield widget
    for child in getattr(widget, "children", ()):
        yield from _descendants(child)
