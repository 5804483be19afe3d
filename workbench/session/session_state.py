"""State of a session: its snapshots, its failures, and the notification of its loggers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import NamedTuple, TypeVar

from l2l_core import Inside, Relay, Trace
from workbench.session.background_work import BackgroundWork, WorkCancelled
from workbench.session.command_thread import Command, CommandThread
from workbench.session.loggers import HeldOutLogger, Logger, LookLogger, RaceLogger, SnapshotLogger
from workbench.session.probe import Probe
from workbench.session.probe_verdict import PENDING, LossChange, ProbeLosses
from workbench.session.race_result import Race
from workbench.session.relay_view import RelayView
from workbench.session.run_controller import TRAIN
from workbench.session.save_folder import SavedSession
from workbench.session.settings import SettingsPlan, make_config
from workbench.session.settings_search import SettingsSearch
from workbench.session.snapshot import Snapshot
from workbench.session.snapshot_rows import make_failure
from workbench.session.snapshot_values import Activity, Change, Failure, HeldOutRow, Progress
from workbench.session.training_run import TrainingRun

L = TypeVar("L")

CLOSED = "This workbench was closed: run its cell again, or make a new one on the relay."
TAKEN_OVER = "This workbench was taken over by another one on the same relay: use that one, or run this cell again."


class PendingVerdict(NamedTuple):
    """An applied edit whose effect on the probe is still to be measured."""

    change: Change
    before: ProbeLosses


class SessionState:
    """The visible state of a session, from which snapshots are taken and loggers are notified.

    Invariant: read and written under the lock of the command thread, so that a snapshot is consistent. Every method but
    `snapshot` is called on the session's thread alone.

    Args:
        relay: read between its steps, except for its trace.
        commands: the command thread; snapshots show its queue.
        run: the current run.
        loggers: notified of steps and changes; of an edit after its effect is measured.
        probe: shown in snapshots.

    Attributes:
        settings_plan: settings of the next step.
        relay_view: the relay as last read.
        activity: current activity of the thread, part of the explanation of an error.
        refusal, ended: see `Snapshot`.
        pending: the last change, if the losses after it are still to be measured; this precedes all other work.
        race: returns the last race in its current state.
        saves: returns the last save of the session, and the save of an earlier one that can be resumed.
        search: the search for settings that fit, if one runs.
        work: the evaluation or the learning-rate finder, if one runs.
    """

    def __init__(
        self, relay: Relay, commands: CommandThread, run: TrainingRun, loggers: Sequence[Logger], probe: Probe
    ) -> None:
        self._relay, self._commands, self._loggers, self._probe = relay, commands, tuple(loggers), probe
        self.changed, self.run = commands.changed, run
        self.settings_plan, self.relay_view = SettingsPlan(relay), RelayView(relay)
        self.activity: Activity = "step"
        self.refusal: Failure | None = None
        self.pending: PendingVerdict | None = None
        self.ended = ""
        self.race: Callable[[], Race | None] = lambda: None
        self.saves: Callable[[], tuple[SavedSession | None, SavedSession | None]] = lambda: (None, None)
        self.search = SettingsSearch(self._show_full_device, commands.notify_change)
        self.work = BackgroundWork(commands.notify_change)
        self._running_trace: Callable[[], Trace | None] = lambda: None
        self._failed_trace: Trace | None = None  # trace of the step that has just failed

    # -- snapshots -----------------------------------------------------------------------------------------------------

    def snapshot(self) -> Snapshot:
        """Return a snapshot of the current state, also in the middle of a step."""
        with self.changed:
            run, view, shell = self.run, self.relay_view, self._relay.shell
            history = view.histories.current
            queue = list(self._commands.queue)
            waiting = [command.label for command in queue]
            trace, (saved, offer) = self._running_trace(), self.saves()
            return Snapshot(
                number=self._commands.number,
                state=run.state,
                pausing=run.state == "running" and (run.pause_after_step or bool({"pause", "stop"} & set(waiting))),
                model=type(self._relay.model).__name__,
                num_params=view.num_params,
                device=self._relay.device.name,
                # Of the next step, like `config`: queued settings are shown at once.
                figures={name: self.settings_plan.settings[name] for name in self._relay.device.figures()},
                config=make_config(self.settings_plan.settings),
                queued=tuple(waiting),
                step=view.steps,
                done=run.done,
                target=run.target,
                dropped=run.dropped,
                steps=tuple(history.steps),
                changes=tuple(history.changes),
                layers=view.layers,
                statistics=history.statistics.view(),
                shell_params=shell.num_params,
                shell_trained=shell.num_trained,
                busy=self._describe_activity(),
                ended=self.ended,
                shown=history.shown,
                progress=Progress(trace, *trace.counts, trace.now()) if trace is not None else None,
                failure=run.failure,
                refusal=self.refusal,
                tickets=tuple(command.ticket for command in queue),
                journal=view.journal,
                can_undo=view.can_undo,
                can_redo=view.can_redo,
                branch=view.branch,
                branches=view.branches,
                elsewhere=view.elsewhere,
                touched=view.touched,
                probe=self._probe.row,
                race=self.race(),
                saved=saved,
                offer=offer,
                search=self.search.row,
                work=self.work.row,
                held_out=tuple(history.held_out),
                notice=run.notice,
                changed_from=self.settings_plan.changed_from,
            )

    def set_ended(self, reason: str) -> None:
        """Set the reason why the session accepts no more commands, unless one is set already."""
        with self.changed:
            self.ended = self.ended or reason
            self._commands.notify_change()

    def _describe_activity(self) -> str:
        """Return a description of the current command, or ""."""
        command = self._commands.current
        if command is None:
            return ""
        return f"step {self.relay_view.steps + 1}" if command.what == TRAIN else command.label

    @contextmanager
    def track_step(self) -> Iterator[None]:
        """Show the trace of the step that runs in this context as progress."""
        old = self._relay.trace  # remains until the step has made a new one
        self._running_trace = lambda: trace if (trace := self._relay.trace) is not old else None
        self._failed_trace = None
        try:
            yield
        except BaseException:
            self._failed_trace = self._running_trace() or self._failed_trace
            raise
        finally:
            self._running_trace = lambda: None

    def refresh(self) -> None:
        """Read the relay again: a change may have had any effect."""
        with self.changed:
            if self.relay_view.refresh():
                self.settings_plan.mark_used()
            self.replan_settings()

    def replan_settings(self) -> None:
        """Plan the settings of the next step again, since the queue may have changed."""
        with self.changed:
            self.settings_plan.apply_queued(command.settings for command in self._commands.queue)

    # -- errors --------------------------------------------------------------------------------------------------------

    def show_error(self, command: Command, error: BaseException) -> None:
        """Show the error of a command. It stops the run unless the command is known to have changed nothing.

        A failed query is reported through its future alone, and does not replace the refusal of an edit.
        """
        if isinstance(error, WorkCancelled):
            return  # nothing has changed, and its future gets the error
        if (command.is_atomic or command.is_query) and isinstance(error, ValueError | TypeError):
            if not command.is_query:
                self.show_refusal(error)
        else:
            self.fail(error)

    def fail(self, error: BaseException) -> None:
        """Show an error that stops the run."""
        with self.changed:
            self.run.fail(self.explain_error(error))
            self._commands.notify_change()

    def _show_full_device(self, error: BaseException) -> None:
        """Show at once that a step does not fit; the search for settings continues."""
        with self.changed:
            self._failed_trace = self._running_trace()
            self._running_trace = lambda: None
            self.run.fail(make_failure(error, self.activity, self._relay, self._failed_trace))

    def explain_error(self, error: BaseException) -> Failure:
        """Make a failure of an error, with the trace of the step if one has just failed."""
        failed, self._failed_trace = self._failed_trace, None  # a later error belongs to another step
        return make_failure(error, self.activity, self._relay, failed)

    def show_refusal(self, error: BaseException) -> None:
        """Show an error that has changed nothing; the run continues."""
        with self.changed:
            self.refusal = make_failure(error, "refused", self._relay)
            self._commands.notify_change()

    # -- changes and loggers -------------------------------------------------------------------------------------------

    def record_change(
        self, what: str, entry: int | None = None, measured: LossChange | ProbeLosses | str = ""
    ) -> Change:
        """Record a change between two steps.

        Args:
            what: short description.
            entry: number of the edit's journal entry.
            measured: result of the probe; or its losses before the edit, so that those after it are still to be measured;
                or the reason why there is no result.
        """
        made = Change(self._relay.steps, what, self._relay.branch, entry)
        with self.changed:
            self.pending = PendingVerdict(made, measured) if isinstance(measured, ProbeLosses) else None
            self.relay_view.histories.current.changes.append(
                made if self.pending is None else replace(made, why_not=PENDING)
            )
        return made if isinstance(measured, ProbeLosses) else self._complete_change(made, measured)

    def complete_pending(self, found: LossChange | str) -> None:
        """Add the result of the probe, or the reason why there is none, to the pending change."""
        assert self.pending is not None
        self._complete_change(self.pending.change, found)

    def _complete_change(self, made: Change, found: LossChange | str) -> Change:
        """Show the last change with its result, and notify the loggers."""
        judged, why_not = (None, found) if isinstance(found, str) else (found, "")
        complete = replace(made, judged=judged, why_not=why_not)
        with self.changed:
            # Still the last one: pending measurements precede everything that adds a change.
            self.relay_view.histories.current.changes[-1], self.pending = complete, None
            self._commands.notify_change()
        self.notify_loggers(lambda logger: logger.log_change(complete))
        return complete

    def notify_loggers(self, notify: Callable[[Logger], None]) -> None:
        """Notify all loggers, also after one has failed; a failure stops the run, but undoes nothing."""
        self.activity = "logger"
        for logger in self._loggers:
            try:
                notify(logger)
                if isinstance(logger, SnapshotLogger):
                    logger.watch(self.snapshot())
            except Exception as error:
                self.fail(error)

    def record_held_out(self, row: HeldOutRow) -> None:
        """Record a measurement on held-out data, and notify the loggers that take them."""
        with self.changed:
            self.relay_view.histories.current.held_out.append(row)
            self._commands.notify_change()
        self._notify(HeldOutLogger, lambda logger: logger.log_held_out(row))

    def log_race(self, race: Race) -> None:
        """Notify the loggers that take races of a finished race; snapshot loggers see the branch to which it returned."""
        self.notify_loggers(lambda logger: logger.log_race(race) if isinstance(logger, RaceLogger) else None)

    def log_look(self, inside: Inside, decode: Callable[[Sequence[int]], str] | None) -> None:
        """Notify the loggers that take looks."""
        self._notify(LookLogger, lambda logger: logger.log_look(inside, decode))

    def _notify(self, kind: type[L], notify: Callable[[L], None]) -> None:
        """Notify the loggers of a kind; snapshot loggers get no snapshot, since training has not changed."""
        self.activity = "logger"
        for logger in self._loggers:
            if isinstance(logger, kind):
                try:
                    notify(logger)
                except Exception as error:
                    self.fail(error)

    def close(self) -> None:
        """Close the loggers, and show their errors."""
        if self.pending is not None:
            self.complete_pending("the session was closed first")
        self.activity = "logger"
        for logger in self._loggers:
            self._commands.execute(Command("close", logger.close))
        with self.changed:
            self.run.state = "closed"
            self._commands.notify_change()
