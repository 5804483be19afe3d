"""A tour of the workbench: each stop highlights a part of the page and explains it."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import NamedTuple

import ipywidgets

from workbench.panels.controls import make_button
from workbench.panels.view_tabs import ViewTabs

HIGHLIGHT_CLASS = "l2l-pointed"


class TourStop(NamedTuple):
    """A part of the page, which is a view or "" for the buttons at the top, and its explanation."""

    view: str
    title: str
    text: str


TOUR_STOPS: Sequence[TourStop] = (
    TourStop(
        "",
        "Train",
        "Run trains for the number of steps beside it; Step trains one. The sliders change the next step, "
        "also during a run. The line below sums up the last step.",
    ),
    TourStop(
        "relay",
        "Watch the relay",
        "On the left all layers, in host memory; on the right the device with its slots; between them the link. "
        "Step through the last step event by event with the player's arrows, beside the line of the algorithm.",
    ),
    TourStop(
        "time",
        "Find exposed copies",
        "Lanes work in parallel. Hatched parts are copies during which compute waits: they make the step longer.",
    ),
    TourStop(
        "memory",
        "Compare memory with the budget",
        "Device memory over the step by category, with the budget. It does not grow with the number of layers "
        "unless the stash is on the device.",
    ),
    TourStop(
        "edits",
        "Change the depth",
        "Insert, drop or move layers between two steps, undo edits, and fork branches. "
        "Each layer keeps its optimizer state.",
    ),
)


class Tour:
    """A button, and during the tour a strip with a text and the buttons Back, Next and Leave.

    Args:
        views: shows the view of each stop.
        top: the widget that the first stop highlights.
        stops: stops of the tour; stops at views that are not in `views` are skipped.
    """

    def __init__(self, views: ViewTabs, top: ipywidgets.DOMWidget, stops: Sequence[TourStop] = TOUR_STOPS) -> None:
        self._views, self._top = views, top
        self._stops = [stop for stop in stops if not stop.view or stop.view in views.names]
        self._position: int | None = None
        tip = f"{len(self._stops)} stops that explain the views; leave at any time"
        self.button = make_button("Tour", "map-signs", tip)
        self._text = ipywidgets.HTML()
        self._back = make_button("Back", "arrow-left", "The previous stop")
        self._next = make_button("Next", "arrow-right", "The next stop")
        self._leave = make_button("Leave", "close", "End the tour")
        self.button.on_click(lambda _: self._show_stop(None if self._position is not None else 0))
        self._back.on_click(lambda _: self._show_stop((self._position or 0) - 1))
        self._next.on_click(lambda _: self._show_stop((self._position or 0) + 1))
        self._leave.on_click(lambda _: self._show_stop(None))
        self.widget = ipywidgets.HBox([self._text, self._back, self._next, self._leave], layout={"display": "none"})
        self.widget.add_class("l2l-tour")

    def _show_stop(self, index: int | None) -> None:
        if index is not None and index >= len(self._stops):
            index = None
        if self._position is not None:
            self._target_widget(self._stops[self._position]).remove_class(HIGHLIGHT_CLASS)
        self._position = index
        self.widget.layout.display = "none" if index is None else ""
        if index is None:
            return
        stop = self._stops[index]
        if stop.view:
            self._views.show_view(stop.view)
        self._target_widget(stop).add_class(HIGHLIGHT_CLASS)
        self._back.disabled = index == 0
        self._next.description = "Next" if index + 1 < len(self._stops) else "Done"
        self._text.value = (
            f'<div role="status"><strong>{index + 1} of {len(self._stops)}: {escape(stop.title)}.</strong> '
            f"{escape(stop.text)}</div>"
        )

    def _target_widget(self, stop: TourStop) -> ipywidgets.DOMWidget:
        return self._views.boxes[stop.view] if stop.view else self._top
