"""What every panel is: a widget over a session that can be shown a snapshot, and a still of it."""

from __future__ import annotations

import sys
import threading
import traceback
from abc import ABC, abstractmethod
from collections.abc import Sequence
from html import escape
from typing import Any, ClassVar

import ipywidgets

from workbench.panels.display import Bundle, Display
from workbench.panels.ended_notice import EndedNotice, disable_controls
from workbench.panels.layer_picker import LayerPicker
from workbench.panels.notebook_cells import register_in_cell
from workbench.panels.style import STYLE
from workbench.pictures import Picture, Table, bundle_of, encodable, with_caption
from workbench.session import Session, Snapshot, SnapshotSource


class Panel(ABC):
    """Shows one view of a session.

    At the end of a cell it shows itself and follows the session. Inside a `Workbench`, that does so for all its panels.

    Args:
        session: or anything that has one, as a `Workbench`; or another source of snapshots, if the panel only shows.

    Raises:
        TypeError: neither.
    """

    source_type: ClassVar[type] = SnapshotSource  # panels that steer want a Session
    has_own_caption: ClassVar[bool] = False  # of which branch and step it is, so that nothing has to be added

    def __init__(self, session: Session | SnapshotSource | Any) -> None:
        found = getattr(session, "session", session)
        if not isinstance(found, self.source_type):
            raise TypeError(f"{type(self).__name__} takes a Session or a Workbench, not a {type(session).__name__}")
        self.session: Any = found
        # reentrant: what `draw` sets calls observers, on the same thread, which may draw again
        self._drawing = threading.RLock()  # the pump draws, and so do callbacks of widgets
        self.widget = self.build()
        self._failure: ipywidgets.HTML | None = None  # made when it is needed: widgets live until they are closed
        self._notice: EndedNotice | None = None  # where the panel stands alone
        self._caption = None if self.has_own_caption else ipywidgets.HTML()
        if self._caption is not None:
            self.widget.children = (*self.widget.children, self._caption)
        self._display: Display | None = None

    @abstractmethod
    def build(self) -> ipywidgets.Box:
        """Make the panel's widget, once."""

    @abstractmethod
    def draw(self, snapshot: Snapshot) -> None:
        """Bring the widget up to date."""

    @abstractmethod
    def still(self, snapshot: Snapshot) -> Sequence[Picture | Table]:
        """Return the same as pictures with their tables, or as tables."""

    def caption(self, snapshot: Snapshot) -> str:
        """Say of which branch and step is what is to be seen."""
        return snapshot.state_words

    def show(self, snapshot: Snapshot) -> None:
        """Bring the widget up to date; an error in a picture is shown in its place.

        Of a session that has ended, all controls are grey.
        """
        with self._drawing:
            try:
                self._clear_failure()
                self.draw(snapshot)
                self._update_caption(snapshot)
            except Exception as error:
                self.show_failure(error)
            if self._notice is not None:
                self._notice.draw(snapshot)
            if snapshot.ended:  # last, since `draw` enables what an open session takes
                disable_controls(self.widget)

    def _show_standalone(self, snapshot: Snapshot) -> None:
        self._picker.draw(snapshot)
        self.show(snapshot)

    def show_failure(self, error: Exception) -> None:
        """Say above all in the panel that drawing it has failed, until it is drawn again."""
        self._clear_failure()
        self._failure = ipywidgets.HTML(failure_html(self._failure_message(error), traceback.format_exc()))
        self.widget.children = (self._failure, *self.widget.children)

    def _clear_failure(self) -> None:
        if self._failure is not None:
            self.widget.children = tuple(child for child in self.widget.children if child is not self._failure)
            self._failure.close()
            self._failure = None

    def still_or_error(self, snapshot: Snapshot) -> Sequence[Picture | Table]:
        """Return the still, or what went wrong with it."""
        try:
            return [with_caption(one, self._still_caption(snapshot)) for one in self.still(snapshot)]
        except Exception as error:
            lines = [(line,) for line in traceback.format_exc().splitlines()]
            return [Table(self._failure_message(error), ("traceback",), lines)]

    def _still_caption(self, snapshot: Snapshot) -> str:
        """The same of a still, which shows no step under way; nothing where it says so itself."""
        return "" if self.has_own_caption else self.caption(snapshot)

    def _update_caption(self, snapshot: Snapshot) -> None:
        if self._caption is not None:
            self._caption.value = f'<div class="l2l-caption">{escape(self.caption(snapshot))}</div>'

    def _failure_message(self, error: Exception) -> str:
        return f"{type(self).__name__} could not be drawn: {error!r}"

    def close(self, wait: bool = True) -> None:
        """Take the panel off the page; the session goes on."""
        self._standalone_display().close()

    def _standalone_display(self) -> Display:
        if self._display is None:  # made when it is shown by itself: a board has one of each for all its panels
            style = ipywidgets.HTML(f"<style>{STYLE}</style>", layout={"display": "none"})
            self._notice = EndedNotice()
            self._picker = LayerPicker(self.session)
            alone = ipywidgets.VBox([style, self._notice.widget, self.widget, self._picker])
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


def failure_html(message: str, details: str, after: str = "") -> str:
    """Write a message, what holds now, and a folded traceback, as HTML."""
    first, _, rest = message.partition("\n")
    more = f"<pre>{escape(rest)}</pre>" if rest else ""
    then = f"<p>{escape(after)}</p>" if after else ""
    folded = f"<details><summary>traceback</summary><pre>{escape(details)}</pre></details>"
    return f'<div class="l2l-failure" role="alert"><strong>{escape(first)}</strong>{more}{then}{folded}</div>'


def code_html(words: str, code: str) -> str:
    """Write a line of code to copy, and what it is for, as HTML."""
    return f'<div class="l2l-caption">{escape(words)}<pre>{escape(code)}</pre></div>'
