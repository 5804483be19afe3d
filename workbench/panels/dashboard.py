"""Several panels of one source as one widget."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from typing import Any, Concatenate, ParamSpec, TypeVar

import anywidget
import ipywidgets

from workbench.panels.card_panel import CardPanel
from workbench.panels.controls import make_box
from workbench.panels.display import Bundle, Display
from workbench.panels.ended_notice import EndedNotice
from workbench.panels.folded_table import FoldedTable
from workbench.panels.layer_picker import LayerPicker
from workbench.panels.notebook_cells import register_in_cell
from workbench.panels.panel import Panel
from workbench.panels.style import style_sheet
from workbench.panels.tour import TOUR_STOPS, Tour, TourStop
from workbench.panels.view_tabs import ViewTabs, check_view
from workbench.pictures import bundle_of, glossary_table, print_view, text_view
from workbench.session import Snapshot, SnapshotSource

PanelFactory = Callable[[Any], Panel]
P = ParamSpec("P")
S = TypeVar("S")
T = TypeVar("T")


def forward_to_session(method: Callable[Concatenate[S, P], T]) -> Callable[Concatenate[Any, P], T]:
    """Return a method that calls `method` of `self.session`, with its signature and docstring."""

    @wraps(method)
    def steer(self: Any, *args: P.args, **kwargs: P.kwargs) -> T:
        return method(self.session, *args, **kwargs)

    steer.__qualname__ = steer.__name__  # `wraps` copied the session's
    return steer


def forward_and_refresh(method: Callable[Concatenate[S, P], T]) -> Callable[Concatenate[Any, P], T]:
    """As `forward_to_session`, and update the panels afterwards: a notebook may be saved when its cell ends."""
    steer = forward_to_session(method)

    @wraps(steer)
    def wait(self: Any, *args: P.args, **kwargs: P.kwargs) -> T:
        now = steer(self, *args, **kwargs)
        self._display.update_now()
        return now

    return wait


class Dashboard:
    """Panels that are always visible, and below them one view of several. Running its cell again replaces it.

    Args:
        source: source of the snapshots.
        top: constructors of the panels that are always visible.
        views: constructors of panels by name of their view.
        view: the view shown first, or several to stack; see `ViewTabs`.
        header_widgets: widgets above the panels.
        stops: stops of the tour.

    Raises:
        ValueError: no view has the name `view`.
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
        # first: the registry of ipywidgets keeps created widgets until they are closed
        check_view(view, views)
        if view is None or isinstance(view, str):
            first, names = view or next(iter(views)), tuple(views)
        else:  # stacked: without buttons, the other views could not be shown
            first, names = None, tuple(view)
        self._top = tuple(kind(source) for kind in top)
        made = {name: tuple(kind(source) for kind in views[name]) for name in names}
        self.views = ViewTabs(made, first, lambda: self._show(self._source.snapshot()))
        self.panels = (*self._top, *(panel for panels in made.values() for panel in panels))
        head = ipywidgets.VBox([*header_widgets, *(panel.widget for panel in self._top)])
        tour, terms = Tour(self.views, head, stops), FoldedTable("The words of a relay")
        terms.show(glossary_table)
        terms.widget.add_class("l2l-glossary")
        bar = make_box(ipywidgets.HBox, "l2l-viewbar", self.views.buttons, tour.button, FullScreenButton())
        self._notice, self._picker = EndedNotice(), LayerPicker(source, self._open_card)
        self.widget = ipywidgets.VBox(
            [style_sheet(), self._notice.widget, head, bar, tour.widget, self.views.widget, terms.widget, self._picker]
        )
        self.widget.add_class("l2l-workbench")
        register_in_cell(self)
        self._display = Display(
            source, self.widget, self._show, self._build_still, lambda now: print_view(now, sys.stdout)
        )

    def snapshot(self) -> Snapshot:
        """Return the current snapshot."""
        return self._source.snapshot()

    def close(self, wait: bool = True) -> None:
        """Remove the widgets from the page and leave a still picture in the notebook."""
        self._display.close()

    def __repr__(self) -> str:
        """Return the session as text with bars."""
        return text_view(self.snapshot(), encoding=sys.stdout.encoding or "utf-8")

    def _open_card(self) -> None:
        """Show the view with the card of the selected layer, if there is one."""
        card = self.views.view_with(CardPanel)
        if card is not None:
            self.views.show_view(card)

    def _show(self, snapshot: Snapshot) -> None:
        self._notice.draw(snapshot)
        self._picker.draw(snapshot)
        # hidden panels are drawn only after the end of the session, which disables their controls
        for panel in self.panels if snapshot.ended else (*self._top, *self.views.visible_panels):
            panel.show(snapshot)

    def _build_still(self, snapshot: Snapshot) -> Bundle:
        # of all views: on a page without a kernel the buttons do nothing
        return bundle_of([picture for panel in self.panels for picture in panel.still_or_error(snapshot)])

    def _ipython_display_(self) -> None:
        self._display.open()

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> Bundle:
        return self._display.bundle()


class FullScreenButton(anywidget.AnyWidget):
    """A button that shows the workbench full screen in large type, and leaves again; Escape leaves, too.

    A page can enter full screen only while it handles a click, hence the JavaScript.
    """

    _esm = """
function render({ model, el }) {
  const button = document.createElement("button");
  button.className = "jupyter-button widget-button l2l-present";
  const show = () => {
    const presents = !!document.fullscreenElement && document.fullscreenElement.contains(button);
    button.textContent = presents ? "Presenting: leave" : "Present";
    button.title = presents ? "Leave the full screen, as Escape does" :
      "Full screen, in large type and high contrast; leave with Escape";
  };
  button.addEventListener("click", () => {
    if (document.fullscreenElement) document.exitFullscreen();
    else el.closest(".l2l-workbench").requestFullscreen();
  });
  document.addEventListener("fullscreenchange", show);
  show();
  el.append(button);
  return () => document.removeEventListener("fullscreenchange", show);
}
export default { render };
"""
