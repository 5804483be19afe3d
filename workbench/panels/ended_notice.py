"""A session that takes nothing more: its controls are grey, and one line says why and what to do."""

from __future__ import annotations

from collections.abc import Iterator
from html import escape

import ipywidgets

from workbench.session import Snapshot


class EndedNotice:
    """Shows the line, above everything else; there is none as long as the session is open."""

    def __init__(self) -> None:
        self.widget = ipywidgets.HTML(layout={"display": "none"})

    def draw(self, snapshot: Snapshot) -> None:
        """Show the line as soon as the session has ended, also while its last step is still under way."""
        self.widget.value = (
            f'<div class="l2l-ended" role="status">{escape(snapshot.ended)}</div>' if snapshot.ended else ""
        )
        self.widget.layout.display = "" if snapshot.ended else "none"


def disable_controls(widget: ipywidgets.Widget) -> None:
    """Disable every control below a widget, and stop what plays."""
    for one in _descendants(widget):
        if one.has_trait("playing"):  # it counts in the page, and would go on with its buttons grey
            one.playing = False
        if one.has_trait("disabled"):
            one.disabled = True


def _descendants(widget: ipywidgets.Widget) -> Iterator[ipywidgets.Widget]:
    yield widget
    for child in getattr(widget, "children", ()):
        yield from _descendants(child)
