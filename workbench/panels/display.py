"""A live widget on a page, and the still picture that stands for it where there is no kernel."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import ipywidgets
from IPython.display import display

from workbench.panels.notebook_cells import is_notebook
from workbench.panels.refresh_loop import RefreshLoop
from workbench.session import Snapshot, SnapshotSource

Bundle = dict[str, Any]  # by MIME type
WIDGET_VIEW_TYPE = "application/vnd.jupyter.widget-view+json"


class Display:
    """Shows a session in a widget as long as somebody looks, and keeps a still of it in the notebook.

    The still is a second output below the widget. It is hidden while the widget lives; it is what a reader sees on a page
    without a kernel, or after the kernel was restarted. Whenever the session comes to rest, the still is brought up to
    date, so that a saved notebook shows how things stood.

    Args:
        session: what is shown.
        widget: where it is shown live.
        show: brings the widget up to date.
        still: the bundle for a page without widgets.
        tell: prints it where there is no page.
    """

    def __init__(
        self,
        session: SnapshotSource,
        widget: ipywidgets.DOMWidget,
        show: Callable[[Snapshot], None],
        still: Callable[[Snapshot], Bundle],
        print_text: Callable[[Snapshot], None],
    ) -> None:
        self._session, self._widget, self._show, self._still, self._print_text = (
            session,
            widget,
            show,
            still,
            print_text,
        )
        self._name = f"l2l-{widget.model_id[:12]}"
        widget.add_class(f"{self._name}-live")
        widget._view_count = 0  # asks the page to say how often it shows the widget
        widget.observe(self._on_view_count, "_view_count")
        self._page_reported = self._open = self._closed = False
        self._still_number = -1  # number of the snapshot that the still shows
        self._output: Any = None
        self._drawing = threading.RLock()

    def open(self) -> None:
        """Put widget and still on the page, below the cell that runs; outside of a notebook, print."""
        snapshot = self._session.snapshot()
        page = self._still_bundle(snapshot)
        if not is_notebook():
            self._print_text(snapshot)
        elif self._closed:
            display(page, raw=True)
        else:
            # two outputs: in JupyterLab a widget view hides whatever else its own output holds
            display({WIDGET_VIEW_TYPE: widget_view(self._widget)}, raw=True)
            same = self._output.display_id if self._output is not None else True  # so that one update reaches all
            self._output = display(page, raw=True, display_id=same)
        self._still_number = snapshot.number
        if not self._open and not self._closed:
            self._open = True
            RefreshLoop.for_session(self._session).add(self._on_snapshot)

    def bundle(self) -> Bundle:
        """Return widget and still as one output, for pages that choose between them; once closed, the still alone."""
        page = self._still_bundle(self._session.snapshot())
        return page if self._closed else {WIDGET_VIEW_TYPE: widget_view(self._widget), **page}

    def close(self) -> None:
        """Take the widget away and stop drawing; the still stays, up to date. Closing twice is fine."""
        # before the lock is taken: the pump holds its own lock while it calls `_look`, which waits for this one
        if self._open:
            RefreshLoop.for_session(self._session).remove(self._on_snapshot)
        with self._drawing:
            if self._output is not None:
                self._output.update(self._still_bundle(self._session.snapshot()), raw=True)
                self._output = None
            self._open, self._closed = False, True
            close_all(self._widget)

    def update_now(self) -> None:
        """Show how things stand now, without waiting for the pump: a notebook may be saved right after this cell."""
        self._on_snapshot(self._session.snapshot())

    def _on_snapshot(self, snapshot: Snapshot) -> None:
        """Called by the pump."""
        with self._drawing:
            if not self._open:
                return
            if snapshot.number != self._still_number:
                snapshot = self._session.snapshot()  # the pump's may be older than what `catch_up` has shown
            if snapshot.state != "running" and snapshot.number != self._still_number and self._output is not None:
                self._output.update(self._still_bundle(snapshot), raw=True)
                self._still_number = snapshot.number
            self._page_reported = self._page_reported or bool(self._widget._view_count)
            # as long as the page has said nothing, it may be showing the widget
            if self._widget._view_count or not self._page_reported:
                self._show(snapshot)

    def _on_view_count(self, change: dict[str, Any]) -> None:
        """The page shows the widget again: let it show what has happened meanwhile."""
        if change["new"] and not change["old"]:
            self._on_snapshot(self._session.snapshot())

    def _still_bundle(self, snapshot: Snapshot) -> Bundle:
        return hide_behind_widget(self._name, self._still(snapshot))


def hide_behind_widget(name: str, bundle: Bundle) -> Bundle:
    """Return a still that is hidden while the widget of the class `name`-live is on the page and has its kernel."""
    live, still = f".{name}-live", f".{name}-still"
    lost = ".jupyter-widgets-disconnected"  # from its kernel: JupyterLab leaves it there, with a sign at every part
    rules = (
        # front ends agree on no nearer box around the outputs of a cell
        f"body:has({live}:not({lost})) {still}",
        f"{live}{lost}",
        # what stands in the widget's place where it is gone: nothing, or words about loading it in vain
        f".jp-OutputArea-child:has(+ .jp-OutputArea-child {still})>.jp-OutputArea-output:not(:has(*))",
    )
    style = f"<style>{','.join(rules)}{{display:none}}</style>"
    return {**bundle, "text/html": f'{style}<div class="{still[1:]}">{bundle["text/html"]}</div>'}


def widget_view(widget: ipywidgets.DOMWidget) -> dict[str, Any]:
    """Return what a page needs to show a widget."""
    return {"model_id": widget.model_id, "version_major": 2, "version_minor": 0}


def close_all(widget: ipywidgets.Widget) -> None:
    """Close it with its children, layouts and styles: the registry of widgets keeps each until then."""
    parts = [getattr(widget, name) for name in widget.keys]
    widget.close()
    for part in parts:
        for one in part if isinstance(part, (tuple, list)) else (part,):
            if isinstance(one, ipywidgets.Widget) and one.comm is not None:
                close_all(one)
