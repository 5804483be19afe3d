"""A run on a thread of its own, and its buttons: what everything that is steered like a session has. It knows no relay."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import suppress

from workbench.session.command_thread import Command, CommandThread
from workbench.session.snapshot import Snapshot
from workbench.session.training_run import TrainingRun, check_steps

TRAIN = "train"  # what the command is called that makes a step of the run


class RunController(ABC):
    """The queue, the run and the verbs for them; whoever inherits makes the steps.

    Invariant: one step or one command is done at a time, on the thread.

    Args:
        fail: shows the error of a command, as of `Worker`.
    """

    def __init__(self, fail: Callable[[Command, BaseException], None]) -> None:
        self._commands = CommandThread(self._next_due, fail)
        self._changed, self._ended = self._commands.changed, ""
        self._run = TrainingRun(self._changed)

    @abstractmethod
    def snapshot(self) -> Snapshot:
        """Return how it stands; never waits."""

    @abstractmethod
    def _step(self) -> None:
        """Make a step of the run, on the thread."""

    @property
    def _is_pausing(self) -> bool:
        """Whether it pauses or stops when the step under way is over; asked under the lock."""
        waiting = {command.label for command in self._commands.queue}
        return self._run.state == "running" and (self._run.pause_after_step or bool({"pause", "stop"} & waiting))

    def wait_for_change(self, number: int, timeout_s: float) -> None:
        """Wait until a snapshot would have another number than this one, at most `timeout_s`."""
        with self._changed:
            self._changed.wait_for(lambda: self._commands.number != number, timeout_s)

    def wait(self, timeout_s: float | None = None) -> Snapshot:
        """Wait until nothing runs and nothing is queued; an interrupt pauses the run.

        Raises:
            TimeoutError: it takes longer.
        """
        try:
            with self._changed:
                if not self._changed.wait_for(self._is_idle, timeout_s):
                    raise TimeoutError(f"it is still {self._run.state}: wait longer, or pause()")
        except KeyboardInterrupt:
            with suppress(RuntimeError):  # closed meanwhile
                self.pause()
            raise
        return self.snapshot()

    def _is_idle(self) -> bool:
        return self._run.state != "running" and not self._commands.is_busy

    def run(self, steps: int | None = None) -> None:
        """Train for so many steps, as `Session.run`.

        Raises:
            ValueError: not a positive number.
        """
        steps = check_steps(steps)
        with self._changed:  # what the call means depends on what is under way and waits now
            stops = any(command.what == "stop" for command in self._commands.queue)
            goes_on = steps is None and self._run.state == "running" and not stops
            self._commands.submit(Command("run", lambda: self._run.begin(steps, continues=goes_on)))

    def step(self) -> None:
        """Train one step; a run under way pauses after it."""
        self._commands.submit(Command("step", self._run.begin_single_step))

    def pause(self) -> None:
        """Pause when the step under way is over."""
        self._commands.submit(Command("pause", self._run.pause))

    def stop(self) -> None:
        """End the run when the step under way is over."""
        self._commands.submit(Command("stop", self._run.stop))

    def cancel(self, ticket: int) -> bool:
        """Take a command out of the queue; False if its turn has come already."""
        return self._commands.cancel(ticket)

    def _next_due(self) -> Command | None:
        return Command(TRAIN, self._step) if self._run.is_due(bool(self._commands.queue)) else None
