"""Run of a race: branches train in turn on the same batches. A turn is one step of one branch.

    rounds     main 1   slim 1     │ main 2   slim 2     │ …
    batches    a taken, reused     │ b taken, reused     │

The random streams of a step follow from the branch's seed and step count, and `Relay.switch` restores everything else.
So a branch ends with the same bits as if it had trained alone on these batches, unless a schedule adds layers during the
race: new layers are numbered over all branches, and the initial values of a fresh layer follow from its number.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import replace
from typing import Any

from workbench.session.probe_verdict import ProbeLosses
from workbench.session.race_result import STEPS_PER_ROUND, Race, Racer
from workbench.session.session_state import SessionState
from workbench.session.trainer import Trainer

NUM_MEASUREMENTS = 8  # of the probe for each branch, besides the one before its first step


class RaceRun:
    """A race from its first turn to its last.

    Invariant: turns run on the session's thread alone; racers are written under the session's lock, which `as_race` takes
    too. A batch is taken when the first branch needs it, and marked as used when any branch was trained on it, so a stop
    loses none.

    Args:
        names, num_steps: branches, and number of steps of each.
        trainer, state: the session's.
        future: gets the race when it is over.

    Raises:
        ValueError: a branch does not exist.
    """

    def __init__(
        self, names: Sequence[str], num_steps: int, trainer: Trainer, state: SessionState, future: Future[Race]
    ) -> None:
        rows = {branch.name: branch for branch in state.relay_view.branches}
        if unknown := [name for name in names if name not in rows]:
            raise ValueError(f"there is no branch {unknown[0]!r} to race: there are {', '.join(sorted(rows))}")
        histories = state.relay_view.histories
        self._racers = {
            name: Racer(name, rows[name].steps, rows[name].layers, parent=histories.parents.get(name)) for name in names
        }
        self._home_branch = state.relay_view.branch
        self._scheduler_states = dict.fromkeys([self._home_branch, *names], trainer.lr_scheduler.state_dict())
        self._num_steps, self._trainer, self._state, self._future = num_steps, trainer, state, future
        self._changed = state.changed
        self._last_step = num_steps  # less if the batches end
        self._round_start = 0  # first step of the round
        self._round_batches: list[Any] = []
        self._measure_at = {round(i * num_steps / NUM_MEASUREMENTS) for i in range(1, NUM_MEASUREMENTS + 1)}
        self._is_used = True  # whether the last batch of the round is marked as used
        self.is_over = self.is_paused = self.stops = False
        self._ended = ""
        self._final: Race | None = None  # result, once the race is over

    def as_race(self) -> Race:
        """Return the current state of the race."""
        with self._changed:
            if self._final is not None:
                return self._final
            return Race(self._num_steps, tuple(self._racers.values()), self.is_over, self.is_paused, self._ended)

    @property
    def label(self) -> str:
        """Description of the next turn."""
        racer = None if self.stops else self._next_racer()
        return "end of the race" if racer is None else f"race: step {len(racer.steps) + 1} of {racer.name}"

    # -- turns ---------------------------------------------------------------------------------------------------------

    def run_turn(self) -> None:
        """Make one step of one branch, or end the race if no step is left."""
        racer = None if self.stops else self._next_racer()
        try:
            if racer is None:
                self._finish("it was stopped" if self.stops else self._ended)
            else:
                self._run_step(racer)
        except BaseException as error:
            self.abort(error)
            raise

    def _next_racer(self) -> Racer | None:
        """Return the first branch that has steps left in the round; None if the race has no steps left."""
        racing = [racer for racer in self._racers.values() if not racer.left and len(racer.steps) < self._last_step]
        slowest = min((len(racer.steps) // STEPS_PER_ROUND for racer in racing), default=0)
        return next((racer for racer in racing if len(racer.steps) // STEPS_PER_ROUND == slowest), None)

    def _run_step(self, racer: Racer) -> None:
        name, steps = racer.name, racer.steps
        try:
            self._trainer.switch_for_turn(name)
            self._trainer.lr_scheduler.load_state_dict(self._scheduler_states[name])
            if not steps:
                self._measure_probe(name)
        except Exception as error:
            self._drop_out(name, error)
            return
        try:
            batch = self._batch_of_step(len(steps))
        except StopIteration:
            self._last_step, self._ended = len(steps), "there are no more batches"
            return
        self._update(name, tried=True)
        try:
            row = self._trainer.race_step(
                batch, self._mark_batch_used if batch is self._round_batches[-1] else lambda: None
            )
            steps, layers = (*steps, row), len(self._trainer.relay.stack)  # a schedule may have edited the stack
            self._update(name, tried=False, steps=steps, flop=(*racer.flop, row.flop), layers=layers)
            self._state.activity = "scheduler"
            self._trainer.lr_scheduler.step(row.loss)
            self._scheduler_states[name] = self._trainer.lr_scheduler.state_dict()
            if len(steps) in self._measure_at or len(steps) == self._last_step:
                self._measure_probe(name)
        except Exception as error:
            self._drop_out(name, error)

    def _update(self, name: str, **fields: Any) -> None:
        with self._changed:
            changes = tuple(self._state.relay_view.histories.history_of(name).changes)
            self._racers[name] = replace(self._racers[name], changes=changes, **fields)

    def _batch_of_step(self, step: int) -> Any:
        """Return the batch of a step (from 0), taken from the source if it is new."""
        first = step // STEPS_PER_ROUND * STEPS_PER_ROUND
        if first != self._round_start:
            self._round_start = first
            self._round_batches.clear()
        if step - first == len(self._round_batches):
            self._round_batches.append(self._trainer.take_batch())
            self._is_used = False
        return self._round_batches[step - first]

    def _mark_batch_used(self) -> None:
        """Mark the last batch as used, since a branch was trained on it."""
        if not self._is_used:
            self._is_used = True
            self._trainer.batches.mark_used()

    def _measure_probe(self, name: str) -> None:
        racer, found = self._racers[name], self._trainer.probe.measure_before()
        if isinstance(found, ProbeLosses):
            self._update(name, measured=(*racer.measured, (len(racer.steps), found)), not_measured="")
        else:
            self._update(name, not_measured=found)

    def _drop_out(self, name: str, error: Exception) -> None:
        failure, step = self._state.explain_error(error), len(self._racers[name].steps) + 1
        first_line = failure.message.partition("\n")[0]
        self._update(name, left=f"{failure.error} in step {step} of the race: {first_line}")

    # -- the end -------------------------------------------------------------------------------------------------------

    def _restore_branch(self) -> None:
        self._trainer.switch_for_turn(self._home_branch)
        self._trainer.lr_scheduler.load_state_dict(self._scheduler_states[self._home_branch])

    def _finish(self, ended: str) -> None:
        self._restore_branch()
        self._future.set_result(self._record_end(ended))

    def _record_end(self, ended: str) -> Race:
        with self._changed:
            self._ended, self._round_batches, self.is_over, self.is_paused = ended, [], True, False
            self._final = self.as_race()
        self._state.log_race(self._final)
        return self._final

    def abort(self, error: BaseException) -> None:
        """End the race with an error, on its home branch if possible."""
        during = self._state.activity
        with suppress(Exception):
            self._restore_branch()
        self._record_end(f"{type(error).__name__}: {error}")
        self._state.activity = during  # part of the explanation of the error
        if not self._future.done():
            self._future.set_exception(error)

    def close(self) -> None:
        """End the race in its current state, since the session ends."""
        try:
            self._finish("the session was closed")
        except BaseException as error:
            self.abort(error)
