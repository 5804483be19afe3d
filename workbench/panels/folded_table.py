"""A table behind a picture, folded away: it is made only while somebody has it open."""

from __future__ import annotations

from collections.abc import Callable

import ipywidgets

from workbench.pictures import Table


class FoldedTable:
    """Opens and closes a table with a button. What was last shown is drawn when it opens, then at every `show`.

    It is a button because an `ipywidgets.Accordion` cannot be reached from the keyboard.
    """

    def __init__(self, title: str) -> None:
        self._title = title
        self._button = ipywidgets.ToggleButton(layout={"width": "auto"}, tooltip="Open or close the table")
        self._content = ipywidgets.HTML(layout={"display": "none"})
        self.widget = ipywidgets.VBox([self._button, self._content])
        self.widget.add_class("l2l-behind")
        self._make: Callable[[], Table] | None = None
        self._button.observe(lambda _: self._toggle(), "value")
        self._toggle()

    def show(self, make: Callable[[], Table]) -> None:
        """Show this table, if the fold is open or when it opens."""
        self._make = make
        self._draw()

    def _toggle(self) -> None:
        is_open = self._button.value
        self._button.description = f"{'▾' if is_open else '▸'} {self._title}"
        self._content.layout.display = "" if is_open else "none"
        self._draw()

    def _draw(self) -> None:
        if self._button.value and self._make is not None:
            self._content.value = self._make().to_html(folded=False)
