"""A live widget on a page, and the still picture that replaces it on pages without a kernel."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from typing import Any

import ipywidgets
from IPython.display import display

from workbench.panels.notebook_cells import is_notebook
from workbench.panels.refresh_loop import RefreshLoop
from workbench.pictures import encodable
from workbench.session import Snapshot, SnapshotSource

Bundle = dict[str, Any]  # by MIME type
WIDGET_VIEW_TYPE = "application/vnd.jupyter.widget-view+json"


class Display:
    """Displays a widget, updates it while it is visible, and keeps a still picture in the notebook.

    The still is a second output below the widget. It is hidden while the widget is connected to its kernel, and visible on
    pages without a kernel or after a restart. It is updated whenever the session pauses or ends a run, so that a saved
    notebook shows the last state.

    Args:
        session: source of the snapshots.
        widget: the live widget.
        show: updates the widget.
        still: returns the MIME bundle for a page without widgets.
        print_text: prints the session outside of notebooks.
    """

    def __init__(
        self,
        session: SnapshotSource,
        widget: ipywidgets.DOMWidget,
        show: Callable[[Snapshot], None],
        still: Callable[[Snapshot], Bundle],
        print_text: Callable[[Snapshot], None],
    ) -> None:
        self._session, self._widget = session, widget
        self._show, self._still, self._print_text = show, still, print_text
        self._name = f"l2l-{widget.model_id[:12]}"
        widget.add_class(f"{self._name}-live")
        widget._view_count = 0  # not None: the page then reports the number of its views of the widget
        widget.observe(self._on_view_count, "_view_count")
        self._page_reported = self._open = self._closed = False
        self._still_number = -1  # number of the snapshot that the still shows
        self._output: Any = None
        self._drawing = threading.RLock()

    def open(self) -> None:
        """Display widget and still below the running cell; outside of a notebook, print the session."""
        snapshot = self._session.snapshot()
        page = self._still_bundle(snapshot)
        if not is_notebook():
            self._print_text(snapshot)
        elif self._closed:
            display(page, raw=True)
        else:
            # two outputs: in JupyterLab a widget view hides the rest of its output
            display({WIDGET_VIEW_TYPE: widget_view(self._widget)}, raw=True)
            same = self._output.display_id if self._output is not None else True  # one update for all copies
            self._output = display(page, raw=True, display_id=same)
        self._still_number = snapshot.number
        if not self._open and not self._closed:
            self._open = True
            RefreshLoop.for_session(self._session).add(self._on_snapshot)

    def bundle(self) -> Bundle:
        """Return widget and still as one output, from which the page selects; after `close`, only the still."""
        page = self._still_bundle(self._session.snapshot())
        return page if self._closed else {WIDGET_VIEW_TYPE: widget_view(self._widget), **page}

    def close(self) -> None:
        """Close the widget, update the still and stop drawing. Does nothing the second time."""
        # without `_drawing`: the refresh loop holds its own lock while it calls `_on_snapshot`, which takes `_drawing`
        if self._open:
            RefreshLoop.for_session(self._session).remove(self._on_snapshot)
        with self._drawing:
            if self._output is not None:
                self._output.update(self._still_bundle(self._session.snapshot()), raw=True)
                self._output = None
            self._open, self._closed = False, True
            close_all(self._widget)

    def update_now(self) -> None:
        """Show the current snapshot at once: a notebook may be saved right after this cell."""
        self._on_snapshot(self._session.snapshot())

    def _on_snapshot(self, snapshot: Snapshot) -> None:
        with self._drawing:
            if not self._open:
                return
            if snapshot.number != self._still_number:
                snapshot = self._session.snapshot()  # `update_now` may have shown a newer one
            if snapshot.state != "running" and snapshot.number != self._still_number and self._output is not None:
                self._output.update(self._still_bundle(snapshot), raw=True)
                self._still_number = snapshot.number
            self._page_reported = self._page_reported or bool(self._widget._view_count)
            # before the page has reported a number, the widget may be visible
            if self._widget._view_count or not self._page_reported:
                self._show(snapshot)

    def _on_view_count(self, change: dict[str, Any]) -> None:
        """Update the widget when it becomes visible again."""
        if change["new"] and not change["old"]:
            self._on_snapshot(self._session.snapshot())

    def _still_bundle(self, snapshot: Snapshot) -> Bundle:
        return hide_behind_widget(self._name, self._still(snapshot))


class StillDisplay:
    """Displays a widget that no session updates, and keeps a still picture in the notebook.

    Args:
        widget: the live widget.
        still: returns the MIME bundle for a page without a kernel.
        name: CSS name of both; default: one of this widget alone.
    """

    def __init__(self, widget: ipywidgets.DOMWidget, still: Callable[[], Bundle], name: str = "") -> None:
        self._widget, self._still = widget, still
        self._name = name or f"l2l-{widget.model_id[:12]}"
        widget.add_class(f"{self._name}-live")
        self._output: Any = None
        self._closed = False

    def open(self) -> None:
        """Display widget and still below the running cell; outside of a notebook, print the still."""
        if not is_notebook():
            print(encodable(self._still()["text/plain"], sys.stdout.encoding or "utf-8"))
            return
        if not self._closed:
            display({WIDGET_VIEW_TYPE: widget_view(self._widget)}, raw=True)
        same = self._output.display_id if self._output is not None else True  # one update for all copies
        self._output = display(self._still_bundle(), raw=True, display_id=same)

    def bundle(self) -> Bundle:
        """Return widget and still as one output; after `close`, only the still."""
        still = self._still_bundle()
        return still if self._closed else {WIDGET_VIEW_TYPE: widget_view(self._widget), **still}

    def update(self) -> None:
        """Replace the still in the notebook by the present one."""
        if self._output is not None and not self._closed:
            self._output.update(self._still_bundle(), raw=True)

    def close(self) -> None:
        """Remove the widget from the page and leave the still. Does nothing the second time."""
        if not self._closed:
            self._closed = True
            close_all(self._widget)

    def _still_bundle(self) -> Bundle:
        return hide_behind_widget(self._name, self._still())


def hide_behind_widget(name: str, bundle: Bundle) -> Bundle:
    """Return a still that is hidden while a widget of the CSS class `name`-live is connected to its kernel."""
    live, still = f".{name}-live", f".{name}-still"
    lost = ".jupyter-widgets-disconnected"  # JupyterLab keeps a widget without its kernel, with an icon at every part
    rules = (
        # `body`: front ends share no closer element around the outputs of a cell
        f"body:has({live}:not({lost})) {still}",
        f"{live}{lost}",
        # the placeholder of a missing widget: nothing, or a loading message
        f".jp-OutputArea-child:has(+ .jp-OutputArea-child {still})>.jp-OutputArea-output:not(:has(*))",
    )
    style = f"<style>{','.join(rules)}{{display:none}}</style>"
    return {**bundle, "text/html": f'{style}<div class="{still[1:]}">{bundle["text/html"]}</div>'}


def widget_view(widget: ipywidgets.DOMWidget) -> dict[str, Any]:
    """Return the MIME data with which a page displays a widget."""
    return {"model_id": widget.model_id, "version_major": 2, "version_minor": 0}


def close_all(widget: ipywidgets.Widget) -> None:
    """Close a widget with its children, layouts and styles, which the registry of widgets keeps until then."""
    parts = [getattr(widget, name) for name in widget.keys]
    widget.close()
    for part in parts:
        for one in part if isinstance(part, (tuple, list)) else (part,):
            if isinstance(one, ipywidgets.Widget) and one.comm is not None:
                close_all(one)
