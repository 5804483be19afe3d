"""Heat map of one figure per layer over the steps of a session."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import ipywidgets

from workbench.panels.controls import make_box
from workbench.panels.folded_table import FoldedTable
from workbench.panels.layer_picker import make_pickable
from workbench.panels.panel import Panel
from workbench.pictures import FIGURE_KINDS, Picture, draw_heat, heat_table, show_heat
from workbench.session import Snapshot


class HeatPanel(Panel):
    """Gradient norm, update-to-weight ratio or influence of every layer, on the axis of the loss."""

    def build(self) -> ipywidgets.DOMWidget:
        self._drawn_inputs: tuple[Any, ...] = ()
        self._picture, self._fold = make_pickable(ipywidgets.HTML()), FoldedTable("Figures of the layers as a table")
        self._choice: Any = ipywidgets.ToggleButtons(
            options=[(kind.label, figure) for figure, kind in FIGURE_KINDS.items()],
            description="layers by",
            style={"description_width": "62px", "button_width": "auto"},
        )
        self._choice.observe(lambda _: self._redraw(), "value")
        choice = make_box(ipywidgets.HBox, "l2l-settings", self._choice)
        return ipywidgets.VBox([self._picture, choice, self._fold.widget])

    def draw(self, snapshot: Snapshot) -> None:
        figure, statistics = self._choice.value, snapshot.statistics
        inputs = figure, statistics, snapshot.changes  # a step or an edit replaces the statistics
        if inputs == self._drawn_inputs:
            return
        self._drawn_inputs = inputs
        if not snapshot.steps:
            self._picture.value = '<p class="l2l-empty">Figures of the layers appear with the first step.</p>'
            return
        self._picture.value = draw_heat(statistics, figure, snapshot.changes)
        self._fold.show(lambda: heat_table(statistics, figure))

    def still(self, snapshot: Snapshot) -> Sequence[Picture]:
        return [show_heat(snapshot.statistics, self._choice.value, snapshot.changes)] if snapshot.steps else []
