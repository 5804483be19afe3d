"""A run: how many steps are asked for and done, whether the next one is due, and why it failed. It knows no relay."""

from __future__ import annotations

from threading import Condition

from workbench.session.snapshot_values import Failure, State


def check_steps(steps: int | None) -> int | None:
    """Return a number of steps to run, or None.

    Raises:
        ValueError: not a positive number.
    """
    if steps is not None and (not isinstance(steps, int) or isinstance(steps, bool) or steps < 1):
        raise ValueError(f"steps={steps!r}: must be a positive integer, or None to go on")
    return steps


class TrainingRun:
    """The run of a session, from its beginning to its end; the next one begins where it has ended.

    Invariant: read and written under the session's lock; `failure` says why the state is "failed", and goes with it.

    Args:
        changed: the session's lock.

    Attributes:
        state: see `Snapshot`.
        done, left: steps made, and steps asked for and not made; None: no end.
        pauses: whether it pauses after the step under way.
        owes_step: whether commands wait until it has made a step, since it has just begun.
        failure: why it stopped.
    """

    def __init__(self, changed: Condition) -> None:
        self._changed = changed
        self.state: State = "idle"
        self.done = 0
        self.remaining: int | None = 0
        self.pause_after_step = False
        self.first_step_pending = False
        self.failure: Failure | None = None

    @property
    def target(self) -> int | None:
        """Steps of this run, made or not; None: no end."""
        return None if self.remaining is None else self.done + self.remaining

    def is_due(self, has_waiting: bool) -> bool:
        """Say whether the run's next step comes before whatever else is asked for."""
        return self.state == "running" and (self.first_step_pending or not has_waiting)

    def begin(self, steps: int | None, *, pause_after_step: bool = False, continues: bool = False) -> None:
        """Begin, or go on with the steps that are left (None); steps are added to those of a run under way.

        `goes_on` was asked of a run under way: it means nothing if that has come to its end meanwhile.
        """
        with self._changed:
            if continues and self.remaining == 0:
                return
            if self.remaining == 0 or (steps is not None and self.state != "running"):
                self.remaining, self.done = steps, 0
            elif steps is not None and self.remaining is not None:
                self.remaining += steps
            self.state, self.pause_after_step, self.first_step_pending, self.failure = (
                "running",
                pause_after_step,
                True,
                None,
            )

    def begin_single_step(self) -> None:
        """Make one step of those that are left, or else one of its own, and pause."""
        with self._changed:
            self.begin(None if self.remaining != 0 else 1, pause_after_step=True)

    def count_step(self) -> None:
        """Count a step that is made; the run halts after its last one, or if it is to pause."""
        with self._changed:
            self.done += 1
            if self.remaining is not None:
                self.remaining -= 1
            if self.remaining == 0 or self.pause_after_step:
                self.pause()

    def pause(self) -> None:
        """Pause; what does not run, and what has failed, stays as it is."""
        with self._changed:
            if self.state == "running":
                self.state = "idle" if self.remaining == 0 else "paused"

    def stop(self) -> None:
        """Drop the steps that are left, and what has failed with them."""
        with self._changed:
            self.remaining, self.failure, self.state = 0, None, "idle"

    def fail(self, failure: Failure) -> None:
        """Stop, with the steps that are left."""
        with self._changed:
            self.state, self.first_step_pending, self.failure = "failed", False, failure
