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

from workbench.session.flop import count_flop
from workbench.session.judgement import Measured
from workbench.session.race_values import ROUND, Race, Racer
from workbench.session.standing import Standing
from workbench.session.trainer import Trainer
from workbench.session.values import StepRow

MEASUREMENTS = 8  # of the probe, for each branch, beside the one before its first step


@dataclass(eq=False)
class Lane:
    """What a branch has done so far; see `Racer`."""

    name: str
    begun: int
    layers: int
    steps: list[StepRow] = field(default_factory=list)
    flop: list[int] = field(default_factory=list)
    measured: list[tuple[int, Measured]] = field(default_factory=list)
    not_measured: str = ""
    left: str = ""
    tried: bool = False
    rates: Any = None  # state of the scheduler of the learning rate


class Running:
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
        self, names: Sequence[str], asked: int, trainer: Trainer, standing: Standing, future: Future[Race]
    ) -> None:
        rows = {branch.name: branch for branch in standing.mirror.branches}
        if unknown := [name for name in names if name not in rows]:
            raise ValueError(f"there is no branch {unknown[0]!r} to race: there are {', '.join(sorted(rows))}")
        self._rates = trainer.rates.keep()  # of home, if that does not race
        self._lanes = [Lane(name, rows[name].steps, rows[name].layers, rates=self._rates) for name in names]
        self._asked, self._trainer, self._standing, self._future = asked, trainer, standing, future
        self._changed = standing.changed
        self._home = standing.mirror.branch
        self._end = asked  # less, where batches end
        self._first = 0  # step that the round begins with
        self._kept: list[Any] = []  # batches of the round
        self._marks = {round(i * asked / MEASUREMENTS) for i in range(1, MEASUREMENTS + 1)}
        self._is_used = True  # the last of them
        self.is_over = self.is_paused = self.stops = False
        self._ended = ""
        self._last: Race | None = None  # as it was at its end

    def value(self) -> Race:
        """Return the race as it is now."""
        with self._changed:
            if self._last is not None:
                return self._last
            racers = tuple(self._racer(lane) for lane in self._lanes)
            return Race(self._asked, racers, self.is_over, self.is_paused, self._ended)

    def _racer(self, lane: Lane) -> Racer:
        mirror = self._standing.mirror
        told = tuple(lane.steps), tuple(lane.flop), tuple(lane.measured), lane.not_measured, lane.left
        there = lane.name in (branch.name for branch in mirror.branches)  # it may be discarded when the race is over
        changes = tuple(mirror.past_of(lane.name).changes) if there else ()
        return Racer(lane.name, lane.begun, lane.layers, *told, mirror.parent_of(lane.name), changes, lane.tried)

    @property
    def said(self) -> str:
        """What the next turn does, in words."""
        lane = None if self.stops else self._next()
        return "end of the race" if lane is None else f"race: step {len(lane.steps) + 1} of {lane.name}"

    # -- turns ---------------------------------------------------------------------------------------------------------

    def turn(self) -> None:
        """Make one step of one branch, or end the race if nothing is left to do. An error that is no branch's ends it too."""
        lane = None if self.stops else self._next()
        try:
            if lane is None:
                self._finish("it was stopped" if self.stops else self._ended)
            else:
                self._move(lane)
        except BaseException as error:
            self.abort(error)
            raise

    def _next(self) -> Lane | None:
        """The first branch that has not made all steps of the round; None if none is left to race."""
        racing = [lane for lane in self._lanes if not lane.left and len(lane.steps) < self._end]
        slowest = min((len(lane.steps) // ROUND for lane in racing), default=0)
        return next((lane for lane in racing if len(lane.steps) // ROUND == slowest), None)

    def _move(self, lane: Lane) -> None:
        try:
            self._trainer.turn_to(lane.name)
            self._trainer.rates.put(lane.rates)
            if not lane.steps:
                self._measure(lane)
        except Exception as error:
            self._leave(lane, error)
            return
        try:
            batch = self._batch(len(lane.steps))
        except StopIteration:
            self._end, self._ended = len(lane.steps), "there are no more batches"
            return
        with self._changed:
            lane.tried = True
        try:
            row, result = self._trainer.race_on(batch, self._use if batch is self._kept[-1] else lambda: None)
            flop = count_flop(self._trainer.relay, batch, result.trace, result.samples)
            with self._changed:
                lane.tried = False
                lane.steps.append(row)
                lane.flop.append(flop)
                lane.layers = len(self._trainer.relay.stack)  # a schedule may have edited it
            self._standing.during = "scheduler"
            self._trainer.rates.step(row.loss)
            lane.rates = self._trainer.rates.keep()
            if len(lane.steps) in self._marks or len(lane.steps) == self._end:
                self._measure(lane)
        except Exception as error:
            self._leave(lane, error)

    def _batch(self, step: int) -> Any:
        """The batch of a step, from 0: taken if no branch has asked for it yet."""
        first = step // ROUND * ROUND
        if first != self._first:
            self._first = first
            self._kept.clear()
        if step - first == len(self._kept):
            self._kept.append(self._trainer.take())
            self._is_used = False
        return self._kept[step - first]

    def _use(self) -> None:
        """A branch has learned from the batch that was taken last."""
        if not self._is_used:
            self._is_used = True
            self._trainer.used()

    def _measure(self, lane: Lane) -> None:
        found = self._trainer.look_at_probe()
        with self._changed:
            if isinstance(found, Measured):
                lane.measured.append((len(lane.steps), found))
            lane.not_measured = "" if isinstance(found, Measured) else found

    def _leave(self, lane: Lane, error: Exception) -> None:
        failure = self._standing.excuse(error)
        first_line = failure.message.partition("\n")[0]
        with self._changed:
            lane.left = f"{failure.error} in step {len(lane.steps) + 1} of the race: {first_line}"

    # -- the end -------------------------------------------------------------------------------------------------------

    def _go_home(self) -> None:
        self._trainer.turn_to(self._home)
        self._trainer.rates.put(next((lane.rates for lane in self._lanes if lane.name == self._home), self._rates))

    def _finish(self, ended: str) -> None:
        self._go_home()
        with self._changed:
            self._ended, self._kept, self.is_over, self.is_paused = ended, [], True, False
            self._last = self.value()
        self._standing.tell_race(self._last)
        self._future.set_result(self._last)

    def abort(self, error: BaseException) -> None:
        """End the race for an error, on the branch that it began on if that can be done."""
        during = self._standing.during
        with suppress(Exception):
            self._go_home()
        with self._changed:
            self._ended, self._kept, self.is_over, self.is_paused = f"{type(error).__name__}: {error}", [], True, False
            self._last = self.value()
        self._standing.tell_race(self._last)
        self._standing.during = during  # the error is explained with it
        if not self._future.done():
            self._future.set_exception(error)

    def close(self) -> None:
        """The session ends: what the branches have done so far is the race."""
        try:
            self._finish("the session was closed")
        except BaseException as error:
            self.abort(error)
