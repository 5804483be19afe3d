"""What can be asked of a session: answered on its thread, between two steps, and nothing is another thing afterwards."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any

from l2l_core import Edit, Forecast, Inside
from l2l_core.batches import Batch
from l2l_core.model import LayerRef
from workbench.session.command_thread import Command
from workbench.session.edit_text import describe_edits
from workbench.session.layer_facts import LayerFacts
from workbench.session.observable_session import ObservableSession
from workbench.session.probe import Probe
from workbench.session.probe_verdict import LossChange
from workbench.session.trainer import Trainer


class QueryableSession(ObservableSession):
    """The part of a session that asks. A question that has no answer says why in its future, and a run goes on."""

    _probe: Probe
    _trainer: Trainer
    decode: Callable[[Sequence[int]], str] | None

    def measure(self, *edits: Edit, what: str = "") -> Future[LossChange]:
        """Measure what edits would do to the losses of the probe, as one group; they are taken back again, nothing has changed.

        The future gets a ValueError where nothing could be measured: the probe is off, or fails, or an edit cannot be done.

        Args:
            edits: in order.
            what: a few words for the queue; default the edits.
        """
        words = partial(describe_edits, edits, what)  # said when somebody looks: layers may have other numbers by then
        return self._submit_query(
            lambda: f"measure {words(self._state.relay_view.layers)}", self._trainer.measure, edits
        )

    def inspect(self, key: str) -> Future[LayerFacts | None]:
        """Look at shapes and weights of a layer between two steps; changes nothing. The future gets None if it is gone then."""
        return self._submit_query("look at a layer", self._trainer.inspect, key)

    def script(self) -> str:
        """Write all that was done so far as a Python program, which asks for the relay and the batches and does it again.

        Steps, edits, undo and redo, settings, branches and races are in it, and lead to the same losses and weights to the
        bit. What was done by code or with a module is a call of its function `by_hand`, which raises until it is written.
        """
        return self._trainer.script.text()

    def look(self, layers: Iterable[LayerRef] | None = None, *, batch: Batch = None, **options: Any) -> Future[Inside]:
        """Look inside of layers between two steps; changes nothing, see `Relay.look`, which says what `options` there are.

        Args:
            layers: that are looked at; default up to 12, evenly chosen.
            batch: default the first one of the probe, whether that is on or not.

        The future gets a ValueError where nothing could be seen: there is no batch yet, or the model fails on it.
        """
        return self._submit_query("look inside", self._trainer.look, batch, layers, options, self.decode)

    @property
    def probe_on(self) -> bool:
        """Whether edits are judged on the probe; may be set at any time, for the edits whose turn comes later."""
        return self._probe.is_on

    @probe_on.setter
    def probe_on(self, on: bool) -> None:
        with self._changed:
            self._probe.is_on = bool(on)
            self._commands.notify_change()

    def forecast(self) -> Future[Forecast]:
        """Forecast what the next step needs; trains nothing. Before the first of a kind, a few micro-batches are rehearsed."""
        return self._submit_query("forecast", self._trainer.forecast)

    def _submit_query(self, what: str | Callable[[], str], action: Callable[..., Any], *args: Any) -> Future[Any]:
        """Queue something that changes nothing."""
        return self._commands.submit(Command(what, lambda: action(*args), is_query=True))
