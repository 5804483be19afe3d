"""The last step for zooming and hovering: plotly figures, made when they are asked for."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Sequence

import ipywidgets
import plotly.graph_objects as go

from l2l_core import Trace
from workbench.panels.panel import Panel, failure_html
from workbench.pictures import Picture, loss_figure, memory_figure, timeline_figure
from workbench.session import Snapshot, StepRow

FigureFactory = Callable[[Snapshot], go.Figure]

FIGURES: dict[str, FigureFactory] = {
    "timeline": lambda now: timeline_figure(_last_trace(now)),
    "memory of the device": lambda now: memory_figure(_last_trace(now), "device", now.budget_bytes, now.in_core_bytes),
    "memory of the host": lambda now: memory_figure(_last_trace(now), "host"),
    "loss": lambda now: loss_figure(_losses_by_name(now), now.changes),
}
_NO_FIGURE = "nothing"


class ExplorePanel(Panel):
    """Shows one plotly figure of the last finished step.

    It does not follow the session: a figure that one zooms into must hold still. Newest step brings it up to date.
    """

    has_own_caption = True  # in the title, since a figure holds still

    def build(self) -> ipywidgets.DOMWidget:
        self._choice = ipywidgets.Dropdown(
            options=[_NO_FIGURE, *FIGURES], description="explore", style={"description_width": "52px"}
        )
        self._choice.observe(lambda _: self._show_figure(), "value")
        self._refresh_button = ipywidgets.Button(
            description="Newest step", icon="refresh", tooltip="Show the last finished step", layout={"width": "auto"}
        )
        self._refresh_button.on_click(lambda _: self._show_figure())
        self._figure_box = ipywidgets.VBox()
        return ipywidgets.VBox([ipywidgets.HBox([self._choice, self._refresh_button]), self._figure_box])

    def draw(self, snapshot: Snapshot) -> None:
        """Do nothing: the figure holds still."""

    def still(self, snapshot: Snapshot) -> Sequence[Picture]:
        return ()

    def _show_figure(self) -> None:
        with self._drawing:
            old, self._figure_box.children = self._figure_box.children, self._make_figure()
            # the registry of ipywidgets keeps a figure with all its data until it is closed
            for widget in old:
                widget.close()

    def _make_figure(self) -> tuple[ipywidgets.DOMWidget, ...]:
        make = FIGURES.get(self._choice.value)
        snapshot = self.session.snapshot()
        if make is None:
            return ()
        if snapshot.last is None:
            return (ipywidgets.HTML('<p class="l2l-empty">There is something to explore after the first step.</p>'),)
        try:
            figure = make(snapshot)
            name = self._choice.value
            figure.update_layout(title_text=name if name == "loss" else f"{name}, {snapshot.shown_words}", width=960)
            return (go.FigureWidget(figure),)
        except Exception as error:
            message = f"The figure could not be made: {error!r}"
            return (ipywidgets.HTML(failure_html(message, traceback.format_exc())),)


def _losses_by_name(snapshot: Snapshot) -> dict[str, Sequence[StepRow]]:
    """Losses by name: of the model, or by branch where there are several."""
    return (
        {snapshot.branch: snapshot.steps, **snapshot.elsewhere}
        if snapshot.elsewhere
        else {snapshot.model: snapshot.steps}
    )


def _last_trace(snapshot: Snapshot) -> Trace:
    assert snapshot.last is not None
    return snapshot.last
