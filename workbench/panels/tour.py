"""A tour of the workbench in five stops: each points at a part of it and says what it is for. It can be left anywhere."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import NamedTuple

import ipywidgets

from workbench.panels.view_tabs import ViewTabs

HIGHLIGHT_CLASS = "l2l-pointed"


class TourStop(NamedTuple):
    """Names a part of the page, which is a view, or "" for the buttons at the top; and what is said of it."""

    view: str
    title: str
    text: str


TOUR_STOPS: Sequence[TourStop] = (
    TourStop(
        "",
        "Train",
        "Run trains for the number of steps beside it; Step trains one. The sliders change the next step, "
        "also while it runs. The line below says how the last step went.",
    ),
    TourStop(
        "relay",
        "Watch the relay",
        "On the left all layers, in host memory; on the right the device with its slots; between them the link. "
        "Press the player's arrows to go through the last step event by event, beside the line of the algorithm.",
    ),
    TourStop(
        "time",
        "See what waits",
        "Lanes work side by side. Hatched parts are copies that are not hidden: they make the step longer.",
    ),
    TourStop(
        "memory",
        "See what fits",
        "Device memory over the step by what fills it, with the budget. It does not grow with the number of layers; "
        "put the stash on the device, and it does.",
    ),
    TourStop(
        "edits",
        "Change the depth",
        "Insert, drop or move layers between two steps, undo, and make branches. "
        "The optimizer's state stays with its layer.",
    ),
)


class Tour:
    """Shows a button, and while the tour lasts a strip with a text and Back, Next and Leave.

    Args:
        views: are turned to.
        top: what the first stop points at.
        stops: of the tour; those of views that are not there are left out.
    """

    def __init__(self, views: ViewTabs, top: ipywidgets.DOMWidget, stops: Sequence[TourStop] = TOUR_STOPS) -> None:
        self._views, self._top = views, top
        # stacked, only those views are there that were asked for
        self._stops = [stop for stop in stops if not stop.view or stop.view in views.names]
        self._position: int | None = None
        self.button = _button(
            "Tour", "map-signs", f"{len(self._stops)} stops that explain the views; end it at any time"
        )
        self._text = ipywidgets.HTML()
        self._back = _button("Back", "arrow-left", "The previous stop")
        self._next = _button("Next", "arrow-right", "The next stop")
        self._leave = _button("Leave", "close", "End the tour")
        self.button.on_click(lambda _: self._go_to(None if self._position is not None else 0))
        self._back.on_click(lambda _: self._go_to((self._position or 0) - 1))
        self._next.on_click(lambda _: self._go_to((self._position or 0) + 1))
        self._leave.on_click(lambda _: self._go_to(None))
        self.widget = ipywidgets.HBox([self._text, self._back, self._next, self._leave], layout={"display": "none"})
        self.widget.add_class("l2l-tour")

    def _go_to(self, at: int | None) -> None:
        if at is not None and at >= len(self._stops):
            at = None
        if self._position is not None:
            self._target_widget(self._stops[self._position]).remove_class(HIGHLIGHT_CLASS)
        self._position = at
        self.widget.layout.display = "none" if at is None else ""
        if at is None:
            return
        stop = self._stops[at]
        if stop.view:
            self._views.show_view(stop.view)
        self._target_widget(stop).add_class(HIGHLIGHT_CLASS)
        self._back.disabled = at == 0
        self._next.description = "Next" if at + 1 < len(self._stops) else "Done"
        self._text.value = (
            f'<div role="status"><strong>{at + 1} of {len(self._stops)}: {escape(stop.title)}.</strong> '
            f"{escape(stop.text)}</div>"
        )

    def _target_widget(self, stop: TourStop) -> ipywidgets.DOMWidget:
        return self._views.box_of(stop.view) if stop.view else self._top


def _button(label: str, icon: str, tip: str) -> ipywidgets.Button:
    return ipywidgets.Button(description=label, icon=icon, tooltip=tip, layout={"width": "auto"})
