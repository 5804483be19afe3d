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

Make = Callable[[Snapshot], go.Figure]

FIGURES: dict[str, Make] = {
    "timeline": lambda now: timeline_figure(_last(now)),
    "memory of the device": lambda now: memory_figure(_last(now), "device", now.budget_bytes, now.in_core_bytes),
    "memory of the host": lambda now: memory_figure(_last(now), "host"),
    "loss": lambda now: loss_figure(_runs(now), now.changes),
}
_NOTHING = "nothing"


class ExplorePanel(Panel):
    """Shows one plotly figure of the last finished step.

    It does not follow the session: a figure that one zooms into must hold still. Newest step brings it up to date.
    """

    says_whose = True  # in the title, since a figure holds still

    def build(self) -> ipywidgets.DOMWidget:
        self._choice = ipywidgets.Dropdown(
            options=[_NOTHING, *FIGURES], description="explore", style={"description_width": "52px"}
        )
        self._choice.observe(lambda _: self._open(), "value")
        self._again = ipywidgets.Button(
            description="Newest step", icon="refresh", tooltip="Show the last finished step", layout={"width": "auto"}
        )
        self._again.on_click(lambda _: self._open())
        self._place = ipywidgets.VBox()
        return ipywidgets.VBox([ipywidgets.HBox([self._choice, self._again]), self._place])

    def draw(self, now: Snapshot) -> None:
        """Do nothing: the figure holds still."""

    def still(self, now: Snapshot) -> Sequence[Picture]:
        return ()

    def _open(self) -> None:
        with self._drawing:
            old, self._place.children = self._place.children, self._make()
            # the registry of ipywidgets keeps a figure with all its data until it is closed
            for widget in old:
                widget.close()

    def _make(self) -> tuple[ipywidgets.DOMWidget, ...]:
        make = FIGURES.get(self._choice.value)
        now = self.session.snapshot()
        if make is None:
            return ()
        if now.last is None:
            return (ipywidgets.HTML('<p class="l2l-empty">There is something to explore after the first step.</p>'),)
        try:
            figure = make(now)
            name = self._choice.value
            figure.update_layout(title_text=name if name == "loss" else f"{name}, {now.shown_words}", width=960)
            return (go.FigureWidget(figure),)
        except Exception as error:
            message = f"The figure could not be made: {error!r}"
            return (ipywidgets.HTML(failure_html(message, traceback.format_exc())),)


def _runs(now: Snapshot) -> dict[str, Sequence[StepRow]]:
    """Losses by name: of the model, or by branch where there are several."""
    return {now.branch: now.steps, **now.elsewhere} if now.elsewhere else {now.model: now.steps}


def _last(now: Snapshot) -> Trace:
    assert now.last is not None
    return now.last
