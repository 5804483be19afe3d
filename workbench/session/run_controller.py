"""Base class of everything that is controlled like a session: a run on a thread, and commands. Independent of relays."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import suppress

from workbench.session.command_thread import Command, CommandThread
from workbench.session.snapshot import Snapshot
from workbench.session.training_run import TrainingRun, check_steps

TRAIN = "train"  # description of the command that makes a step of the run


class RunController(ABC):
    """The command queue, the run and the methods that control them; a subclass makes the steps.

    Invariant: one step or one command runs at a time, on the thread.

    Args:
        fail: shows the error of a command, see `CommandThread`.
    """

    _ended = ""  # why nothing more can be done; set by a subclass that closes

    def __init__(self, fail: Callable[[Command, BaseException], None]) -> None:
        self._commands = CommandThread(self._next_due, fail)
        self._changed = self._commands.changed
        self._run = TrainingRun(self._changed)

    @abstractmethod
    def snapshot(self) -> Snapshot:
        """Return the current state; never blocks on a step."""

    @abstractmethod
    def _step(self) -> None:
        """Make a step of the run, on the thread."""

    @property
    def _is_pausing(self) -> bool:
        """True if the run pauses or stops after the current step; call it under the lock."""
        waiting = {command.label for command in self._commands.queue}
        return self._run.state == "running" and (self._run.pause_after_step or bool({"pause", "stop"} & waiting))

    def wait_for_change(self, number: int, timeout_s: float) -> None:
        """Wait until the number of the snapshot differs from `number`, at most `timeout_s`."""
        with self._changed:
            self._changed.wait_for(lambda: self._commands.number != number, timeout_s)

    def wait(self, timeout_s: float | None = None) -> Snapshot:
        """Wait until nothing runs and nothing is queued; an interrupt pauses the run.

        Raises:
            TimeoutError: the run has not ended within `timeout_s`.
        """
        try:
            with self._changed:
                if not self._changed.wait_for(self._is_idle, timeout_s):
                    raise TimeoutError(f"it is still {self._run.state}: wait longer, or pause()")
        except KeyboardInterrupt:
            with suppress(RuntimeError):  # closed in the meantime
                self.pause()
            raise
        return self.snapshot()

    def _is_idle(self) -> bool:
        return self._run.state != "running" and not self._commands.is_busy

    def run(self, steps: int | None = None) -> None:
        """Train a number of steps, or resume the remaining ones; see `Session.run`.

        Raises:
            ValueError: not a positive integer.
        """
        steps = check_steps(steps)
        with self._changed:  # the meaning of the call depends on the current run and the queue
            # After a stop that still waits, this is a new run rather than the current one.
            stops = any(command.what == "stop" for command in self._commands.queue)
            continues = steps is None and self._run.state == "running" and not stops
            self._commands.submit(Command("run", lambda: self._run.begin(steps, continues=continues)))

    def step(self) -> None:
        """Train one step; a run in progress pauses after it."""
        self._commands.submit(Command("step", self._run.begin_single_step))

    def pause(self) -> None:
        """Pause after the current step."""
        self._commands.submit(Command("pause", self._run.pause))

    def stop(self) -> None:
        """End the run after the current step."""
        self._commands.submit(Command("stop", self._run.stop))

    def cancel_search(self) -> None:  # noqa: B027 - only some have searches
        """Cancel the search, the evaluation or the learning-rate finder that runs."""

    def cancel(self, ticket: int) -> bool:
        """Remove a command from the queue by its `Snapshot.tickets` entry; return False if it is not queued any more."""
        return self._commands.cancel(ticket)

    def _next_due(self) -> Command | None:
        return Command(TRAIN, self._step) if self._run.is_due(bool(self._commands.queue)) else None
