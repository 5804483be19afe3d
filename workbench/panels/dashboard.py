"""Several panels on one source, as one widget at the end of a cell."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from typing import Any, Concatenate, ParamSpec, TypeVar

import ipywidgets

from workbench.panels.card_panel import CardPanel
from workbench.panels.display import Bundle, Display
from workbench.panels.ended_notice import EndedNotice
from workbench.panels.folded_table import FoldedTable
from workbench.panels.layer_picker import LayerPicker
from workbench.panels.notebook_cells import register_in_cell
from workbench.panels.panel import Panel
from workbench.panels.present import FullScreenButton
from workbench.panels.style import STYLE
from workbench.panels.tour import TOUR_STOPS, Tour, TourStop
from workbench.panels.view_tabs import ViewTabs, check_view
from workbench.pictures import bundle_of, glossary_table, print_view, text_view
from workbench.session import Snapshot, SnapshotSource

PanelFactory = Callable[[Any], Panel]
P = ParamSpec("P")
S = TypeVar("S")
T = TypeVar("T")


def forward_to_session(method: Callable[Concatenate[S, P], T]) -> Callable[Concatenate[Any, P], T]:
    """Make a verb of a session one of the board that has it, with its signature and docstring, which notebooks complete."""

    @wraps(method)
    def steer(self: Any, *args: P.args, **kwargs: P.kwargs) -> T:
        return method(self.session, *args, **kwargs)

    steer.__qualname__ = steer.__name__  # `wraps` took that of the session
    return steer


def forward_and_refresh(method: Callable[Concatenate[S, P], T]) -> Callable[Concatenate[Any, P], T]:
    """Do the same with a verb that waits, and let the panels catch up: the notebook is saved as soon as its cell ends."""
    steer = forward_to_session(method)

    @wraps(steer)
    def wait(self: Any, *args: P.args, **kwargs: P.kwargs) -> T:
        now = steer(self, *args, **kwargs)
        self._display.update_now()
        return now

    return wait


class Dashboard:
    """Shows some panels always, and below them one view of several. Made in a cell again, it replaces what the cell had made.

    Args:
        source: gives the snapshots.
        top: kinds of the panels that are always seen.
        views: kinds of panels by the name of their view.
        view: the view that is seen first, or several to be stacked; see `Views`.
        above: widgets over all.
        stops: of the tour.

    Raises:
        ValueError: there is no such view.
    """

    def __init__(
        self,
        source: SnapshotSource,
        top: Sequence[PanelFactory],
        views: Mapping[str, Sequence[PanelFactory]],
        view: str | Sequence[str] | None = None,
        header_widgets: Sequence[ipywidgets.DOMWidget] = (),
        stops: Sequence[TourStop] = TOUR_STOPS,
    ) -> None:
        self._source = source
        # first: a widget that was made stays in the registry of ipywidgets until somebody closes it
        check_view(view, views)
        stacked = [] if view is None or isinstance(view, str) else list(view)
        self._top = tuple(kind(source) for kind in top)
        # of stacked views only those that were asked for are made: there are no buttons to turn to others
        made = {name: tuple(kind(source) for kind in views[name]) for name in stacked or views}
        first = None if stacked else view or next(iter(views))
        self.views = ViewTabs(made, first, lambda: self._show(self._source.snapshot()))
        self.panels = (*self._top, *self.views.all_panels)
        head = ipywidgets.VBox([*header_widgets, *(panel.widget for panel in self._top)])
        tour, words = Tour(self.views, head, stops), FoldedTable("The words of a relay")
        words.show(glossary_table)
        words.widget.add_class("l2l-glossary")
        bar = ipywidgets.HBox([self.views.buttons, tour.button, FullScreenButton()])
        bar.add_class("l2l-viewbar")
        # its rules are in force although the widget that holds them is not displayed
        style = ipywidgets.HTML(f"<style>{STYLE}</style>", layout={"display": "none"})
        self._notice, self._picker = EndedNotice(), LayerPicker(source, self._open_card)
        self.widget = ipywidgets.VBox(
            [style, self._notice.widget, head, bar, tour.widget, self.views.widget, words.widget, self._picker]
        )
        self.widget.add_class("l2l-workbench")
        register_in_cell(self)
        self._display = Display(
            source, self.widget, self._show, self._build_still, lambda now: print_view(now, sys.stdout)
        )

    def snapshot(self) -> Snapshot:
        """Return what the panels show."""
        return self._source.snapshot()

    def close(self, wait: bool = True) -> None:
        """Take the widgets off the page, and leave a still picture in the notebook."""
        self._display.close()

    def __repr__(self) -> str:
        """What ``print`` shows, and a Python prompt: the session in words and bars."""
        return text_view(self.snapshot(), encoding=sys.stdout.encoding or "utf-8")

    def _open_card(self) -> None:
        """Turn to the view that has the card of the chosen layer, where there is one."""
        card = self.views.view_with(CardPanel)
        if card is not None:
            self.views.show_view(card)

    def _show(self, snapshot: Snapshot) -> None:
        self._notice.draw(snapshot)
        self._picker.draw(snapshot)
        # what nobody sees is not drawn, but for the last time: its controls turn grey too
        for panel in self.panels if snapshot.ended else (*self._top, *self.views.visible_panels):
            panel.show(snapshot)

    def _build_still(self, snapshot: Snapshot) -> Bundle:
        # of all views: a page without a kernel cannot turn to another one
        return bundle_of([picture for panel in self.panels for picture in panel.still_or_error(snapshot)])

    def _ipython_display_(self) -> None:
        self._display.open()

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> Bundle:
        return self._display.bundle()
