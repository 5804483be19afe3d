"""A race of branches as values: what each has done, and how far apart they are at equal compute. Run in `race_run.py`.

Compute is an estimate in floating-point operations (FLOP), see `count_flop`. At equal compute means: at the least that any
of two branches has spent; losses there are read between the two neighbouring measurements, on a straight line.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

from workbench.session.probe_verdict import LossChange, ProbeLosses
from workbench.session.snapshot_values import Change, StepRow

STEPS_PER_ROUND = (
    8  # steps of a branch before the next one's turn: as many batches are kept, and so seldom is there a switch
)


@dataclass(frozen=True)
class Racer:
    """One branch in a race.

    Attributes:
        name: of the branch.
        begun: number of its steps before the race.
        layers: number of its layers.
        steps: those of the race, in order.
        flop: estimated for each of them.
        measured: losses of the probe, each with the number of its steps in the race by then.
        not_measured: why there are none, or no more.
        left: why it has left the race; "" if it has not.
        parent: the branch that it was forked from; None where that was before the session.
        changes: that led to its present state, in order.
        tried: whether it was given a batch for a step after these, which failed.
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
        """After so many steps, from none on."""
        return tuple(accumulate(self.flop, initial=0))

    @cached_property
    def spent_s(self) -> Sequence[float]:
        """Seconds of its own steps alone, after so many of them."""
        return tuple(accumulate((row.seconds for row in self.steps), initial=0.0))

    @property
    def peak_bytes(self) -> int | None:
        """Highest device bytes in any of its steps; None before the first."""
        return max((row.peak_device_bytes for row in self.steps), default=None)

    @property
    def at_end(self) -> ProbeLosses | None:
        """Losses of the probe after its last step; None if they were not measured there."""
        return next((found for step, found in self.measured if step == len(self.steps)), None)

    @property
    def forked_at(self) -> int | None:
        """Steps that were finished when it was forked; None where that was before the session."""
        return next((c.step for c in self.changes if c.branch == self.name and c.what == f"⑂ {self.name}"), None)


@dataclass(frozen=True)
class Race:
    """Branches that train in turn on the same batches.

    Attributes:
        asked: steps of each branch.
        racers: in the order in which they were named; the first is the one that the others are compared with.
        is_over, is_paused: how it stands.
        ended: why before the end, if it is over; "" if every branch has made its steps or has left.
    """

    asked: int
    racers: Sequence[Racer]
    is_over: bool = False
    is_paused: bool = False
    ended: str = ""

    def __getitem__(self, name: str) -> Racer:
        """A branch by its name."""
        return next(racer for racer in self.racers if racer.name == name)

    def equal_flop(self, name: str) -> int:
        """Return the compute that this branch and the first one have both spent, in floating-point operations."""
        return min(self.racers[0].spent_flop[-1], self[name].spent_flop[-1])

    def train_difference(self, name: str) -> float | None:
        """Subtract the first branch's training loss at equal compute from this branch's; None where either has none there.

        Each step has a batch of its own, so this says less than `difference`.
        """
        first, other = (_train_loss(racer, self.equal_flop(name)) for racer in (self.racers[0], self[name]))
        return None if first is None or other is None else other - first

    def difference(self, name: str) -> LossChange | None:
        """Compare the probe's losses of the first branch and of this one at equal compute; None where their ranges do not meet.

        `Judged.change` is the mean difference over the probe's batches and `Judged.spread` its standard deviation.
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
    """Losses by compute spent, of the measurements with as many batches as there were at last."""
    # A probe of training batches fills up while branches train, so the first measurements may be of fewer.
    most = max((len(found.losses) for _, found in racer.measured), default=0)
    return [(racer.spent_flop[at], found.losses) for at, found in racer.measured if len(found.losses) == most]


def _train_loss(racer: Racer, flop: int) -> float | None:
    points = [(spent, row.loss) for spent, row in zip(racer.spent_flop[1:], racer.steps, strict=True)]
    return _interpolate(points, flop) if points and points[0][0] <= flop <= points[-1][0] else None


def _interpolate(points: Sequence[tuple[int, float]], at: int) -> float:
    """The value at a place in the range of the points, on a straight line between its neighbours."""
    i = bisect_left(points, at, key=lambda point: point[0])
    (right, high) = points[i]
    if right == at:
        return high
    (left, low) = points[i - 1]
    return low + (high - low) * (at - left) / (right - left)
