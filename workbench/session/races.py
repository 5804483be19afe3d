"""Races of a session: asked for, steered while one is run, and one at a time."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any

from workbench.session.race import Running
from workbench.session.race_values import Race
from workbench.session.standing import Standing
from workbench.session.trainer import Trainer
from workbench.session.worker import Command, Worker


class Races:
    """The race that is run, if there is one.

    Invariant: read and written under the session's lock; as long as a race is run, the worker holds what is queued.

    Args:
        worker, trainer, standing: of the session.
    """

    def __init__(self, worker: Worker, trainer: Trainer, standing: Standing) -> None:
        self._worker, self._trainer, self._standing = worker, trainer, standing
        self._running: Running | None = None

    @property
    def runs(self) -> bool:
        """Whether one is run, and not paused."""
        return self._running is not None and not self._running.is_paused

    @property
    def is_paused(self) -> bool:
        """Whether one waits to go on."""
        return self._running is not None and self._running.is_paused

    # -- called from anywhere ------------------------------------------------------------------------------------------

    def ask(self, names: Sequence[str], steps: int) -> Future[Race]:
        """Queue a race; see `Session.race`."""
        self._check(names, steps)
        race: Future[Race] = Future()  # done when the race is over; that of the command, when it has begun
        command = Command(f"race {', '.join(names)}", partial(self._begin, names, steps, race), is_whole=True)
        command.future.add_done_callback(partial(_pass_on, race))
        self._worker.submit(command)
        return race

    def _check(self, names: Sequence[str], steps: int) -> None:
        if not_names := [name for name in names if not isinstance(name, str)]:
            raise ValueError(
                f"{not_names[0]!r} is not the name of a branch: name them one by one, as race('main', 'slim')"
            )
        if len(names) < 2:
            raise ValueError(
                f"{list(names)} is not enough for a race: name two branches or more; fork('name') makes one"
            )
        if twice := [name for name in names if names.count(name) > 1]:
            raise ValueError(f"{twice[0]!r} is named twice: a branch races once")
        if not isinstance(steps, int) or isinstance(steps, bool) or steps < 1:
            raise ValueError(f"steps={steps!r}: must be a positive integer, which every branch makes")
        if why := self._trainer.rates.why_no_turns:
            raise ValueError(
                f"this session cannot race: {why}, so that its state cannot be kept for each branch; give it these methods, "
                "as the schedulers of torch have them, or race in a session without one, Session(relay, batches)"
            )

    def pause(self) -> bool:
        """Let the race wait after the step under way; False if none is run."""
        return self._steer(is_paused=True)

    def goes_on(self) -> bool:
        """Go on with a race that was paused; False if there is none.

        Raises:
            ValueError: it is being run, and not paused.
        """
        with self._worker.changed:
            if self.runs:
                raise ValueError(
                    "a race is being run, and goes on by itself: Pause holds it and Stop ends it; run(100) trains so many steps "
                    "when it is over"
                )
            return self.is_paused and self._steer(is_paused=False)

    def stop(self) -> bool:
        """End the race after the step under way; False if none is run."""
        return self._steer(stops=True, is_paused=False)

    def _steer(self, **how: bool) -> bool:
        with self._worker.changed:
            if self._running is None:
                return False
            vars(self._running).update(how)
            self._worker.touch()
            return True

    # -- on the session's thread ---------------------------------------------------------------------------------------

    def due(self) -> Command | None:
        """Return the next turn; None if no race is run, or it is paused."""
        running = self._running
        return None if running is None or running.is_paused else Command(running.said, self._turn)

    def close(self) -> None:
        """End the race where it stands, since the session ends."""
        if self._running is not None:
            self._running.close()
            self._let_go()

    def _begin(self, names: Sequence[str], steps: int, race: Future[Race]) -> None:
        running = Running(names, steps, self._trainer, self._standing, race)
        if race.set_running_or_notify_cancel():  # False: given up while it waited
            with self._worker.changed:
                self._running, self._worker.is_held, self._standing.race = running, True, running.value
                self._standing.refusal = None
                self._trainer.script.race(running.value)

    def _turn(self) -> None:
        assert self._running is not None
        try:
            self._running.turn()
        finally:
            if self._running.is_over:
                self._let_go()

    def _let_go(self) -> None:
        with self._worker.changed:
            self._running, self._worker.is_held = None, False
            self._worker.touch()


def _pass_on(race: Future[Race], begun: Future[Any]) -> None:
    """A race that could not begin says so."""
    if begun.cancelled():
        race.cancel()
    elif (error := begun.exception()) is not None and race.set_running_or_notify_cancel():
        race.set_exception(error)
