"""Results of a race of branches, and their comparison at equal compute. `race_run.py` runs a race.

Compute is an estimate in floating-point operations (FLOP), see `FlopCounter`. Two branches are compared at the lower of
their total compute; losses at that point are interpolated linearly between the two neighbouring measurements.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

from workbench.session.edit_text import describe_fork
from workbench.session.probe_verdict import LossChange, ProbeLosses
from workbench.session.snapshot_values import Change, StepRow

# Steps of a branch before the turn of the next one. One, so that all branches are equally far at any moment.
STEPS_PER_ROUND = 1


@dataclass(frozen=True)
class Racer:
    """One branch in a race.

    Attributes:
        name: name of the branch.
        begun: number of its steps before the race.
        layers: number of its layers.
        steps: its steps in the race, in order.
        flop: estimated compute of each step.
        measured: losses of the probe, each with the number of the branch's steps in the race before it.
        not_measured: reason why there are none, or no more.
        left: reason why it left the race; "" if it did not.
        parent: the branch that it was forked from; None if it was forked before the session.
        changes: changes that led to its current state, in order.
        tried: True if its next step was tried and failed.
    """

    name: str
    begun: int
    layers: int
    steps: Sequence[StepRow] = ()
    flop: Sequence[int] = ()
    measured: Sequence[tuple[int, ProbeLosses]] = ()
    not_measured: str = ""
    left: str = ""
    parent: str | None = None
    changes: Sequence[Change] = ()
    tried: bool = False

    @cached_property
    def spent_flop(self) -> Sequence[int]:
        """Compute after each number of steps, from 0 on."""
        return tuple(accumulate(self.flop, initial=0))

    @cached_property
    def spent_s(self) -> Sequence[float]:
        """Seconds of the branch's steps after each number of them, from 0 on."""
        return tuple(accumulate((row.seconds for row in self.steps), initial=0.0))

    @property
    def peak_bytes(self) -> int | None:
        """Peak device bytes over its steps; None before the first."""
        return max((row.peak_device_bytes for row in self.steps), default=None)

    @property
    def at_end(self) -> ProbeLosses | None:
        """Losses of the probe after its last step; None if they were not measured."""
        return next((found for step, found in self.measured if step == len(self.steps)), None)

    @property
    def forked_at(self) -> int | None:
        """Number of finished steps at its fork; None if it was forked before the session."""
        return next(
            (c.step for c in self.changes if c.branch == self.name and c.what == describe_fork(self.name)), None
        )


@dataclass(frozen=True)
class Race:
    """Branches that train in turn on the same batches.

    Attributes:
        `asked`: requested number of steps of each branch.
        racers: the branches, in the order of the call; the others are compared with the first.
        is_over, is_paused: state of the race.
        ended: reason for an early end; "" if every branch made its steps or left.
    """

    asked: int
    racers: Sequence[Racer]
    is_over: bool = False
    is_paused: bool = False
    ended: str = ""

    def __getitem__(self, name: str) -> Racer:
        """Return a branch by its name."""
        return next(racer for racer in self.racers if racer.name == name)

    def equal_flop(self, name: str) -> int:
        """Return the compute at which this branch is compared with the first one, in floating-point operations."""
        return min(self.racers[0].spent_flop[-1], self[name].spent_flop[-1])

    def train_difference(self, name: str) -> float | None:
        """Return this branch's training loss minus the first branch's at equal compute; None if either has no loss there.

        Training losses are of different batches, so this is less reliable than `difference`.
        """
        first, other = (_train_loss(racer, self.equal_flop(name)) for racer in (self.racers[0], self[name]))
        return None if first is None or other is None else other - first

    def difference(self, name: str) -> LossChange | None:
        """Compare the probe losses of the first branch and this one at equal compute.

        `LossChange.change` is the mean difference over the probe's batches, `LossChange.spread` its standard deviation.
        Returns None if the ranges of compute do not overlap.
        """
        of_both = [_losses_by_flop(racer) for racer in (self.racers[0], self[name])]
        if not all(of_both):
            return None
        flop = min(points[-1][0] for points in of_both)
        if flop < max(points[0][0] for points in of_both):
            return None
        count = min(len(losses) for points in of_both for _, losses in points)
        first, other = (
            tuple(_interpolate([(at, losses[i]) for at, losses in points], flop) for i in range(count))
            for points in of_both
        )
        return LossChange(ProbeLosses(first, 0.0), ProbeLosses(other, 0.0))


def _losses_by_flop(racer: Racer) -> Sequence[tuple[int, Sequence[float]]]:
    """Return (compute, losses) of the measurements with the final number of batches."""
    # A probe of training batches fills up during training, so the first measurements may have fewer batches.
    most = max((len(found.losses) for _, found in racer.measured), default=0)
    return [(racer.spent_flop[at], found.losses) for at, found in racer.measured if len(found.losses) == most]


def _train_loss(racer: Racer, flop: int) -> float | None:
    points = [(spent, row.loss) for spent, row in zip(racer.spent_flop[1:], racer.steps, strict=True)]
    return _interpolate(points, flop) if points and points[0][0] <= flop <= points[-1][0] else None


def _interpolate(points: Sequence[tuple[int, float]], at: int) -> float:
    """Interpolate linearly at a place within the range of the points."""
    i = bisect_left(points, at, key=lambda point: point[0])
    (right, high) = points[i]
    if right == at:
        return high
    (left, low) = points[i - 1]
    return low + (high - low) * (at - left) / (right - left)
