"""A button that compares the model's predictions with and without a layer."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from html import escape
from typing import Any, NamedTuple

import ipywidgets

from l2l_core import Inside
from workbench.panels.controls import make_button
from workbench.pictures import Examples, Table, code_line, describe_age, examples_html, examples_table
from workbench.session import LayerRow, Session, Snapshot, StateVersion


class PredictionPair(NamedTuple):
    """Predictions with and without a layer, or the reason why there are none, and the state they were made in."""

    examples: Examples | None
    reason: str
    version: StateVersion


class Predictions:
    """Predictions for the first row of the probe by two looks, one of them without a layer.

    Args:
        session: runs the looks.
        on_change: called after a result, on the session's thread, without locks.

    Attributes:
        button: the button; its callback is set by the owner.
        line, picture: equivalent code with the status, and the predictions.
        found: last predictions by key of the layer; never changed in place.
    """

    def __init__(self, session: Session, on_change: Callable[[], None]) -> None:
        self._session, self._on_change = session, on_change
        self._waiting: frozenset[str] = frozenset()
        self.found: Mapping[str, PredictionPair] = {}
        tip = "The model's predictions for a row of the probe; nothing is changed"
        self.button = make_button("Predictions without it", "list", tip)
        self.line, self.picture = ipywidgets.HTML(), ipywidgets.HTML()

    def request(self, key: str) -> None:
        """Queue the looks with and without the layer `key`.

        Raises:
            RuntimeError: the session is closed.
        """
        (last, of_whole), (last_left, without) = _look_calls(key, _keys(self._session.snapshot()))
        whole = self._session.look([last], **of_whole)
        self._waiting |= {key}
        # the queue is ordered: when this look ends, the first one has ended
        self._session.look([last_left], **without).add_done_callback(partial(self._on_result, key, whole))

    def draw(self, row: LayerRow, snapshot: Snapshot) -> None:
        """Show the predictions of a layer."""
        waits, found = row.key in self._waiting, self.found.get(row.key)
        self.button.disabled = waits or row.stack is None
        status = "is being measured, or waits in the queue" if waits else ""
        if found is not None and not waits:
            status = " ".join(
                filter(None, (found.reason, f"({describe_age(found.version, StateVersion.of(snapshot))})"))
            )
        _, (last, options) = _look_calls(row.key, _keys(snapshot))
        arguments = ", ".join([repr([last]), *(f"{name}={value!r}" for name, value in options.items())])
        code = code_line(f"workbench.look({arguments})")
        self.line.value = f'{code} <span class="l2l-caption" role="status">{escape(status)}</span>'
        examples = None if found is None else found.examples
        self.picture.value = "" if examples is None else examples_html(examples, self._session.decode)

    def still(self, key: str) -> Sequence[Table]:
        """Return the predictions of a layer as a table, if there are any."""
        found = self.found.get(key)
        return [] if found is None or found.examples is None else [examples_table(found.examples, self._session.decode)]

    def _on_result(self, key: str, with_layer: Future[Inside], without: Future[Inside]) -> None:
        self._waiting -= {key}
        if with_layer.cancelled() or without.cancelled():
            return  # the thread that cancelled it may hold the session's lock
        version = StateVersion.of(self._session.snapshot())
        if error := with_layer.exception() or without.exception():
            pair = PredictionPair(None, str(error).partition("\n")[0], version)
        else:
            pair = PredictionPair(Examples(with_layer.result(), without.result()), "", version)
        self.found = {**self.found, key: pair}
        self._on_change()


LookCall = tuple[str, dict[str, Any]]  # a layer, and further arguments of `Session.look`


def _look_calls(key: str, keys: Sequence[str]) -> tuple[LookCall, LookCall]:
    """Return the looks with and without a layer, both at the last layer that runs."""
    options: dict[str, Any] = {"lens": True, "top": 1}
    last = next((other for other in reversed(keys) if other != key), key)  # a single layer is refused by the session
    return (keys[-1], options), (last, {**options, "leave_out": [key]})


def _keys(snapshot: Snapshot) -> Sequence[str]:
    return [row.key for row in snapshot.layers]
