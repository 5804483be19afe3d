"""Table of the layers, one row each."""

from __future__ import annotations

from collections.abc import Sequence

import ipywidgets

from workbench.panels.layer_picker import make_pickable
from workbench.panels.panel import Panel
from workbench.panels.selection import shared_selection
from workbench.pictures import Table, draw_layers, layers_table
from workbench.session import LayerRow, Snapshot


class LayersPanel(Panel):
    """Sizes, versions and statistics of the layers after the last step; a click or an arrow key selects one."""

    def build(self) -> ipywidgets.DOMWidget:
        self._drawn_inputs: tuple[Sequence[LayerRow] | None, str | None] = None, None
        self._selection = shared_selection(self.session)
        self._selection.observe(self._redraw)
        self._table = make_pickable(ipywidgets.HTML())
        self._table.add_class("l2l-layers-box")  # scrolls, so that new rows keep its position
        return ipywidgets.VBox([self._table])

    def draw(self, snapshot: Snapshot) -> None:
        row = self._selection.find_in(snapshot.layers)
        key = row.key if row is not None else None
        if (
            snapshot.layers is not self._drawn_inputs[0] or key != self._drawn_inputs[1]
        ):  # a step or edit makes new rows
            self._drawn_inputs = snapshot.layers, key
            self._table.value = draw_layers(snapshot.layers, changed=snapshot.touched, selected=key or "")

    def still(self, snapshot: Snapshot) -> Sequence[Table]:
        return [layers_table(snapshot.layers)]
