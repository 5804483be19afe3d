"""`Panel`, the base class of all views: a widget that draws snapshots, and its still picture."""

from __future__ import annotations

import sys
import threading
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from html import escape
from typing import Any, ClassVar

import ipywidgets

from workbench.panels.controls import make_button
from workbench.panels.display import Bundle, Display
from workbench.panels.ended_notice import EndedNotice, disable_controls
from workbench.panels.layer_picker import LayerPicker
from workbench.panels.notebook_cells import register_in_cell
from workbench.panels.style import style_sheet
from workbench.pictures import Picture, Table, bundle_of, encodable, with_caption
from workbench.session import Session, Snapshot, SnapshotSource


class Panel(ABC):
    """One view of a session.

    As the last expression of a cell, a panel displays itself and follows the session. A `Workbench` displays and updates
    its panels itself. All controls are native, so the keyboard reaches them: Tab, arrow keys, Space and Enter.

    Args:
        session: a session, an object with an attribute `session` such as a `Workbench`, or, for panels without controls
            over the training, another source of snapshots.

    Raises:
        TypeError: `session` is none of these.
    """

    source_type: ClassVar[type] = SnapshotSource  # panels that control training need a Session
    has_own_caption: ClassVar[bool] = False  # the panel itself shows the branch and step that it is drawn from

    def __init__(self, session: Session | SnapshotSource | Any) -> None:
        found = getattr(session, "session", session)
        if not isinstance(found, self.source_type):
            raise TypeError(f"{type(self).__name__} takes a Session or a Workbench, not a {type(session).__name__}")
        self.session: Any = found
        # The refresh loop and callbacks of widgets draw. Reentrant: setting a widget in `draw` can call such a callback.
        self._drawing = threading.RLock()
        self.widget = self.build()
        self._failure: ipywidgets.HTML | None = None  # created on demand: a widget exists until it is closed
        self._notice: EndedNotice | None = None  # of a panel displayed alone
        self._caption = None if self.has_own_caption else ipywidgets.HTML()
        if self._caption is not None:
            self.widget.children = (*self.widget.children, self._caption)
        self._display: Display | None = None

    @abstractmethod
    def build(self) -> ipywidgets.Box:
        """Create the panel's widget; called once."""

    @abstractmethod
    def draw(self, snapshot: Snapshot) -> None:
        """Update the widget."""

    @abstractmethod
    def still(self, snapshot: Snapshot) -> Sequence[Picture | Table]:
        """Return the same view as pictures with their tables, or as tables."""

    def caption(self, snapshot: Snapshot) -> str:
        """Return the branch and step that the panel shows."""
        return snapshot.state_words

    def show(self, snapshot: Snapshot) -> None:
        """Update the widget; an exception is shown in the panel. After the end of the session all controls are disabled."""
        with self._drawing:
            try:
                self._clear_failure()
                self.draw(snapshot)
                self._update_caption(snapshot)
            except Exception as error:
                self.show_failure(error)
            if self._notice is not None:
                self._notice.draw(snapshot)
            if snapshot.ended:  # last: `draw` enables controls
                disable_controls(self.widget)

    def _redraw(self) -> None:
        self.show(self.session.snapshot())

    def _show_standalone(self, snapshot: Snapshot) -> None:
        self._picker.draw(snapshot)
        self.show(snapshot)

    def show_failure(self, error: Exception) -> None:
        """Show at the top of the panel, until it is drawn again, that drawing it failed."""
        self._clear_failure()
        self._failure = ipywidgets.HTML(failure_html(self._failure_message(error), traceback.format_exc()))
        self.widget.children = (self._failure, *self.widget.children)

    def _clear_failure(self) -> None:
        if self._failure is not None:
            self.widget.children = tuple(child for child in self.widget.children if child is not self._failure)
            self._failure.close()
            self._failure = None

    def still_or_error(self, snapshot: Snapshot) -> Sequence[Picture | Table]:
        """Return the still, or a table with the traceback if it cannot be made."""
        try:
            return [with_caption(one, self._still_caption(snapshot)) for one in self.still(snapshot)]
        except Exception as error:
            lines = [(line,) for line in traceback.format_exc().splitlines()]
            return [Table(self._failure_message(error), ("traceback",), lines)]

    def _still_caption(self, snapshot: Snapshot) -> str:
        """Return the caption of a still, which never shows a step in progress; "" if the still has its own."""
        return "" if self.has_own_caption else self.caption(snapshot)

    def _update_caption(self, snapshot: Snapshot) -> None:
        if self._caption is not None:
            self._caption.value = f'<div class="l2l-caption">{escape(self.caption(snapshot))}</div>'

    def _failure_message(self, error: Exception) -> str:
        return f"{type(self).__name__} could not be drawn: {error!r}"

    def close(self, wait: bool = True) -> None:
        """Remove the panel from the page; the session stays open."""
        self._standalone_display().close()

    def _standalone_display(self) -> Display:
        if self._display is None:  # created when the panel is displayed alone: a dashboard has one for all its panels
            self._notice = EndedNotice()
            self._picker = LayerPicker(self.session)
            alone = ipywidgets.VBox([style_sheet(), self._notice.widget, self.widget, self._picker])
            alone.add_class("l2l-alone")
            self._display = Display(self.session, alone, self._show_standalone, self._still_bundle, self._print_still)
            register_in_cell(self)
        return self._display

    def _still_bundle(self, snapshot: Snapshot) -> Bundle:
        return bundle_of(self.still_or_error(snapshot))

    def _print_still(self, snapshot: Snapshot) -> None:
        print(encodable(self._still_bundle(snapshot)["text/plain"], sys.stdout.encoding or "utf-8"))

    def _ipython_display_(self) -> None:
        self._standalone_display().open()

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> Bundle:
        return self._standalone_display().bundle()


class ControlPanel(Panel):
    """A panel with buttons; an exception of a button's action is shown in the panel."""

    _error_html: ipywidgets.HTML  # created by `build`, hidden
    _has_error = False  # an error of a button is shown, which is in no snapshot

    def _button(self, label: str, icon: str, tooltip: str, action: Callable[[], Any]) -> ipywidgets.Button:
        button = make_button(label, icon, tooltip)
        button.on_click(self._guard(action))
        return button

    def _guard(self, action: Callable[[], Any]) -> Callable[..., None]:
        """Return a widget's callback that runs an action and shows its exception."""

        def callback(*_: object) -> None:
            with self._drawing:  # while a frame updates controls, their callbacks are no user input
                try:
                    action()
                    if self._has_error:
                        self._hide_error()
                except Exception as error:
                    self._show_error(str(error), traceback.format_exc())
                    self._has_error = True

        return callback

    def _show_error(self, message: str, details: str, after: str = "") -> None:
        self._error_html.value = failure_html(message, details, after)
        self._error_html.layout.display = ""

    def _hide_error(self) -> None:
        self._has_error, self._error_html.layout.display = False, "none"


def failure_html(message: str, details: str, after: str = "") -> str:
    """Return a message, the state that it leaves, and a collapsed traceback as HTML."""
    first, _, rest = message.partition("\n")
    more = f"<pre>{escape(rest)}</pre>" if rest else ""
    then = f"<p>{escape(after)}</p>" if after else ""
    folded = f"<details><summary>traceback</summary><pre>{escape(details)}</pre></details>"
    return f'<div class="l2l-failure" role="alert"><strong>{escape(first)}</strong>{more}{then}{folded}</div>'
