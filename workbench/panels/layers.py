"""The stack, one row per layer."""

from __future__ import annotations

from collections.abc import Sequence

import ipywidgets

from workbench.panels.panel import Panel
from workbench.pictures.layers import layers_picture, draw_layers
from workbench.pictures.picture import Picture
from workbench.snapshot import LayerRow, Snapshot


class LayersPanel(Panel):
    """Sizes, versions and statistics of the layers, as of the last step."""

    def build(self) -> ipywidgets.DOMWidget:
        self._drawn: Sequence[LayerRow] | None = None
        self._table = ipywidgets.HTML()
        return ipywidgets.VBox([self._table])

    def draw(self, now: Snapshot) -> None:
        if now.layers is not self._drawn:  # new rows come with a step or an edit
            self._drawn = now.layers
            self._table.value = draw_layers(now.layers)

    def still(self, now: Snapshot) -> Sequence[Picture]:
        return [layers_picture(now.layers)]
