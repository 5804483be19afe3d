"""State of a run: steps requested and done, whether the next one is due, and why it failed."""

from __future__ import annotations

from threading import Condition

from workbench.session.snapshot_values import Failure, State


def check_steps(steps: int | None) -> int | None:
    """Return a number of steps to run, or None, unchanged.

    Raises:
        ValueError: not a positive integer.
    """
    if steps is not None and (not isinstance(steps, int) or isinstance(steps, bool) or steps < 1):
        raise ValueError(f"steps={steps!r}: must be a positive integer, or None to go on")
    return steps


class TrainingRun:
    """The run of a session, from its beginning to its end; it is reused for the next run.

    Invariant: read and written under the session's lock; `failure` is set exactly while `state` is "failed".

    Args:
        changed: the session's lock.

    Attributes:
        state: see `Snapshot`.
        done, remaining: steps made, and steps requested and not made (None: no end).
        pause_after_step: the run pauses after the current step.
        first_step_pending: the run has just begun, and commands wait for its first step.
        failure: why it stopped.
        notice: why it paused by itself; "" if it did not.
        dropped: steps that were requested and left out by `stop`; of a run without end 0.
    """

    def __init__(self, changed: Condition) -> None:
        self._changed = changed
        self.state: State = "idle"
        self.done = 0
        self.remaining: int | None = 0
        self.pause_after_step = False
        self.first_step_pending = False
        self.failure: Failure | None = None
        self.notice = ""
        self.dropped = 0

    @property
    def target(self) -> int | None:
        """Total number of steps of this run; None: no end."""
        return None if self.remaining is None else self.done + self.remaining

    def is_due(self, has_waiting: bool) -> bool:
        """Return True if the next step precedes the waiting commands, or if none waits."""
        return self.state == "running" and (self.first_step_pending or not has_waiting)

    def begin(self, steps: int | None, *, pause_after_step: bool = False, continues: bool = False) -> None:
        """Begin a run, or resume the remaining steps (None); steps are added to those of a run in progress.

        `continues` marks a request to resume a run in progress, which has no effect if the run has ended since.
        """
        with self._changed:
            if continues and self.remaining == 0:
                return
            if self.remaining == 0 or (steps is not None and self.state != "running"):
                self.remaining, self.done = steps, 0
            elif steps is not None and self.remaining is not None:
                self.remaining += steps
            self.state, self.failure, self.notice, self.dropped = "running", None, "", 0
            self.pause_after_step, self.first_step_pending = pause_after_step, True

    def begin_single_step(self) -> None:
        """Make one of the remaining steps, or else begin a run of one step, and pause after it."""
        with self._changed:
            self.begin(None if self.remaining != 0 else 1, pause_after_step=True)

    def count_step(self) -> None:
        """Count a finished step; the run pauses after its last one, or if it is to pause."""
        with self._changed:
            self.done += 1
            if self.remaining is not None:
                self.remaining -= 1
            if self.remaining == 0 or self.pause_after_step:
                self.pause()

    def restore(self, done: int, remaining: int | None) -> None:
        """Restore a run that was interrupted; it is paused if steps are left."""
        with self._changed:
            self.done, self.remaining, self.failure = done, remaining, None
            self.state = "idle" if remaining == 0 else "paused"

    def pause(self) -> None:
        """Pause; no effect unless the run is running."""
        with self._changed:
            if self.state == "running":
                self.state = "idle" if self.remaining == 0 else "paused"

    def pause_early(self, notice: str) -> None:
        """Pause for a reason to be shown; the remaining steps stay."""
        with self._changed:
            self.pause()
            self.notice = notice

    def stop(self) -> None:
        """Drop the remaining steps and the failure."""
        with self._changed:
            self.dropped = self.remaining or self.dropped
            self.remaining, self.failure, self.state, self.notice = 0, None, "idle", ""

    def fail(self, failure: Failure) -> None:
        """Stop with a failure; the remaining steps stay."""
        with self._changed:
            self.state, self.first_step_pending, self.failure = "failed", False, failure
