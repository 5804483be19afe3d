"""Figures of every layer over the steps of a session."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import ipywidgets

from workbench.panels.folded_table import FoldedTable
from workbench.panels.layer_picker import make_pickable
from workbench.panels.panel import Panel
from workbench.pictures import FIGURE_KINDS, Picture, draw_heat, heat_table, show_heat
from workbench.session import Snapshot


class HeatPanel(Panel):
    """Shows gradient norm, update-to-weight ratio or influence of every layer as a heat map, on the axis of the loss."""

    def build(self) -> ipywidgets.DOMWidget:
        self._snapshot: Snapshot | None = None
        self._drawn_inputs: tuple[Any, ...] = ()
        self._picture, self._fold = make_pickable(ipywidgets.HTML()), FoldedTable("Figures of the layers as a table")
        self._choice = ipywidgets.ToggleButtons(
            options=[(kind.label, figure) for figure, kind in FIGURE_KINDS.items()],
            description="layers by",
            style={"description_width": "62px", "button_width": "auto"},
        )
        self._choice.observe(lambda _: self._on_choice(), "value")
        choice = ipywidgets.HBox([self._choice])
        choice.add_class("l2l-settings")
        return ipywidgets.VBox([self._picture, choice, self._fold.widget])

    def draw(self, snapshot: Snapshot) -> None:
        self._snapshot = snapshot
        figure, statistics = self._choice.value, snapshot.statistics
        known = figure, statistics, snapshot.changes  # the statistics are another object after a step or an edit
        if known == self._drawn_inputs:
            return
        self._drawn_inputs = known
        if not snapshot.steps:
            self._picture.value = '<p class="l2l-empty">Figures of the layers appear with the first step.</p>'
            return
        self._picture.value = draw_heat(statistics, figure, snapshot.changes)
        self._fold.show(lambda: heat_table(statistics, figure))

    def still(self, snapshot: Snapshot) -> Sequence[Picture]:
        return [show_heat(snapshot.statistics, self._choice.value, snapshot.changes)] if snapshot.steps else []

    def _on_choice(self) -> None:
        if self._snapshot is not None:  # at once: a session at rest sends no further snapshot
            self.show(self._snapshot)
