"""How a session stands, for whoever looks and for its loggers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from l2l_core import Relay, Trace
from workbench.session.loggers import Logger, Watcher
from workbench.session.mirror import Mirror
from workbench.session.rows import explain
from workbench.session.run import Run
from workbench.session.settings import Plan, config_of
from workbench.session.snapshot import Snapshot
from workbench.session.values import Change, During, Failure, Progress
from workbench.session.worker import Command, Worker


class Standing:
    """What a session shows of itself, and tells.

    Invariant: read and written under the lock of the worker, so that a snapshot is of one moment. All but `snapshot` is
    called on the session's thread alone.

    Args:
        relay: is looked at between its steps, but for its trace.
        worker: the queue is shown too.
        loggers: are told of steps and changes.

    Attributes:
        run, plan, mirror: steps asked for, settings, and the relay when it was last looked at.
        during: what the thread is at, which an error is explained with.
        last: trace of the last step.
        in_core_bytes, refusal: see `Snapshot`.
    """

    def __init__(self, relay: Relay, worker: Worker, loggers: Sequence[Logger]) -> None:
        self._relay, self._worker, self._loggers = relay, worker, tuple(loggers)
        self.changed = worker.changed
        self.run, self.plan, self.mirror = Run(self.changed), Plan(relay), Mirror(relay)
        self.during: During = "step"
        self.last: Trace | None = None
        self.in_core_bytes: int | None = None
        self.refusal: Failure | None = None
        self._under_way: Callable[[], Trace | None] = lambda: None

    # -- shown ---------------------------------------------------------------------------------------------------------

    def snapshot(self) -> Snapshot:
        """All of it as it is now, in the middle of a step too."""
        with self.changed:
            run, mirror, shell = self.run, self.mirror, self._relay.shell
            queue = list(self._worker.queue)
            waiting = [command.what for command in queue]
            trace = self._under_way()
            return Snapshot(
                number=self._worker.number,
                state=run.state,
                pausing=run.state == "running" and (run.pauses or bool({"pause", "stop"} & set(waiting))),
                model=type(self._relay.model).__name__,
                num_params=mirror.num_params,
                device=self._relay.device.name,
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
                last=self.last,
                progress=Progress(trace, *trace.counts, trace.now()) if trace is not None else None,
                in_core_bytes=self.in_core_bytes,
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
            )

    @contextmanager
    def watch_step(self) -> Iterator[None]:
        """Meanwhile the relay's trace is the progress, as soon as it is that of a new step."""
        old = self._relay.trace
        self._under_way = lambda: trace if (trace := self._relay.trace) is not old else None
        try:
            yield
        finally:
            self._under_way = lambda: None

    def look(self) -> None:
        """A change may have done anything to the relay."""
        with self.changed:
            if self.mirror.look():
                self.plan.note_use()
            self.follow_queue()

    def follow_queue(self) -> None:
        """Other settings may wait now."""
        with self.changed:
            self.plan.follow(command.settings for command in self._worker.queue)

    # -- what goes wrong -----------------------------------------------------------------------------------------------

    def fail(self, error: BaseException) -> None:
        """Show an error that stops the run."""
        with self.changed:
            self.run.fail(explain(error, self.during, self._relay.steps))
            self._worker.touch()

    def refuse(self, error: BaseException) -> None:
        """Show an error that has changed nothing, so that the run goes on."""
        with self.changed:
            self.refusal = explain(error, "refused", self._relay.steps)
            self._worker.touch()

    # -- told ----------------------------------------------------------------------------------------------------------

    def record(self, what: str) -> Change:
        """Something has changed between two steps."""
        made = Change(self._relay.steps, what, self._relay.branch)
        with self.changed:
            self.mirror.past.changes.append(made)
        self.tell(lambda logger: logger.log_change(made))
        return made

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

    def close(self) -> None:
        """Close the loggers; what goes wrong with one is shown."""
        self.during = "logger"
        for logger in self._loggers:
            self._worker.do(Command("close", logger.close))
        with self.changed:
            self.run.state = "closed"
            self._worker.touch()
