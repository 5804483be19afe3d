"""Evaluations of a session: one on request, and one that is repeated every few steps of the run."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from concurrent.futures import Future
from functools import partial

from l2l_core import Relay
from l2l_core.batches import Batch
from workbench.session.background_work import WorkCancelled
from workbench.session.command_thread import Command, CommandThread
from workbench.session.early_stopping import EarlyStopping
from workbench.session.evaluation import Evaluation
from workbench.session.metrics import MetricSet, MetricSpec
from workbench.session.session_state import SessionState
from workbench.session.snapshot_values import HeldOutRow

WHAT = "measure the held-out loss"


class Evaluator:
    """The repeated evaluation, and whether it is due.

    Invariant: `is_due` is read and written under the session's lock, the rest on its thread alone.

    Args:
        relay, commands, state: the session's.

    Attributes:
        is_due: True if the repeated evaluation precedes the next step.
    """

    def __init__(self, relay: Relay, commands: CommandThread, state: SessionState) -> None:
        self._relay, self._commands, self._state = relay, commands, state
        self._repeated: Evaluation | None = None
        self.is_due = False

    def submit(
        self,
        loader: Iterable[Batch] | None,
        metrics: Mapping[str, MetricSpec] | None,
        every: int | None,
        stop: EarlyStopping | None,
    ) -> Future[HeldOutRow | None]:
        """Queue an evaluation; see `Session.evaluate`."""
        if loader is None:
            return self._commands.submit(Command("end the evaluation", self._end))
        evaluation = Evaluation(loader, MetricSet(metrics), every, stop)
        return self._commands.submit(Command(WHAT, partial(self._begin, evaluation)))

    def after_step(self) -> None:
        """Make the repeated evaluation due if it is its time."""
        every = None if self._repeated is None else self._repeated.every
        if every is not None and self._relay.steps % every == 0:
            with self._commands.changed:
                self.is_due = True

    def next_due(self) -> Command | None:
        """Return the repeated evaluation if it is due; called under the session's lock."""
        return Command(WHAT, self._run_due) if self.is_due else None

    def _end(self) -> None:
        self._repeated = None

    def _begin(self, evaluation: Evaluation) -> HeldOutRow:
        row = self._measure(evaluation)
        if evaluation.every is not None:
            self._repeated = evaluation
        return row

    def _run_due(self) -> None:
        evaluation = self._repeated
        with self._commands.changed:
            self.is_due = False
        assert evaluation is not None, "it is due after a step alone, and ended by a command"
        try:
            self._measure(evaluation)
        except WorkCancelled:
            return  # this measurement is left out
        except BaseException:
            self._repeated = None  # else it would fail again and again
            raise

    def _measure(self, evaluation: Evaluation) -> HeldOutRow:
        self._state.activity = "measurement"
        with self._state.work.watch("evaluating", "held-out batches", evaluation.total) as advance:
            row = evaluation.measure(self._relay, advance)
        self._state.record_held_out(row)
        if reason := evaluation.reason_to_stop(row):
            self._state.run.pause_early(reason)
        return row
