"""The stack, one row per layer."""

from __future__ import annotations

from collections.abc import Sequence

import ipywidgets

from workbench.panels.panel import Panel
from workbench.pictures import Table, draw_layers, layers_table
from workbench.session import LayerRow, Snapshot


class LayersPanel(Panel):
    """Sizes, versions and statistics of the layers, as of the last step."""

    def build(self) -> ipywidgets.DOMWidget:
        self._drawn: Sequence[LayerRow] | None = None
        self._table = ipywidgets.HTML()
        self._table.add_class("l2l-layers-box")  # scrolls, so that new rows leave it where it is
        return ipywidgets.VBox([self._table])

    def draw(self, now: Snapshot) -> None:
        if now.layers is not self._drawn:  # new rows come with a step or an edit
            self._drawn = now.layers
            self._table.value = draw_layers(now.layers, changed=now.touched)

    def still(self, now: Snapshot) -> Sequence[Table]:
        return [layers_table(now.layers)]
