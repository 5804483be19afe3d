"""Plotly figures of the last step, made when they are selected."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Sequence
from typing import Any

import ipywidgets
import plotly.graph_objects as go

from l2l_core import Trace
from workbench.panels.controls import make_button
from workbench.panels.panel import Panel, failure_html
from workbench.pictures import Picture, loss_figure, memory_figure, timeline_figure
from workbench.session import Snapshot, StepRow

FigureFactory = Callable[[Snapshot, Trace], go.Figure]

FIGURES: dict[str, FigureFactory] = {
    "timeline": lambda snapshot, last: timeline_figure(last),
    "memory of the device": lambda snapshot, last: memory_figure(
        last, "device", snapshot.budget_bytes, snapshot.in_core_bytes
    ),
    "memory of the host": lambda snapshot, last: memory_figure(last, "host"),
    "loss": lambda snapshot, last: loss_figure(_losses_by_name(snapshot), snapshot.changes),
}
_NO_FIGURE = "nothing"


class ExplorePanel(Panel):
    """One plotly figure of the last completed step.

    It does not follow the session, so that zooming is not interrupted; the button Newest step updates it.
    """

    has_own_caption = True  # in the title of the figure

    def build(self) -> ipywidgets.DOMWidget:
        self._choice: Any = ipywidgets.Dropdown(
            options=[_NO_FIGURE, *FIGURES], description="zoomable copy of", style={"description_width": "initial"}
        )
        self._choice.observe(lambda _: self._show_figure(), "value")
        self._refresh_button = make_button("Newest step", "refresh", "Show the last completed step")
        self._refresh_button.on_click(lambda _: self._show_figure())
        self._figure_box = ipywidgets.VBox()
        return ipywidgets.VBox([ipywidgets.HBox([self._choice, self._refresh_button]), self._figure_box])

    def draw(self, snapshot: Snapshot) -> None:
        """Do nothing: the figure does not follow the session."""

    def still(self, snapshot: Snapshot) -> Sequence[Picture]:
        return ()

    def _show_figure(self) -> None:
        with self._drawing:
            old, self._figure_box.children = self._figure_box.children, self._make_figure()
            for widget in old:  # until then, the registry of ipywidgets keeps all the data of the figure
                widget.close()

    def _make_figure(self) -> tuple[ipywidgets.DOMWidget, ...]:
        make = FIGURES.get(self._choice.value)
        snapshot = self.session.snapshot()
        if make is None:
            return ()
        if snapshot.last is None:
            return (ipywidgets.HTML('<p class="l2l-empty">Figures are available after the first step.</p>'),)
        name = self._choice.value
        try:
            figure = make(snapshot, snapshot.last)
            figure.update_layout(title_text=name if name == "loss" else f"{name}, {snapshot.shown_words}", width=960)
            return (go.FigureWidget(figure),)
        except Exception as error:
            message = f"The figure {name!r} could not be made: {error!r}"
            return (ipywidgets.HTML(failure_html(message, traceback.format_exc())),)


def _losses_by_name(snapshot: Snapshot) -> dict[str, Sequence[StepRow]]:
    """Return the steps by branch, or by name of the model if there is a single branch."""
    name = snapshot.branch if snapshot.elsewhere else snapshot.model
    return {name: snapshot.steps, **snapshot.elsewhere}
