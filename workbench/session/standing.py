"""How a session stands, for whoever looks and for its loggers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import NamedTuple

from l2l_core import Inside, Relay, Trace
from workbench.session.judgement import PENDING, Judged, Measured
from workbench.session.loggers import Logger, LookLogger, RaceLogger, Watcher
from workbench.session.mirror import Mirror
from workbench.session.probe import Probe
from workbench.session.race_values import Race
from workbench.session.rows import explain
from workbench.session.run import Run
from workbench.session.settings import Plan, config_of
from workbench.session.snapshot import Snapshot
from workbench.session.steering import TRAIN
from workbench.session.values import Change, During, Failure, Progress
from workbench.session.worker import Command, Worker

CLOSED = "This workbench was closed: run its cell again, or make a new one on the relay."
TAKEN_OVER = "This workbench was taken over by another one on the same relay: use that one, or run this cell again."


class Owed(NamedTuple):
    """An edit that is done and not judged yet."""

    change: Change
    before: Measured


class Standing:
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

    def __init__(self, relay: Relay, worker: Worker, loggers: Sequence[Logger], probe: Probe) -> None:
        self._relay, self._worker, self._loggers, self._probe = relay, worker, tuple(loggers), probe
        self.changed = worker.changed
        self.run, self.plan, self.mirror = Run(self.changed), Plan(relay), Mirror(relay)
        self.during: During = "step"
        self.refusal: Failure | None = None
        self.owed: Owed | None = None
        self.ended = ""
        self.race: Callable[[], Race | None] = lambda: None  # the last one, as it is now
        self._under_way: Callable[[], Trace | None] = lambda: None
        self._failed: Trace | None = None  # of the step that has just failed

    # -- shown ---------------------------------------------------------------------------------------------------------

    def snapshot(self) -> Snapshot:
        """Take a snapshot of all of it as it is now, in the middle of a step too."""
        with self.changed:
            run, mirror, shell = self.run, self.mirror, self._relay.shell
            queue = list(self._worker.queue)
            waiting = [command.said for command in queue]
            trace = self._under_way()
            return Snapshot(
                number=self._worker.number,
                state=run.state,
                pausing=run.state == "running" and (run.pauses or bool({"pause", "stop"} & set(waiting))),
                model=type(self._relay.model).__name__,
                num_params=mirror.num_params,
                device=self._relay.device.name,
                # of the next step, as `config` is: what waits in the queue shows at once
                figures={name: self.plan.settings[name] for name in self._relay.device.figures()},
                config=config_of(self.plan.settings),
                queued=tuple(waiting),
                step=mirror.steps,
                done=run.done,
                target=run.target,
                steps=tuple(mirror.past.steps),
                changes=tuple(mirror.past.changes),
                layers=mirror.layers,
                statistics=mirror.past.statistics.view(),
                shell_params=shell.num_params,
                shell_trained=shell.num_trained,
                busy=self._busy(),
                ended=self.ended,
                shown=mirror.past.shown,
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

    def end(self, why: str) -> None:
        """Say why nothing more can be asked of the session; the first reason stays."""
        with self.changed:
            self.ended = self.ended or why
            self._worker.touch()

    def _busy(self) -> str:
        """What the thread does, in words."""
        work = self._worker.at_work
        if work is None:
            return ""
        return f"step {self.mirror.steps + 1}" if work.what == TRAIN else work.said

    @contextmanager
    def watch_step(self) -> Iterator[None]:
        """Show the relay's trace as progress in the block, as soon as it is that of a new step."""
        old = self._relay.trace  # is still there until the step has made one of its own
        self._under_way = lambda: trace if (trace := self._relay.trace) is not old else None
        self._failed = None
        try:
            yield
        except BaseException:
            self._failed = self._under_way()
            raise
        finally:
            self._under_way = lambda: None

    def look(self) -> None:
        """Read the relay anew: a change may have done anything to it."""
        with self.changed:
            if self.mirror.look():
                self.plan.note_use()
            self.follow_queue()

    def follow_queue(self) -> None:
        """Plan the settings anew: others may wait in the queue now."""
        with self.changed:
            self.plan.follow(command.settings for command in self._worker.queue)

    # -- what goes wrong -----------------------------------------------------------------------------------------------

    def show_error(self, command: Command, error: BaseException) -> None:
        """Show why a command failed. It stops the run, unless it says that everything is as it was before.

        Why a question has no answer is known to whoever asked, and is no refusal of an edit.
        """
        if (command.is_whole or command.is_question) and isinstance(error, ValueError | TypeError):
            if not command.is_question:
                self.refuse(error)
        else:
            self.fail(error)

    def fail(self, error: BaseException) -> None:
        """Show an error that stops the run."""
        with self.changed:
            self.run.fail(self.excuse(error))
            self._worker.touch()

    def excuse(self, error: BaseException) -> Failure:
        """Explain an error; this alone stops nothing."""
        failed, self._failed = self._failed, None  # an error later on is not of that step
        return explain(error, self.during, self._relay, failed)

    def refuse(self, error: BaseException) -> None:
        """Show an error that has changed nothing, so that the run goes on."""
        with self.changed:
            self.refusal = explain(error, "refused", self._relay)
            self._worker.touch()

    # -- told ----------------------------------------------------------------------------------------------------------

    def record(self, what: str, entry: int | None = None, found: Judged | Measured | str = "") -> Change:
        """Record a change between two steps.

        Args:
            what: a few words.
            entry: number of an edit in the journal.
            found: by the probe: all of it; or what was before the edit, so that it is owed; or why there is nothing.
        """
        made = Change(self._relay.steps, what, self._relay.branch, entry)
        with self.changed:
            self.owed = Owed(made, found) if isinstance(found, Measured) else None
            self.mirror.past.changes.append(made if self.owed is None else replace(made, why_not=PENDING))
        return made if isinstance(found, Measured) else self._complete(made, found)

    def judge(self, found: Judged | str) -> None:
        """Take in what the probe says of the edit that was owed, or why it says nothing."""
        assert self.owed is not None
        self._complete(self.owed.change, found)

    def _complete(self, made: Change, found: Judged | str) -> Change:
        """Nothing more will be known of the last change: show it whole, and tell of it."""
        judged, why_not = (None, found) if isinstance(found, str) else (found, "")
        whole = replace(made, judged=judged, why_not=why_not)
        with self.changed:
            # Still the last one: what is owed is due before anything that could add another.
            self.mirror.past.changes[-1], self.owed = whole, None
            self._worker.touch()
        self.tell(lambda logger: logger.log_change(whole))
        return whole

    def tell(self, tell: Callable[[Logger], None]) -> None:
        """Tell all loggers. When one fails the run stops, but the others are told, and what was done is done."""
        self.during = "logger"
        for logger in self._loggers:
            try:
                tell(logger)
                if isinstance(logger, Watcher):
                    logger.watch(self.snapshot())
            except Exception as error:
                self.fail(error)

    def tell_race(self, race: Race) -> None:
        """Tell the loggers that take races of one that is over; those that watch see where the session is again."""
        self.tell(lambda logger: logger.log_race(race) if isinstance(logger, RaceLogger) else None)

    def tell_look(self, seen: Inside, decode: Callable[[Sequence[int]], str] | None) -> None:
        """Tell the loggers that take looks of one; nothing has changed, so those that watch have nothing new to see."""
        self.during = "logger"
        for logger in self._loggers:
            if isinstance(logger, LookLogger):
                try:
                    logger.log_look(seen, decode)
                except Exception as error:
                    self.fail(error)

    def close(self) -> None:
        """Close the loggers; what goes wrong with one is shown."""
        if self.owed is not None:
            self.judge("the session was closed first")
        self.during = "logger"
        for logger in self._loggers:
            self._worker.do(Command("close", logger.close))
        with self.changed:
            self.run.state = "closed"
            self._worker.touch()
