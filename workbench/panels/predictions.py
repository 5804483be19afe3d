"""A button that shows what the model predicts with a layer and without it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from html import escape
from typing import Any, NamedTuple

import ipywidgets

from l2l_core import Inside
from workbench.pictures import Examples, Table, code_line, examples_html, examples_table, moment_words
from workbench.session import LayerRow, Moment, Session, Snapshot


class Compared(NamedTuple):
    """Holds predictions with and without a layer, or why there are none, and when they were made."""

    examples: Examples | None
    why_not: str
    moment: Moment


class Predictions:
    """Looks twice at the first row of the probe, one time with a layer left out; only when somebody asks.

    Args:
        session: looks.
        told: called when there is something new to show, from the session's thread, without any lock.

    Attributes:
        button: whoever shows it says what it does.
        line, picture: the line of code that does the same, and what was found.
        found: the last ones of every layer, by key; never changed in place.
    """

    def __init__(self, session: Session, told: Callable[[], None]) -> None:
        self._session, self._told = session, told
        self._waiting: frozenset[str] = frozenset()
        self.found: Mapping[str, Compared] = {}
        tip = "What the model says at each position of a row of the probe; nothing is changed"
        self.button = ipywidgets.Button(
            description="Predictions without it", icon="list", tooltip=tip, layout={"width": "auto"}
        )
        self.line, self.picture = ipywidgets.HTML(), ipywidgets.HTML()

    def ask(self, key: str) -> None:
        """Look when the turn comes; `key` is the layer's.

        Raises:
            RuntimeError: the session is closed.
        """
        (last, of_whole), (last_left, without) = _options(key, _keys(self._session.snapshot()))
        whole = self._session.look([last], **of_whole)
        self._waiting |= {key}
        # the queue keeps its order: when this look is over, so is the first one, and `_take` need not wait for it
        self._session.look([last_left], **without).add_done_callback(partial(self._take, key, whole))

    def draw(self, row: LayerRow, now: Snapshot) -> None:
        """Show the predictions of a layer."""
        waits, found = row.key in self._waiting, self.found.get(row.key)
        self.button.disabled = waits or row.stack is None
        said = "is being looked at, or waits for its turn" if waits else ""
        if found is not None and not waits:
            said = " ".join(filter(None, (found.why_not, f"({moment_words(found.moment, Moment.of(now))})")))
        _, (last, options) = _options(row.key, _keys(now))
        words = ", ".join([repr([last]), *(f"{name}={value!r}" for name, value in options.items())])
        code = code_line(f"workbench.look({words})")
        _set(self.line, f'{code} <span class="l2l-caption" role="status">{escape(said)}</span>')
        examples = None if found is None else found.examples
        _set(self.picture, "" if examples is None else examples_html(examples, self._session.decode))

    def still(self, key: str) -> Sequence[Table]:
        """Return the predictions of a layer as a table, if there are any."""
        found = self.found.get(key)
        return [] if found is None or found.examples is None else [examples_table(found.examples, self._session.decode)]

    def _take(self, key: str, whole: Future[Inside], without: Future[Inside]) -> None:
        self._waiting -= {key}
        if whole.cancelled() or without.cancelled():
            return  # whoever has cancelled it may hold the session's lock
        moment = Moment.of(self._session.snapshot())
        if error := whole.exception() or without.exception():
            compared = Compared(None, str(error).partition("\n")[0], moment)
        else:
            compared = Compared(Examples(whole.result(), without.result()), "", moment)
        self.found = {**self.found, key: compared}
        self._told()


Look = tuple[str, dict[str, Any]]  # a layer, and what `Session.look` is told beside it


def _options(key: str, keys: Sequence[str]) -> tuple[Look, Look]:
    """What is looked at with a layer and without it: each time the last layer that runs."""
    asked: dict[str, Any] = {"lens": True, "top": 1}
    last = next((other for other in reversed(keys) if other != key), key)  # the only layer is refused, with the reason
    return (keys[-1], asked), (last, {**asked, "leave_out": [key]})


def _keys(now: Snapshot) -> Sequence[str]:
    return [row.key for row in now.layers]


def _set(html: ipywidgets.HTML, value: str) -> None:
    if html.value != value:  # what somebody has selected in it stays selected
        html.value = value
