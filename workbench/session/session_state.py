"""How a session stands, for whoever looks and for its loggers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import NamedTuple

from l2l_core import Inside, Relay, Trace
from workbench.session.command_thread import Command, CommandThread
from workbench.session.loggers import Logger, LookLogger, RaceLogger, SnapshotLogger
from workbench.session.probe import Probe
from workbench.session.probe_verdict import PENDING, LossChange, ProbeLosses
from workbench.session.race_result import Race
from workbench.session.relay_view import RelayView
from workbench.session.run_controller import TRAIN
from workbench.session.settings import SettingsPlan, make_config
from workbench.session.snapshot import Snapshot
from workbench.session.snapshot_rows import make_failure
from workbench.session.snapshot_values import Activity, Change, Failure, Progress
from workbench.session.training_run import TrainingRun

CLOSED = "This workbench was closed: run its cell again, or make a new one on the relay."
TAKEN_OVER = "This workbench was taken over by another one on the same relay: use that one, or run this cell again."


class PendingVerdict(NamedTuple):
    """An edit that is done and not judged yet."""

    change: Change
    before: ProbeLosses


class SessionState:
    """What a session shows of itself, and tells.

    Invariant: read and written under the lock of the worker, so that a snapshot is of one moment. All but `snapshot` is
    called on the session's thread alone.

    Args:
        relay: is looked at between its steps, but for its trace.
        worker: the queue is shown too.
        loggers: are told of steps and changes; of edits once they are judged.
        probe: its cost is shown.

    Attributes:
        run, plan, mirror: steps asked for, settings, and the relay when it was last looked at.
        during: what the thread is at, which an error is explained with.
        refusal, ended: see `Snapshot`.
        owed: the last change, if its losses after it are still to be measured: before anything else is done.
    """

    def __init__(self, relay: Relay, commands: CommandThread, loggers: Sequence[Logger], probe: Probe) -> None:
        self._relay, self._commands, self._loggers, self._probe = relay, commands, tuple(loggers), probe
        self.changed = commands.changed
        self.run, self.settings_plan, self.relay_view = TrainingRun(self.changed), SettingsPlan(relay), RelayView(relay)
        self.activity: Activity = "step"
        self.refusal: Failure | None = None
        self.pending: PendingVerdict | None = None
        self.ended = ""
        self.race: Callable[[], Race | None] = lambda: None  # the last one, as it is now
        self._running_trace: Callable[[], Trace | None] = lambda: None
        self._failed_trace: Trace | None = None  # of the step that has just failed

    # -- shown ---------------------------------------------------------------------------------------------------------

    def snapshot(self) -> Snapshot:
        """Take a snapshot of all of it as it is now, in the middle of a step too."""
        with self.changed:
            run, mirror, shell = self.run, self.relay_view, self._relay.shell
            queue = list(self._commands.queue)
            waiting = [command.label for command in queue]
            trace = self._running_trace()
            return Snapshot(
                number=self._commands.number,
                state=run.state,
                pausing=run.state == "running" and (run.pause_after_step or bool({"pause", "stop"} & set(waiting))),
                model=type(self._relay.model).__name__,
                num_params=mirror.num_params,
                device=self._relay.device.name,
                # of the next step, as `config` is: what waits in the queue shows at once
                figures={name: self.settings_plan.settings[name] for name in self._relay.device.figures()},
                config=make_config(self.settings_plan.settings),
                queued=tuple(waiting),
                step=mirror.steps,
                done=run.done,
                target=run.target,
                steps=tuple(mirror.history.steps),
                changes=tuple(mirror.history.changes),
                layers=mirror.layers,
                statistics=mirror.history.statistics.view(),
                shell_params=shell.num_params,
                shell_trained=shell.num_trained,
                busy=self._describe_activity(),
                ended=self.ended,
                shown=mirror.history.shown,
                progress=Progress(trace, *trace.counts, trace.now()) if trace is not None else None,
                failure=run.failure,
                refusal=self.refusal,
                tickets=tuple(command.ticket for command in queue),
                journal=mirror.journal,
                can_undo=mirror.can_undo,
                can_redo=mirror.can_redo,
                branch=mirror.branch,
                branches=mirror.branches,
                elsewhere=mirror.elsewhere,
                touched=mirror.touched,
                probe=self._probe.row,
                race=self.race(),
            )

    def set_ended(self, reason: str) -> None:
        """Say why nothing more can be asked of the session; the first reason stays."""
        with self.changed:
            self.ended = self.ended or reason
            self._commands.notify_change()

    def _describe_activity(self) -> str:
        """What the thread does, in words."""
        work = self._commands.current
        if work is None:
            return ""
        return f"step {self.relay_view.steps + 1}" if work.what == TRAIN else work.label

    @contextmanager
    def track_step(self) -> Iterator[None]:
        """Show the relay's trace as progress in the block, as soon as it is that of a new step."""
        old = self._relay.trace  # is still there until the step has made one of its own
        self._running_trace = lambda: trace if (trace := self._relay.trace) is not old else None
        self._failed_trace = None
        try:
            yield
        except BaseException:
            self._failed_trace = self._running_trace()
            raise
        finally:
            self._running_trace = lambda: None

    def refresh(self) -> None:
        """Read the relay anew: a change may have done anything to it."""
        with self.changed:
            if self.relay_view.refresh():
                self.settings_plan.mark_used()
            self.replan_settings()

    def replan_settings(self) -> None:
        """Plan the settings anew: others may wait in the queue now."""
        with self.changed:
            self.settings_plan.apply_queued(command.settings for command in self._commands.queue)

    # -- what goes wrong -----------------------------------------------------------------------------------------------

    def show_error(self, command: Command, error: BaseException) -> None:
        """Show why a command failed. It stops the run, unless it says that everything is as it was before.

        Why a question has no answer is known to whoever asked, and is no refusal of an edit.
        """
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

    def explain_error(self, error: BaseException) -> Failure:
        """Explain an error; this alone stops nothing."""
        failed, self._failed_trace = self._failed_trace, None  # an error later on is not of that step
        return make_failure(error, self.activity, self._relay, failed)

    def show_refusal(self, error: BaseException) -> None:
        """Show an error that has changed nothing, so that the run goes on."""
        with self.changed:
            self.refusal = make_failure(error, "refused", self._relay)
            self._commands.notify_change()

    # -- told ----------------------------------------------------------------------------------------------------------

    def record_change(
        self, what: str, entry: int | None = None, measured: LossChange | ProbeLosses | str = ""
    ) -> Change:
        """Record a change between two steps.

        Args:
            what: a few words.
            entry: number of an edit in the journal.
            found: by the probe: all of it; or what was before the edit, so that it is owed; or why there is nothing.
        """
        made = Change(self._relay.steps, what, self._relay.branch, entry)
        with self.changed:
            self.pending = PendingVerdict(made, measured) if isinstance(measured, ProbeLosses) else None
            self.relay_view.history.changes.append(made if self.pending is None else replace(made, why_not=PENDING))
        return made if isinstance(measured, ProbeLosses) else self._complete_change(made, measured)

    def complete_pending(self, found: LossChange | str) -> None:
        """Take in what the probe says of the edit that was owed, or why it says nothing."""
        assert self.pending is not None
        self._complete_change(self.pending.change, found)

    def _complete_change(self, made: Change, found: LossChange | str) -> Change:
        """Nothing more will be known of the last change: show it whole, and tell of it."""
        judged, why_not = (None, found) if isinstance(found, str) else (found, "")
        whole = replace(made, judged=judged, why_not=why_not)
        with self.changed:
            # Still the last one: what is owed is due before anything that could add another.
            self.relay_view.history.changes[-1], self.pending = whole, None
            self._commands.notify_change()
        self.notify_loggers(lambda logger: logger.log_change(whole))
        return whole

    def notify_loggers(self, notify: Callable[[Logger], None]) -> None:
        """Tell all loggers. When one fails the run stops, but the others are told, and what was done is done."""
        self.activity = "logger"
        for logger in self._loggers:
            try:
                notify(logger)
                if isinstance(logger, SnapshotLogger):
                    logger.watch(self.snapshot())
            except Exception as error:
                self.fail(error)

    def log_race(self, race: Race) -> None:
        """Tell the loggers that take races of one that is over; those that watch see where the session is again."""
        self.notify_loggers(lambda logger: logger.log_race(race) if isinstance(logger, RaceLogger) else None)

    def log_look(self, inside: Inside, decode: Callable[[Sequence[int]], str] | None) -> None:
        """Tell the loggers that take looks of one; nothing has changed, so those that watch have nothing new to see."""
        self.activity = "logger"
        for logger in self._loggers:
            if isinstance(logger, LookLogger):
                try:
                    logger.log_look(inside, decode)
                except Exception as error:
                    self.fail(error)

    def close(self) -> None:
        """Close the loggers; what goes wrong with one is shown."""
        if self.pending is not None:
            self.complete_pending("the session was closed first")
        self.activity = "logger"
        for logger in self._loggers:
            self._commands.execute(Command("close", logger.close))
        with self.changed:
            self.run.state = "closed"
            self._commands.notify_change()
