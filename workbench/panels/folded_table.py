"""A collapsible table behind a picture, drawn only while it is open."""

from __future__ import annotations

from collections.abc import Callable

import ipywidgets

from workbench.pictures import Table


class FoldedTable:
    """A button that opens and closes a table.

    A button, because an `ipywidgets.Accordion` cannot be reached with the keyboard.
    """

    def __init__(self, title: str) -> None:
        self._button = ipywidgets.ToggleButton(
            description=title, layout={"width": "auto"}, tooltip="Open or close the table"
        )
        self._content = ipywidgets.HTML(layout={"display": "none"})
        self.widget = ipywidgets.VBox([self._button, self._content])
        self.widget.add_class("l2l-behind")
        self._make: Callable[[], Table] | None = None
        self._button.observe(lambda _: self._toggle(), "value")
        self._toggle()

    def show(self, make: Callable[[], Table]) -> None:
        """Draw the table that `make` returns: at once if the fold is open, otherwise when it opens."""
        self._make = make
        self._draw()

    def _toggle(self) -> None:
        is_open = self._button.value
        self._button.icon = "caret-down" if is_open else "caret-right"
        self._content.layout.display = "" if is_open else "none"
        self._draw()

    def _draw(self) -> None:
        if self._button.value and self._make is not None:
            self._content.value = self._make().to_html(folded=False)
