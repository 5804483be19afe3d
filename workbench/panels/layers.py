"""The stack, one row per layer."""

from __future__ import annotations

from collections.abc import Sequence

import ipywidgets

from workbench.panels.panel import Panel
from workbench.panels.selection import selection_of
from workbench.panels.touch import touched
from workbench.pictures import Table, draw_layers, layers_table
from workbench.session import LayerRow, Snapshot


class LayersPanel(Panel):
    """Shows sizes, versions and statistics of the layers, as of the last step; a press or an arrow key chooses one."""

    def build(self) -> ipywidgets.DOMWidget:
        self._drawn: tuple[Sequence[LayerRow] | None, str | None] = None, None
        self._selection = selection_of(self.session)
        self._selection.watch(self._redraw)
        self._table = touched(ipywidgets.HTML())
        self._table.add_class("l2l-layers-box")  # scrolls, so that new rows leave it where it is
        return ipywidgets.VBox([self._table])

    def draw(self, now: Snapshot) -> None:
        row = self._selection.among(now.layers)
        key = row.key if row is not None else None
        if now.layers is not self._drawn[0] or key != self._drawn[1]:  # new rows come with a step or an edit
            self._drawn = now.layers, key
            self._table.value = draw_layers(now.layers, changed=now.touched, selected=key or "")

    def still(self, now: Snapshot) -> Sequence[Table]:
        return [layers_table(now.layers)]

    def _redraw(self) -> None:
        self.show(self.session.snapshot())
