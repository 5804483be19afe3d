"""A table behind a picture, folded away: it is made only while somebody has it open."""

from __future__ import annotations

from collections.abc import Callable

import ipywidgets

from workbench.pictures.picture import Table


class Fold:
    """A fold with a title. What was last shown is drawn when the fold opens, and from then on at every `show`."""

    def __init__(self, title: str) -> None:
        self._content = ipywidgets.HTML()
        self.widget = ipywidgets.Accordion([self._content], titles=[title], selected_index=None)
        self.widget.add_class("l2l-behind")
        self._make: Callable[[], Table] | None = None
        self.widget.observe(lambda _: self._draw(), "selected_index")

    def show(self, make: Callable[[], Table]) -> None:
        """Show this table, if the fold is open or when it opens."""
        self._make = make
        self._draw()

    def _draw(self) -> None:
        if self.widget.selected_index is not None and self._make is not None:
            self._content.value = self._make().to_html(folded=False)
