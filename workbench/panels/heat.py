"""Figures of every layer over the steps of a session."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import ipywidgets

from workbench.panels.fold import Fold
from workbench.panels.panel import Panel
from workbench.panels.touch import touched
from workbench.pictures import KINDS, Picture, draw_heat, heat_table, show_heat
from workbench.session import Snapshot


class HeatPanel(Panel):
    """Shows gradient norm, update-to-weight ratio or influence of every layer as a heat map, on the axis of the loss."""

    def build(self) -> ipywidgets.DOMWidget:
        self._now: Snapshot | None = None
        self._drawn: tuple[Any, ...] = ()
        self._picture, self._fold = touched(ipywidgets.HTML()), Fold("Figures of the layers as a table")
        self._choice = ipywidgets.ToggleButtons(
            options=[(kind.words, figure) for figure, kind in KINDS.items()],
            description="layers by",
            style={"description_width": "62px", "button_width": "auto"},
        )
        self._choice.observe(lambda _: self._choose(), "value")
        choice = ipywidgets.HBox([self._choice])
        choice.add_class("l2l-settings")
        return ipywidgets.VBox([self._picture, choice, self._fold.widget])

    def draw(self, now: Snapshot) -> None:
        self._now = now
        figure, statistics = self._choice.value, now.statistics
        known = figure, statistics, now.changes  # the statistics are another object after a step or an edit
        if known == self._drawn:
            return
        self._drawn = known
        if not now.steps:
            self._picture.value = '<p class="l2l-empty">Figures of the layers appear with the first step.</p>'
            return
        self._picture.value = draw_heat(statistics, figure, now.changes)
        self._fold.show(lambda: heat_table(statistics, figure))

    def still(self, now: Snapshot) -> Sequence[Picture]:
        return [show_heat(now.statistics, self._choice.value, now.changes)] if now.steps else []

    def _choose(self) -> None:
        if self._now is not None:  # at once: a session at rest sends no further snapshot
            self.show(self._now)
