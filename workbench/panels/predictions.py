"""A button that shows what the model predicts with a layer and without it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from html import escape
from typing import Any, NamedTuple

import ipywidgets

from l2l_core import Inside
from workbench.pictures import Examples, Table, code_line, describe_age, examples_html, examples_table
from workbench.session import LayerRow, Session, Snapshot, StateVersion


class PredictionPair(NamedTuple):
    """Holds predictions with and without a layer, or why there are none, and when they were made."""

    examples: Examples | None
    reason: str
    version: StateVersion


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

    def __init__(self, session: Session, on_change: Callable[[], None]) -> None:
        self._session, self._on_change = session, on_change
        self._waiting: frozenset[str] = frozenset()
        self.found: Mapping[str, PredictionPair] = {}
        tip = "What the model says at each position of a row of the probe; nothing is changed"
        self.button = ipywidgets.Button(
            description="Predictions without it", icon="list", tooltip=tip, layout={"width": "auto"}
        )
        self.line, self.picture = ipywidgets.HTML(), ipywidgets.HTML()

    def request(self, key: str) -> None:
        """Look when the turn comes; `key` is the layer's.

        Raises:
            RuntimeError: the session is closed.
        """
        (last, of_whole), (last_left, without) = _look_calls(key, _keys(self._session.snapshot()))
        whole = self._session.look([last], **of_whole)
        self._waiting |= {key}
        # the queue keeps its order: when this look is over, so is the first one, and `_take` need not wait for it
        self._session.look([last_left], **without).add_done_callback(partial(self._on_result, key, whole))

    def draw(self, row: LayerRow, snapshot: Snapshot) -> None:
        """Show the predictions of a layer."""
        waits, found = row.key in self._waiting, self.found.get(row.key)
        self.button.disabled = waits or row.stack is None
        said = "is being looked at, or waits for its turn" if waits else ""
        if found is not None and not waits:
            said = " ".join(filter(None, (found.reason, f"({describe_age(found.version, StateVersion.of(snapshot))})")))
        _, (last, options) = _look_calls(row.key, _keys(snapshot))
        words = ", ".join([repr([last]), *(f"{name}={value!r}" for name, value in options.items())])
        code = code_line(f"workbench.look({words})")
        _set_if_changed(self.line, f'{code} <span class="l2l-caption" role="status">{escape(said)}</span>')
        examples = None if found is None else found.examples
        _set_if_changed(self.picture, "" if examples is None else examples_html(examples, self._session.decode))

    def still(self, key: str) -> Sequence[Table]:
        """Return the predictions of a layer as a table, if there are any."""
        found = self.found.get(key)
        return [] if found is None or found.examples is None else [examples_table(found.examples, self._session.decode)]

    def _on_result(self, key: str, with_layer: Future[Inside], without: Future[Inside]) -> None:
        self._waiting -= {key}
        if with_layer.cancelled() or without.cancelled():
            return  # whoever has cancelled it may hold the session's lock
        moment = StateVersion.of(self._session.snapshot())
        if error := with_layer.exception() or without.exception():
            compared = PredictionPair(None, str(error).partition("\n")[0], moment)
        else:
            compared = PredictionPair(Examples(with_layer.result(), without.result()), "", moment)
        self.found = {**self.found, key: compared}
        self._on_change()


LookCall = tuple[str, dict[str, Any]]  # a layer, and what `Session.look` is told beside it


def _look_calls(key: str, keys: Sequence[str]) -> tuple[LookCall, LookCall]:
    """What is looked at with a layer and without it: each time the last layer that runs."""
    asked: dict[str, Any] = {"lens": True, "top": 1}
    last = next((other for other in reversed(keys) if other != key), key)  # the only layer is refused, with the reason
    return (keys[-1], asked), (last, {**asked, "leave_out": [key]})


def _keys(snapshot: Snapshot) -> Sequence[str]:
    return [row.key for row in snapshot.layers]


def _set_if_changed(html: ipywidgets.HTML, value: str) -> None:
    if html.value != value:  # what somebody has selected in it stays selected
        html.value = value
