"""A live widget on a page, and the still picture that stands for it where there is no kernel."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import ipywidgets
from IPython.display import display

from workbench.panels.pump import Pump
from workbench.session import Session
from workbench.snapshot import Snapshot

Bundle = dict[str, Any]  # by MIME type
WIDGET = "application/vnd.jupyter.widget-view+json"


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
    """

    def __init__(
        self,
        session: Session,
        widget: ipywidgets.DOMWidget,
        show: Callable[[Snapshot], None],
        still: Callable[[Snapshot], Bundle],
    ) -> None:
        self._session, self._widget, self._show, self._still = session, widget, show, still
        self._name = f"l2l-{widget.model_id[:12]}"
        widget.add_class(f"{self._name}-live")
        widget._view_count = 0  # asks the page to say how often it shows the widget
        self._seen = self._open = False
        self._stilled = -1  # number of the snapshot that the still shows
        self._output: Any = None
        self._drawing = threading.RLock()

    def open(self) -> None:
        """Put widget and still on the page, below the cell that runs."""
        now = self._session.snapshot()
        display({WIDGET: _view_of(self._widget)}, raw=True)
        self._output = display(self._page(now), raw=True, display_id=True)
        self._stilled = now.number
        if not self._open:
            self._open = True
            Pump.of(self._session).add(self._look)

    def bundle(self) -> Bundle:
        """Widget and still as one output, for pages that choose between them."""
        return {WIDGET: _view_of(self._widget), **self._page(self._session.snapshot())}

    def close(self) -> None:
        """Take the widget away and stop drawing; the still stays, up to date. Closing twice is fine."""
        Pump.of(self._session).remove(self._look)
        with self._drawing:
            if self._output is not None:
                self._output.update(self._page(self._session.snapshot()), raw=True)
                self._output = None
            self._open = False
            _close(self._widget)

    def _look(self, now: Snapshot) -> None:
        """Called by the pump."""
        with self._drawing:
            if not self._open:
                return
            if now.state != "running" and now.number != self._stilled and self._output is not None:
                self._output.update(self._page(now), raw=True)
                self._stilled = now.number
            self._seen = self._seen or bool(self._widget._view_count)
            if self._widget._view_count or not self._seen:
                self._show(now)

    def _page(self, now: Snapshot) -> Bundle:
        bundle = self._still(now)
        hide = f".jp-OutputArea:has(.{self._name}-live) .{self._name}-still{{display:none}}"
        gone = f".jp-OutputArea-child:has(+ .jp-OutputArea-child .{self._name}-still)>.jupyter-widgets:not(:has(*))"
        style = f"<style>{hide} {gone}{{display:none}}</style>"
        return {**bundle, "text/html": f'{style}<div class="{self._name}-still">{bundle["text/html"]}</div>'}


def _view_of(widget: ipywidgets.DOMWidget) -> dict[str, Any]:
    return {"model_id": widget.model_id, "version_major": 2, "version_minor": 0}


def _close(widget: ipywidgets.Widget) -> None:
    for child in getattr(widget, "children", ()):
        _close(child)
    widget.close()
