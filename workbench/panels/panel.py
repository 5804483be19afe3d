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

from workbench.panels.cells import belongs_to_cell
from workbench.panels.display import Bundle, Display
from workbench.panels.ended import Notice, grey
from workbench.panels.style import STYLE
from workbench.panels.touch import Touch
from workbench.pictures import Picture, Table, belonging, bundle_of, readable
from workbench.session import Session, Snapshot, Source


class Panel(ABC):
    """Shows one view of a session.

    At the end of a cell it shows itself and follows the session. Inside a `Workbench`, that does so for all its panels.

    Args:
        session: or anything that has one, as a `Workbench`; or another source of snapshots, if the panel only shows.

    Raises:
        TypeError: neither.
    """

    looks_at: ClassVar[type] = Source  # panels that steer want a Session
    says_whose: ClassVar[bool] = False  # of which branch and step it is, so that nothing has to be added

    def __init__(self, session: Session | Source | Any) -> None:
        found = getattr(session, "session", session)
        if not isinstance(found, self.looks_at):
            raise TypeError(f"{type(self).__name__} takes a Session or a Workbench, not a {type(session).__name__}")
        self.session: Any = found
        # reentrant: what `draw` sets calls observers, on the same thread, which may draw again
        self._drawing = threading.RLock()  # the pump draws, and so do callbacks of widgets
        self.widget = self.build()
        self._failure: ipywidgets.HTML | None = None  # made when it is needed: widgets live until they are closed
        self._notice: Notice | None = None  # where the panel stands alone
        self._whose = None if self.says_whose else ipywidgets.HTML()
        if self._whose is not None:
            self.widget.children = (*self.widget.children, self._whose)
        self._display: Display | None = None

    @abstractmethod
    def build(self) -> ipywidgets.Box:
        """Make the panel's widget, once."""

    @abstractmethod
    def draw(self, now: Snapshot) -> None:
        """Bring the widget up to date."""

    @abstractmethod
    def still(self, now: Snapshot) -> Sequence[Picture | Table]:
        """Return the same as pictures with their tables, or as tables."""

    def whose(self, now: Snapshot) -> str:
        """Say of which branch and step is what is to be seen."""
        return now.state_words

    def show(self, now: Snapshot) -> None:
        """Bring the widget up to date; an error in a picture is shown in its place.

        Of a session that has ended, all controls are grey.
        """
        with self._drawing:
            try:
                self._recover()
                self.draw(now)
                self._say_whose(now)
            except Exception as error:
                self.fail(error)
            if self._notice is not None:
                self._notice.draw(now)
            if now.ended:  # last, since `draw` enables what an open session takes
                grey(self.widget)

    def _show_alone(self, now: Snapshot) -> None:
        self._touch.draw(now)
        self.show(now)

    def fail(self, error: Exception) -> None:
        """Say above all in the panel that drawing it has failed, until it is drawn again."""
        self._recover()
        self._failure = ipywidgets.HTML(failure_html(self._blame(error), traceback.format_exc()))
        self.widget.children = (self._failure, *self.widget.children)

    def _recover(self) -> None:
        if self._failure is not None:
            self.widget.children = tuple(child for child in self.widget.children if child is not self._failure)
            self._failure.close()
            self._failure = None

    def page(self, now: Snapshot) -> Sequence[Picture | Table]:
        """Return the still, or what went wrong with it."""
        try:
            return [belonging(one, self._whose_still(now)) for one in self.still(now)]
        except Exception as error:
            lines = [(line,) for line in traceback.format_exc().splitlines()]
            return [Table(self._blame(error), ("traceback",), lines)]

    def _whose_still(self, now: Snapshot) -> str:
        """The same of a still, which shows no step under way; nothing where it says so itself."""
        return "" if self.says_whose else self.whose(now)

    def _say_whose(self, now: Snapshot) -> None:
        if self._whose is not None:
            self._whose.value = f'<div class="l2l-caption">{escape(self.whose(now))}</div>'

    def _blame(self, error: Exception) -> str:
        return f"{type(self).__name__} could not be drawn: {error!r}"

    def close(self, wait: bool = True) -> None:
        """Take the panel off the page; the session goes on."""
        self._shown().close()

    def _shown(self) -> Display:
        if self._display is None:  # made when it is shown by itself: a board has one of each for all its panels
            style = ipywidgets.HTML(f"<style>{STYLE}</style>", layout={"display": "none"})
            self._notice = Notice()
            self._touch = Touch(self.session)
            alone = ipywidgets.VBox([style, self._notice.widget, self.widget, self._touch])
            alone.add_class("l2l-alone")
            self._display = Display(self.session, alone, self._show_alone, self._bundle, self._tell)
            belongs_to_cell(self)
        return self._display

    def _bundle(self, now: Snapshot) -> Bundle:
        return bundle_of(self.page(now))

    def _tell(self, now: Snapshot) -> None:
        print(readable(self._bundle(now)["text/plain"], sys.stdout.encoding or "utf-8"))

    def _ipython_display_(self) -> None:
        self._shown().open()

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> Bundle:
        return self._shown().bundle()


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
