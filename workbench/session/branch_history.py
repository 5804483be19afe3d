"""Steps, changes and the step to show, by branch: each has the past that led to it, from before it was forked too."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field

from workbench.session.shown_step import ShownStep
from workbench.session.statistics import StatisticsLog
from workbench.session.values import Change, StepRow

MOST_SHOWN = 4


@dataclass
class Past:
    """What led to the state of one branch, in order."""

    steps: list[StepRow] = field(default_factory=list)
    changes: list[Change] = field(default_factory=list)
    statistics: StatisticsLog = field(default_factory=StatisticsLog)
    shown: ShownStep | None = None

    def copy(self) -> Past:
        """The same, to go its own way."""
        return Past(list(self.steps), list(self.changes), deepcopy(self.statistics), self.shown)


class Pasts:
    """The pasts of all branches of a relay.

    Invariant: there is one for each branch that there was when `follow` was called last, and `here` is the present one's.
    Traces are large: there is a step to show for the branches that were present last, `MOST_SHOWN` of them.

    Args:
        branch: the present one.
        names: of all; of what happened on them before the session, nothing is known.
    """

    def __init__(self, branch: str, names: Collection[str]) -> None:
        self._by_name = {name: Past() for name in names}
        self.parents: dict[str, str] = {}  # by branch, the one that it was forked from
        self.here = self._by_name[branch]
        self._recent = [branch]  # the last one was present last

    def follow(self, branch: str, names: Collection[str]) -> bool:
        """The relay may have other branches now, or another present one; those that are new were forked from here.

        Returns whether it has gone to a branch that there was before.
        """
        old, went = self.here, branch in self._by_name
        known = self.parents | {name: self._recent[-1] for name in names if name not in self._by_name}
        self.parents = {name: known[name] for name in names if name in known}
        self._by_name = {name: self._by_name.get(name) or old.copy() for name in names}
        self.here = self._by_name[branch]
        self._recent = [*(name for name in self._recent if name in names and name != branch), branch]
        for name in {*names} - {*self._recent[-MOST_SHOWN:]}:
            self._by_name[name].shown = None
        return went and self.here is not old

    def of(self, name: str) -> Past:
        """The past of a branch that there is."""
        return self._by_name[name]

    def elsewhere(self) -> Mapping[str, Sequence[StepRow]]:
        """By other branch, the steps that it has not in common with the present one, and the last common one before them."""
        return {
            name: tuple(past.steps[max(0, fork - 1) :])
            for name, past in self._by_name.items()
            if past is not self.here and (fork := _common(past.steps, self.here.steps)) < len(past.steps)
        }


def _common(a: Sequence[StepRow], b: Sequence[StepRow]) -> int:
    """How many steps two pasts have in common."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x is not y), min(len(a), len(b)))
