"""Read side of a session: snapshots, waiting, and queries that are answered on its thread and change nothing."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import nullcontext, suppress
from functools import partial
from typing import Any

from tqdm.auto import tqdm

from l2l_core import Edit, Forecast, Inside, Relay
from l2l_core.batches import Batch
from l2l_core.model import LayerRef
from workbench.session.command_thread import Command
from workbench.session.early_stopping import EarlyStopping
from workbench.session.edit_text import describe_edits
from workbench.session.evaluator import Evaluator
from workbench.session.layer_facts import LayerFacts
from workbench.session.lr_finder import F, LRFinding, check_range
from workbench.session.metrics import MetricSpec
from workbench.session.probe import Probe
from workbench.session.probe_verdict import LossChange
from workbench.session.race_controller import RaceController
from workbench.session.run_controller import RunController
from workbench.session.session_state import SessionState
from workbench.session.snapshot import Snapshot
from workbench.session.snapshot_values import HeldOutRow
from workbench.session.tokenizer import Decode, Encode
from workbench.session.trainer import Trainer

NO_TOKENIZER = (
    "no tokenizer was found on the model, the batches or in a variable: pass Workbench(relay, batches, "
    "decode=tokenizer.decode)"
)


class QueryableSession(RunController):
    """The part of a session that changes nothing.

    A query that fails reports its error in its future, and the run continues.

    Invariant: the session's state is read under its lock.
    """

    relay: Relay
    decode: Decode | None
    encode: Encode | None
    _probe: Probe
    _state: SessionState
    _trainer: Trainer
    _races: RaceController
    _evaluator: Evaluator

    def __repr__(self) -> str:
        snapshot = self.snapshot()
        loss = f", loss {snapshot.steps[-1].loss:.4g}" if snapshot.steps else ""
        return f"<{type(self).__name__} of {snapshot.model}: {snapshot.state} {snapshot.state_words}{loss}>"

    # -- state ---------------------------------------------------------------------------------------------------------

    @property
    def has_shelf(self) -> bool:
        """True if weights are in files; the stash can then be in files, too."""
        return self.relay.shelf is not None

    @property
    def counts_flop(self) -> bool:
        """Whether the operations of each further step are counted by layer, for previews of edits: once per shape and edit."""
        return self._trainer.counts_flop

    @counts_flop.setter
    def counts_flop(self, on: bool) -> None:
        self._trainer.counts_flop = on

    def snapshot(self) -> Snapshot:
        """Return the current state, also in the middle of a step; never blocks on a step."""
        return self._state.snapshot()

    def wait(self, timeout_s: float | None = None, *, progress: bool = False) -> Snapshot:
        """Wait until nothing runs and nothing is queued; an interrupt pauses the run.

        Args:
            timeout_s: maximum time to wait; default unlimited.
            progress: show a progress bar.

        Raises:
            TimeoutError: the session is still busy after `timeout_s`.
        """
        until_s = float("inf") if timeout_s is None else time.monotonic() + timeout_s
        with tqdm(unit="step") if progress else nullcontext() as bar:
            try:
                while not self._has_settled(until_s):
                    _update_bar(bar, self.snapshot())
            except KeyboardInterrupt:
                with suppress(RuntimeError):  # closed in the meantime
                    self.pause()
                raise
            _update_bar(bar, now := self.snapshot())
            return now

    def _has_settled(self, until_s: float) -> bool:
        with self._changed:
            # A paused race holds the queue, so commands that wait there do not run.
            is_due = self._state.pending is not None or self._evaluator.is_due
            is_busy = (self._commands.is_busy or is_due) and not self._races.is_paused
            runs = self._run.state == "running" and not self._races.is_paused
            if self._run.state == "closed" or not (runs or is_busy or self._races.is_running):
                return True
            if time.monotonic() >= until_s:
                raise TimeoutError(
                    f"the session is still {self._run.state} after step {self.relay.steps}: wait longer, or pause()"
                )
            self._changed.wait(min(until_s - time.monotonic(), 0.2))
            return False

    # -- queries -------------------------------------------------------------------------------------------------------

    def measure(self, *edits: Edit, what: str = "") -> Future[LossChange]:
        """Measure the effect of edits, as one group, on the losses of the probe; the edits are reverted.

        The future gets a ValueError if the probe is off or fails, or if an edit cannot be applied.

        Args:
            edits: in order.
            what: description for the queue; default the edits.
        """
        words = partial(describe_edits, edits, what)  # evaluated when shown: the numbers of layers may change
        return self._submit_query(
            lambda: f"measure {words(self._state.relay_view.layers)}", self._trainer.measure, edits
        )

    def inspect(self, key: str) -> Future[LayerFacts | None]:
        """Read a layer between two steps; the future gets None if the layer does not exist then."""
        return self._submit_query("read a layer", self._trainer.inspect, key)

    def script(self) -> str:
        """Write the session so far as a Python program that repeats it, given the relay and the batches.

        It contains steps, edits, undo and redo, settings, branches and races, and leads to the same losses and weights to
        the bit. Changes made by code or with a module are calls of its function `by_hand`, which raises until it is written.
        """
        return self._trainer.script.text()

    def look(
        self,
        layers: Iterable[LayerRef] | None = None,
        *,
        batch: Batch = None,
        text: str | None = None,
        **options: Any,
    ) -> Future[Inside]:
        """Look inside layers between two steps; see `Relay.look`, which also documents `options`.

        The future gets a ValueError if there is no batch yet, or if the model fails on it.

        Args:
            layers: layers to read; default up to 12, evenly spaced.
            batch: default the first one of the probe, also if the probe is off.
            text: takes the place of the tokens in every row of the batch; of a text longer than a row, the end.

        Raises:
            ValueError: `text` cannot be split into tokens.
        """
        tokens = None if text is None else self._encode(text)
        return self._submit_query("look inside", self._trainer.look, batch, layers, options, self.decode, tokens)

    def _encode(self, text: str) -> Sequence[int]:
        if self.encode is None:
            raise ValueError(f"text={text!r} cannot be split into tokens: {NO_TOKENIZER}")
        return self.encode(text)

    def evaluate(
        self,
        loader: Iterable[Batch] | None,
        metrics: Mapping[str, MetricSpec] | None = None,
        *,
        every: int | None = None,
        stop: EarlyStopping | None = None,
    ) -> Future[HeldOutRow | None]:
        """Measure the held-out loss over a whole loader, and metrics: now, and then every few steps of the run.

        The mean over batches is weighted as the loss is: by rows or targets. Training continues to the bit as if nothing had
        been measured. Another call with `every` replaces the repeated evaluation. An error ends the run and the evaluation,
        and training is as before.

        Args:
            loader: a DataLoader, a list of batches, or any other iterable that can be iterated repeatedly; None ends the
                repeated evaluation.
            metrics: by name: a function ``f(outputs, batch) -> float``, a metric object with update, compute and reset, as
                those of torchmetrics, or a pair ``(metric, f)`` in which ``f(outputs, batch)`` returns the arguments of update.
            every: number of steps between measurements; None: once, now.
            stop: pauses the run if a value does not improve any more.

        Returns:
            A future of the measurement now.

        Raises:
            TypeError, ValueError: an argument cannot be used.
        """
        return self._evaluator.submit(loader, metrics, every, stop)

    def find_lr(
        self, lowest: float = 1e-7, highest: float = 1.0, steps: int = 60, *, result: type[F] = LRFinding
    ) -> Future[F]:
        """Find a learning rate: train on the next batches with an exponentially growing rate, then rewind.

        Weights, optimizer, buffers, random streams, scheduler and batches are as before, so that training continues with the
        same bits. The batches are drawn early and kept in host memory until the run uses them. Groups of the optimizer keep
        the ratio of their rates to that of the first group.

        Args:
            lowest, highest: rates of the first and of the last step.
            steps: number of steps; fewer if the loss diverges.
            result: class of the result.

        Raises:
            ValueError: the range is empty, or there are too few steps.
        """
        check_range(lowest, highest, steps)
        action = partial(self._trainer.find_lr, lowest, highest, steps, result)
        return self._commands.submit(Command("find a learning rate", action))

    @property
    def probe_on(self) -> bool:
        """Whether edits are measured on the probe; a new value applies to edits that run after it is set."""
        return self._probe.is_on

    @probe_on.setter
    def probe_on(self, on: bool) -> None:
        with self._changed:
            self._probe.is_on = bool(on)
            self._commands.notify_change()

    def forecast(self) -> Future[Forecast]:
        """Forecast the needs of the next step without training; the first one of a kind rehearses a few micro-batches."""
        return self._submit_query("forecast", self._trainer.forecast)

    def _submit_query(self, what: str | Callable[[], str], action: Callable[..., Any], *args: Any) -> Future[Any]:
        return self._commands.submit(Command(what, lambda: action(*args), is_query=True))


def _update_bar(bar: tqdm | None, snapshot: Snapshot) -> None:
    if bar is None:
        return
    bar.total, bar.n = snapshot.target, snapshot.done
    if snapshot.steps:
        bar.set_postfix_str(f"loss {snapshot.steps[-1].loss:.4g}", refresh=False)
    bar.refresh()
