"""Controller of the races of a session, which run one at a time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any

from workbench.session.command_thread import Command, CommandThread
from workbench.session.race_result import Race
from workbench.session.race_run import RaceRun
from workbench.session.session_state import SessionState
from workbench.session.trainer import Trainer


class RaceController:
    """The current race, if there is one.

    Invariant: read and written under the session's lock; the command queue is paused during a race.

    Args:
        commands, trainer, state: the session's.
    """

    def __init__(self, commands: CommandThread, trainer: Trainer, state: SessionState) -> None:
        self._commands, self._trainer, self._state = commands, trainer, state
        self._race_run: RaceRun | None = None

    @property
    def is_running(self) -> bool:
        """True if a race is in progress and not paused."""
        return self._race_run is not None and not self._race_run.is_paused

    @property
    def is_paused(self) -> bool:
        """True if a race is paused."""
        return self._race_run is not None and self._race_run.is_paused

    # -- on any thread -------------------------------------------------------------------------------------------------

    def submit(self, names: Sequence[str], steps: int, prepare: Callable[[], object] = lambda: None) -> Future[Race]:
        """Queue a race; see `Session.race`. `prepare` is called first; if it fails, there is no race."""
        self._check(names, steps)
        race: Future[Race] = Future()  # done when the race is over; the command's future, when it has begun
        command = Command(f"race {', '.join(names)}", partial(self._begin, names, steps, race, prepare), is_atomic=True)
        command.future.add_done_callback(partial(_forward_failure, race))
        self._commands.submit(command)
        return race

    def _check(self, names: Sequence[str], steps: int) -> None:
        if not_names := [name for name in names if not isinstance(name, str)]:
            raise ValueError(
                f"{not_names[0]!r} is not the name of a branch: give the names one by one, such as race('main', 'slim')"
            )
        if len(names) < 2:
            raise ValueError(
                f"{list(names)} is not enough for a race: name two branches or more; fork('name') makes one"
            )
        if repeated := [name for name in names if names.count(name) > 1]:
            raise ValueError(f"{repeated[0]!r} is named twice: a branch races once")
        if not isinstance(steps, int) or isinstance(steps, bool) or steps < 1:
            raise ValueError(f"steps={steps!r}: must be a positive integer, the number of steps of each branch")
        if why := self._trainer.lr_scheduler.why_not_restorable:
            raise ValueError(
                f"this session cannot race: {why}, so its state cannot be kept for each branch; add these methods, as in "
                "torch's schedulers, or race in a session without a scheduler, Session(relay, batches)"
            )

    def pause(self) -> bool:
        """Pause the race after the current step; return False if there is no race."""
        return self._set_flags(is_paused=True)

    def resume(self) -> bool:
        """Resume a paused race; return False if there is none.

        Raises:
            ValueError: the race is not paused.
        """
        with self._commands.changed:
            if self.is_running:
                raise ValueError(
                    "a race is in progress and needs no run(): Pause holds it and Stop ends it; run(100) trains 100 steps "
                    "after it"
                )
            return self.is_paused and self._set_flags(is_paused=False)

    def stop(self) -> bool:
        """End the race after the current step; return False if there is no race."""
        return self._set_flags(stops=True, is_paused=False)

    def _set_flags(self, **flags: bool) -> bool:
        with self._commands.changed:
            if self._race_run is None:
                return False
            vars(self._race_run).update(flags)
            self._commands.notify_change()
            return True

    # -- on the session's thread ---------------------------------------------------------------------------------------

    def next_turn(self) -> Command | None:
        """Return the next turn; None if there is no race, or it is paused."""
        race_run = self._race_run
        return None if race_run is None or race_run.is_paused else Command(race_run.label, self._turn)

    def close(self) -> None:
        """End the race in its current state, since the session ends."""
        if self._race_run is not None:
            self._race_run.close()
            self._release()

    def _begin(self, names: Sequence[str], steps: int, race: Future[Race], prepare: Callable[[], object]) -> None:
        prepare()
        race_run = RaceRun(names, steps, self._trainer, self._state, race)
        if race.set_running_or_notify_cancel():  # False: cancelled while it waited
            with self._commands.changed:
                self._race_run, self._commands.queue_paused, self._state.race = race_run, True, race_run.as_race
                self._state.refusal = None
                self._trainer.script.record_race(race_run.as_race)

    def _turn(self) -> None:
        assert self._race_run is not None
        try:
            self._race_run.run_turn()
        finally:
            if self._race_run.is_over:
                self._release()

    def _release(self) -> None:
        with self._commands.changed:
            self._race_run, self._commands.queue_paused = None, False
            self._commands.notify_change()


def _forward_failure(race: Future[Race], started: Future[Any]) -> None:
    """Report the cancellation or the error of the command that begins a race through the future of the race."""
    if started.cancelled():
        race.cancel()
    elif (error := started.exception()) is not None and race.set_running_or_notify_cancel():
        race.set_exception(error)
