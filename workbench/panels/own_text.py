"""A box for a text: its tokens, the model's next words by depth, and the same without some layers."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from html import escape
from typing import Any, NamedTuple

import ipywidgets

from l2l_core import Inside
from workbench.panels.controls import make_box, make_button, make_row
from workbench.panels.folded_table import FoldedTable
from workbench.panels.layer_switches import LayerSwitches
from workbench.pictures import (
    TOP_TOKENS,
    NextWords,
    Picture,
    code_line,
    describe_age,
    next_words_html,
    sample_evenly,
    show_next_words,
)
from workbench.readings import LayerNumbers, full_name, number_layers, short_name
from workbench.session import NO_TOKENIZER, Session, Snapshot, StateVersion

MAX_DEPTHS = 8  # each takes a pass


class TextLook(NamedTuple):
    """A text and the layers to leave out; the next words of the model for it."""

    text: str
    left_out: tuple[str, ...]


class OwnText:
    """Next words after a text, by looks that leave layers out. The model is not edited.

    Looks run on the session's thread between two steps: first at the last layer alone, for the next word, then at several
    depths, for the picture. While one runs, changes of the text and of the layers wait, and the newest of them is next.

    Args:
        session: runs the looks.
        on_change: called after a result, on the session's thread, without locks.

    Attributes:
        widget: all controls and the picture.
    """

    def __init__(self, session: Session, on_change: Callable[[], None]) -> None:
        self._session, self._on_change = session, on_change
        self._lock = threading.Lock()  # of the fields below: the page and the session's thread change them
        self._running: TextLook | None = None
        self._waiting: TextLook | None = None
        self._next: NextWords | None = None  # at the last layer
        self._found: NextWords | None = None  # at several depths
        self._found_at: StateVersion | None = None  # of both
        self._whole: tuple[str, StateVersion, Inside] | None = None  # the last look with all layers, at a text
        self._reason = ""
        self._numbers: LayerNumbers = {}
        self._drawn: tuple[NextWords | None, NextWords | None] = None, None
        self.text = ipywidgets.Text(
            description="your text",
            placeholder="type a text that the model continues",
            continuous_update=True,
            layout={"width": "auto", "flex": "1 1 300px"},
            style={"description_width": "initial"},
        )
        self.switches = LayerSwitches(layout={"flex": "1 1 0", "min_width": "0"})
        tip = "Repeat it with the present weights"
        self._again, self._put_back = (
            make_button("Look again", "refresh", tip),
            make_button("Put all back", "undo", "Run all layers again"),
        )
        self._again.on_click(lambda _: self._request())
        self._put_back.on_click(lambda _: self._put_all_back())
        self.text.observe(lambda _: self._request(), "value")
        self.switches.observe(lambda _: self._request(), "left_out")
        self._code, self._status = ipywidgets.HTML(), ipywidgets.HTML()
        self._words, self._picture = ipywidgets.HTML(), ipywidgets.HTML()
        self._fold = FoldedTable("The next words as a table")
        label = ipywidgets.Label("pull out layer")
        self._layers = make_row(label, self.switches, self._put_back)
        shown = self._words, self._picture, self._layers, self._code, self._status, self._fold.widget
        self.widget = make_box(ipywidgets.VBox, "l2l-own-text", make_row(self.text, self._again), *shown)

    # -- drawing -------------------------------------------------------------------------------------------------------

    def draw(self, snapshot: Snapshot) -> None:
        """Show the newest next words, their age, and the layers that can be left out."""
        self._numbers = number_layers(row.key for row in snapshot.layers)
        rows = [row for row in snapshot.layers if row.stack is not None]
        names = [[short_name(row.key, self._numbers), row.key, full_name(row.key, self._numbers)] for row in rows]
        if self.switches.layers != names:
            self.switches.layers = names
            left = [key for key in self.switches.left_out if key in self._numbers]
            if left != self.switches.left_out:
                self.switches.left_out = left
        has_text = bool(self.text.value)
        for part in (self._layers, self._picture, self._words, self._code, self._fold.widget):
            part.layout.display = "" if has_text else "none"
        self._again.disabled, self._put_back.disabled = not has_text, not self.switches.left_out
        with self._lock:
            found, version = (self._next, self._found), self._found_at
            reason, waits = self._reason, self._running is not None
        self._status.value = _status_html(self._status_text(snapshot, version, reason, waits))
        wanted = self._wanted()
        self._code.value = code_line(self._code_text(wanted, [row.key for row in snapshot.layers])) if has_text else ""
        if found != self._drawn:
            self._draw_words(*found)

    def _draw_words(self, words: NextWords | None, depths: NextWords | None) -> None:
        (drawn_words, drawn_depths), self._drawn = self._drawn, (words, depths)
        decode = self._session.decode
        if words is not None and words is not drawn_words:
            self._words.value = next_words_html(words, decode)
        if depths is not None and depths is not drawn_depths:
            picture = show_next_words(depths, self._numbers, decode)
            self._picture.value = "" if depths.missing_reason else picture.svg
            self._fold.show(lambda: picture.table)

    def _status_text(self, snapshot: Snapshot, version: StateVersion | None, reason: str, waits: bool) -> str:
        if not self.text.value:
            return f"A text cannot be typed here: {NO_TOKENIZER}." if self._session.encode is None else ""
        if waits and snapshot.state == "running":
            return "Waits for the current step to end."
        if waits:
            return "Looking."
        if reason:
            return f"No next words: {reason}"
        return "" if version is None else f"With the weights {describe_age(version, StateVersion.of(snapshot))}."

    def _code_text(self, wanted: TextLook, keys: Sequence[str]) -> str:
        depths, options = _look_call(wanted, keys)
        arguments = [repr(depths), *(f"{name}={value!r}" for name, value in options.items())]
        return f"inside = workbench.look({', '.join(arguments)}).result()"

    def still(self) -> Sequence[Picture]:
        """Return the newest next words as a picture."""
        found = self._found
        if found is None or found.missing_reason:
            return []
        return [show_next_words(found, self._numbers, self._session.decode)]

    # -- looks ---------------------------------------------------------------------------------------------------------

    def _put_all_back(self) -> None:
        self.switches.left_out = []

    def _wanted(self) -> TextLook:
        out = self.switches.left_out
        return TextLook(self.text.value, tuple(key for key in self._numbers if key in out))

    def _request(self) -> None:
        """Start looks with the present text, or put them off until those that run have ended."""
        wanted, starts = self._wanted(), False
        with self._lock:
            if not wanted.text:
                self._waiting, self._next, self._found, self._reason = None, None, None, ""
            elif self._running is not None:
                self._waiting = wanted
            else:
                self._running, starts = wanted, True
        if starts:
            self._start(wanted)
        self._on_change()

    def _start(self, wanted: TextLook) -> None:
        """Queue the look with all layers, unless its result is known, and the one without those left out."""
        try:
            snapshot = self._session.snapshot()
            keys, version = [row.key for row in snapshot.layers], StateVersion.of(snapshot)
            if not {*keys} - {*wanted.left_out}:
                raise ValueError("every layer is pulled out: put one back")
            whole = self._look_at_all(wanted, keys, version)
            (*_, last), options = _look_call(wanted, keys)
            # the queue is ordered: when this look ends, the one with all layers has ended
            following = self._session.look([last], **options) if wanted.left_out else whole
            following.add_done_callback(partial(self._on_next, wanted, whole))
        except Exception as error:
            self._finish(_first_line(error))

    def _look_at_all(self, wanted: TextLook, keys: Sequence[str], version: StateVersion) -> Future[Inside]:
        """Return the look with all layers, whose result may be known."""
        if self._whole is not None and self._whole[:2] == (wanted.text, version):
            known: Future[Inside] = Future()
            known.set_result(self._whole[2])
            return known
        (*_, last), options = _look_call(wanted._replace(left_out=()), keys)
        return self._session.look([last], **options)

    def _on_next(self, wanted: TextLook, whole: Future[Inside], future: Future[Inside]) -> None:
        """Show the next word and queue the look with several depths, unless something newer waits."""
        if self._has_ended(whole) or self._has_ended(future):
            return
        inside, known, snapshot = future.result(), whole.result(), self._session.snapshot()
        version = StateVersion.of(snapshot)
        with self._lock:
            self._whole = wanted.text, version, known
            self._next, self._found_at, self._reason = NextWords(inside, known, wanted.left_out), version, ""
            is_old = self._waiting is not None
        if is_old:
            self._finish("")
        else:
            depths, options = _look_call(wanted, [row.key for row in snapshot.layers])
            try:
                self._session.look(depths, **options).add_done_callback(partial(self._on_depths, wanted, known))
            except Exception as error:
                self._finish(_first_line(error))
        self._on_change()

    def _on_depths(self, wanted: TextLook, known: Inside, future: Future[Inside]) -> None:
        """Show the next words at several depths."""
        if self._has_ended(future):
            return
        with self._lock:
            self._found = NextWords(future.result(), known, wanted.left_out)
        self._finish("")
        self._on_change()

    def _has_ended(self, future: Future[Inside]) -> bool:
        """Return True without a result; called on the session's thread, or by the thread that cancelled the look."""
        if future.cancelled():
            with self._lock:
                self._running = self._waiting = None
            return True  # without a callback: the thread that cancelled it may hold the session's lock
        if (error := future.exception()) is None:
            return False
        self._finish(_first_line(error))
        self._on_change()
        return True

    def _finish(self, reason: str) -> None:
        """End a look, and start the one that waits."""
        with self._lock:
            self._reason, following = reason, self._waiting
            self._running, self._waiting = following, None
        if following is not None:
            self._start(following)


def _look_call(wanted: TextLook, keys: Sequence[str]) -> tuple[list[str], dict[str, Any]]:
    """Return the layers after which the head is applied, and further arguments of `Session.look`."""
    depths = sample_evenly([key for key in keys if key not in wanted.left_out], MAX_DEPTHS)
    options: dict[str, Any] = {"text": wanted.text, "lens": True, "top": TOP_TOKENS}
    return depths, {**options, "leave_out": list(wanted.left_out)} if wanted.left_out else options


def _first_line(error: BaseException) -> str:
    return str(error).partition("\n")[0]


def _status_html(words: str) -> str:
    return f'<div class="l2l-caption" role="status">{escape(words)}</div>'
