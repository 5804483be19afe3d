"""A race: branches train in turn on the same batches, each on its own clock. A turn is one step of one branch.

    round of 3 steps     main 1 2 3   slim 1 2 3   │ main 4 5 6   slim 4 5 6   │ …
    batches              a b c taken, kept, again  │ d e f taken, kept, again  │

The random streams of a step follow from the branch's seed and count of steps, and `Relay.switch` brings everything else
along: so a branch ends with the bits that it would have if it had trained alone on these batches, unless a schedule makes
layers during the race. Their names are counted over all branches, and the numbers that a fresh one begins with follow from its
name: these depend on whose turn came first.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from workbench.session.probe_verdict import ProbeLosses
from workbench.session.race_result import STEPS_PER_ROUND, Race, Racer
from workbench.session.session_state import SessionState
from workbench.session.snapshot_values import StepRow
from workbench.session.step_estimates import count_flop
from workbench.session.trainer import Trainer

NUM_MEASUREMENTS = 8  # of the probe, for each branch, beside the one before its first step


@dataclass(eq=False)
class RacerState:
    """What a branch has done so far; see `Racer`."""

    name: str
    begun: int
    layers: int
    steps: list[StepRow] = field(default_factory=list)
    flop: list[int] = field(default_factory=list)
    measured: list[tuple[int, ProbeLosses]] = field(default_factory=list)
    not_measured: str = ""
    left: str = ""
    tried: bool = False
    scheduler_state: Any = None  # state of the scheduler of the learning rate


class RaceRun:
    """A race from its first turn to its last.

    Invariant: `turn` and `finish` are called on the session's thread alone; lanes are written under the session's lock,
    which `value` takes too. A batch is taken when the first branch needs it, and is used once any branch has learned from
    it; so a stop loses none.

    Args:
        names, asked: branches, and steps of each.
        trainer, standing: of the session.
        future: gets the race when it is over.

    Raises:
        ValueError: there is no such branch.
    """

    def __init__(
        self, names: Sequence[str], num_steps: int, trainer: Trainer, state: SessionState, future: Future[Race]
    ) -> None:
        rows = {branch.name: branch for branch in state.relay_view.branches}
        if unknown := [name for name in names if name not in rows]:
            raise ValueError(f"there is no branch {unknown[0]!r} to race: there are {', '.join(sorted(rows))}")
        self._home_scheduler_state = trainer.lr_scheduler.state_dict()  # of home, if that does not race
        self._racers = [
            RacerState(name, rows[name].steps, rows[name].layers, scheduler_state=self._home_scheduler_state)
            for name in names
        ]
        self._num_steps, self._trainer, self._state, self._future = num_steps, trainer, state, future
        self._changed = state.changed
        self._home_branch = state.relay_view.branch
        self._last_step = num_steps  # less, where batches end
        self._round_start = 0  # step that the round begins with
        self._round_batches: list[Any] = []  # batches of the round
        self._measure_at = {round(i * num_steps / NUM_MEASUREMENTS) for i in range(1, NUM_MEASUREMENTS + 1)}
        self._is_used = True  # the last of them
        self.is_over = self.is_paused = self.stops = False
        self._ended = ""
        self._final: Race | None = None  # as it was at its end

    def as_race(self) -> Race:
        """Return the race as it is now."""
        with self._changed:
            if self._final is not None:
                return self._final
            racers = tuple(self._racer(lane) for lane in self._racers)
            return Race(self._num_steps, racers, self.is_over, self.is_paused, self._ended)

    def _racer(self, lane: RacerState) -> Racer:
        mirror = self._state.relay_view
        told = tuple(lane.steps), tuple(lane.flop), tuple(lane.measured), lane.not_measured, lane.left
        there = lane.name in (branch.name for branch in mirror.branches)  # it may be discarded when the race is over
        changes = tuple(mirror.history_of(lane.name).changes) if there else ()
        return Racer(lane.name, lane.begun, lane.layers, *told, mirror.parent_of(lane.name), changes, lane.tried)

    @property
    def label(self) -> str:
        """What the next turn does, in words."""
        lane = None if self.stops else self._next_racer()
        return "end of the race" if lane is None else f"race: step {len(lane.steps) + 1} of {lane.name}"

    # -- turns ---------------------------------------------------------------------------------------------------------

    def run_turn(self) -> None:
        """Make one step of one branch, or end the race if nothing is left to do. An error that is no branch's ends it too."""
        lane = None if self.stops else self._next_racer()
        try:
            if lane is None:
                self._finish("it was stopped" if self.stops else self._ended)
            else:
                self._run_step(lane)
        except BaseException as error:
            self.abort(error)
            raise

    def _next_racer(self) -> RacerState | None:
        """The first branch that has not made all steps of the round; None if none is left to race."""
        racing = [lane for lane in self._racers if not lane.left and len(lane.steps) < self._last_step]
        slowest = min((len(lane.steps) // STEPS_PER_ROUND for lane in racing), default=0)
        return next((lane for lane in racing if len(lane.steps) // STEPS_PER_ROUND == slowest), None)

    def _run_step(self, lane: RacerState) -> None:
        try:
            self._trainer.switch_for_turn(lane.name)
            self._trainer.lr_scheduler.load_state_dict(lane.scheduler_state)
            if not lane.steps:
                self._measure_probe(lane)
        except Exception as error:
            self._drop_out(lane, error)
            return
        try:
            batch = self._batch_of_step(len(lane.steps))
        except StopIteration:
            self._last_step, self._ended = len(lane.steps), "there are no more batches"
            return
        with self._changed:
            lane.tried = True
        try:
            row, result = self._trainer.race_step(
                batch, self._mark_batch_used if batch is self._round_batches[-1] else lambda: None
            )
            flop = count_flop(self._trainer.relay, batch, result.trace, result.samples)
            with self._changed:
                lane.tried = False
                lane.steps.append(row)
                lane.flop.append(flop)
                lane.layers = len(self._trainer.relay.stack)  # a schedule may have edited it
            self._state.activity = "scheduler"
            self._trainer.lr_scheduler.step(row.loss)
            lane.scheduler_state = self._trainer.lr_scheduler.state_dict()
            if len(lane.steps) in self._measure_at or len(lane.steps) == self._last_step:
                self._measure_probe(lane)
        except Exception as error:
            self._drop_out(lane, error)

    def _batch_of_step(self, step: int) -> Any:
        """The batch of a step, from 0: taken if no branch has asked for it yet."""
        first = step // STEPS_PER_ROUND * STEPS_PER_ROUND
        if first != self._round_start:
            self._round_start = first
            self._round_batches.clear()
        if step - first == len(self._round_batches):
            self._round_batches.append(self._trainer.take_batch())
            self._is_used = False
        return self._round_batches[step - first]

    def _mark_batch_used(self) -> None:
        """A branch has learned from the batch that was taken last."""
        if not self._is_used:
            self._is_used = True
            self._trainer.mark_batch_used()

    def _measure_probe(self, lane: RacerState) -> None:
        found = self._trainer.measure_probe()
        with self._changed:
            if isinstance(found, ProbeLosses):
                lane.measured.append((len(lane.steps), found))
            lane.not_measured = "" if isinstance(found, ProbeLosses) else found

    def _drop_out(self, lane: RacerState, error: Exception) -> None:
        failure = self._state.explain_error(error)
        first_line = failure.message.partition("\n")[0]
        with self._changed:
            lane.left = f"{failure.error} in step {len(lane.steps) + 1} of the race: {first_line}"

    # -- the end -------------------------------------------------------------------------------------------------------

    def _restore_branch(self) -> None:
        self._trainer.switch_for_turn(self._home_branch)
        self._trainer.lr_scheduler.load_state_dict(
            next(
                (lane.scheduler_state for lane in self._racers if lane.name == self._home_branch),
                self._home_scheduler_state,
            )
        )

    def _finish(self, ended: str) -> None:
        self._restore_branch()
        with self._changed:
            self._ended, self._round_batches, self.is_over, self.is_paused = ended, [], True, False
            self._final = self.as_race()
        self._state.log_race(self._final)
        self._future.set_result(self._final)

    def abort(self, error: BaseException) -> None:
        """End the race for an error, on the branch that it began on if that can be done."""
        during = self._state.activity
        with suppress(Exception):
            self._restore_branch()
        with self._changed:
            self._ended, self._round_batches, self.is_over, self.is_paused = (
                f"{type(error).__name__}: {error}",
                [],
                True,
                False,
            )
            self._final = self.as_race()
        self._state.log_race(self._final)
        self._state.activity = during  # the error is explained with it
        if not self._future.done():
            self._future.set_exception(error)

    def close(self) -> None:
        """The session ends: what the branches have done so far is the race."""
        try:
            self._finish("the session was closed")
        except BaseException as error:
            self.abort(error)
