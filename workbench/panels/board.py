"""Several panels on one source, as one widget at the end of a cell."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import ipywidgets

from workbench.panels.cells import belongs_to_cell
from workbench.panels.display import Bundle, Display
from workbench.panels.panel import Panel
from workbench.panels.style import STYLE
from workbench.pictures import bundle_of
from workbench.session import Snapshot, Source


class Board:
    """Panels below one another. Made in a cell again, it replaces what the cell had made before.

    Args:
        source: gives the snapshots.
        kinds: of the panels, from the top.
        above: widgets over them.
    """

    def __init__(
        self, source: Source, kinds: Sequence[Callable[[Any], Panel]], above: Sequence[ipywidgets.DOMWidget] = ()
    ) -> None:
        self._source = source
        self.panels = tuple(kind(source) for kind in kinds)
        style = ipywidgets.HTML(f"<style>{STYLE}</style>", layout={"display": "none"})
        self.widget = ipywidgets.VBox([style, *above, *(panel.widget for panel in self.panels)])
        self.widget.add_class("l2l-workbench")
        belongs_to_cell(self)
        self._display = Display(source, self.widget, self._show, self._still)

    def snapshot(self) -> Snapshot:
        """What the panels show."""
        return self._source.snapshot()

    def close(self, wait: bool = True) -> None:
        """Leave a still picture in the notebook."""
        self._display.close()

    def _show(self, now: Snapshot) -> None:
        for panel in self.panels:
            panel.show(now)

    def _still(self, now: Snapshot) -> Bundle:
        return bundle_of([picture for panel in self.panels for picture in panel.page(now)])

    def _ipython_display_(self) -> None:
        self._display.open()

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> Bundle:
        return self._display.bundle()
