"""What can be seen of a session, and waited for: it never waits for a step by looking."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from contextlib import suppress
from threading import Condition

from l2l_core import Relay
from workbench.session.command_thread import CommandThread
from workbench.session.progress import progress_bar, update_bar
from workbench.session.race_controller import RaceController
from workbench.session.session_state import SessionState
from workbench.session.snapshot import Snapshot
from workbench.session.training_run import TrainingRun


class ObservableSession(ABC):
    """The part of a session that looks; questions are in `Questions`, commands in `Session`.

    Invariant: everything here is read under the session's lock.
    """

    relay: Relay
    _commands: CommandThread
    _changed: Condition
    _state: SessionState
    _run: TrainingRun
    _races: RaceController

    @abstractmethod
    def pause(self) -> None:
        """Pause when the step under way is over."""

    def __repr__(self) -> str:
        snapshot = self.snapshot()
        loss = f", loss {snapshot.steps[-1].loss:.4g}" if snapshot.steps else ""
        return f"<{type(self).__name__} of {snapshot.model}: {snapshot.state} {snapshot.state_words}{loss}>"

    # -- looking -------------------------------------------------------------------------------------------------------

    @property
    def has_shelf(self) -> bool:
        """Whether weights are in files, where a stash may go, too."""
        return self.relay.shelf is not None

    def snapshot(self) -> Snapshot:
        """The session as it is now, in the middle of a step too; never waits for the step."""
        return self._state.snapshot()

    def wait_for_change(self, number: int, timeout_s: float) -> None:
        """Wait until a snapshot would have another number than this one, at most `timeout_s`."""
        with self._changed:
            self._changed.wait_for(lambda: self._commands.number != number, timeout_s)

    def wait(self, timeout_s: float | None = None, *, progress: bool = False) -> Snapshot:
        """Wait until nothing runs and nothing is queued; an interrupt pauses the run.

        Args:
            timeout_s: give up after so many seconds.
            progress: show a progress bar.

        Raises:
            TimeoutError: it takes longer.
        """
        until_s = float("inf") if timeout_s is None else time.monotonic() + timeout_s
        with progress_bar(progress) as bar:
            try:
                while not self._has_settled(until_s):
                    update_bar(bar, self.snapshot())
            except KeyboardInterrupt:
                with suppress(RuntimeError):  # closed meanwhile
                    self.pause()
                raise
            update_bar(bar, now := self.snapshot())
            return now

    def _has_settled(self, until_s: float) -> bool:
        with self._changed:
            # A paused race holds the queue: nothing that waits there would come to its turn.
            is_busy = (self._commands.is_busy or self._state.pending is not None) and not self._races.is_paused
            runs = self._run.state == "running" and not self._races.is_paused
            if self._run.state == "closed" or not (runs or is_busy or self._races.is_running):
                return True
            if time.monotonic() >= until_s:
                raise TimeoutError(
                    f"the session is still {self._run.state} after step {self.relay.steps}: wait longer, or pause()"
                )
            self._changed.wait(min(until_s - time.monotonic(), 0.2))
            return False
