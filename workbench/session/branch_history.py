"""Steps, changes and the step to show, by branch: each has the past that led to it, from before it was forked too."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field

from workbench.session.shown_step import ShownStep
from workbench.session.snapshot_values import Change, StepRow
from workbench.session.statistics import StatisticsLog

MAX_SHOWN = 4


@dataclass
class BranchHistory:
    """What led to the state of one branch, in order."""

    steps: list[StepRow] = field(default_factory=list)
    changes: list[Change] = field(default_factory=list)
    statistics: StatisticsLog = field(default_factory=StatisticsLog)
    shown: ShownStep | None = None

    def copy(self) -> BranchHistory:
        """Copy the lists and statistics, so that two branches can go on from here."""
        return BranchHistory(list(self.steps), list(self.changes), deepcopy(self.statistics), self.shown)


class BranchHistories:
    """The pasts of all branches of a relay.

    Invariant: there is one for each branch that there was when `follow` was called last, and `here` is the present one's.
    Traces are large: there is a step to show for the branches that were present last, `MOST_SHOWN` of them.

    Args:
        branch: the present one.
        names: of all; of what happened on them before the session, nothing is known.
    """

    def __init__(self, branch: str, names: Collection[str]) -> None:
        self._by_name = {name: BranchHistory() for name in names}
        self.parents: dict[str, str] = {}  # by branch, the one that it was forked from
        self.current = self._by_name[branch]
        self._recent = [branch]  # the last one was present last

    def sync_branches(self, branch: str, names: Collection[str]) -> bool:
        """Take over the relay's branches, and which one is present; those that are new were forked from the last present one.

        Returns whether it has gone to a branch that there was before.
        """
        old, went = self.current, branch in self._by_name
        known = self.parents | {name: self._recent[-1] for name in names if name not in self._by_name}
        self.parents = {name: known[name] for name in names if name in known}
        self._by_name = {name: self._by_name.get(name) or old.copy() for name in names}
        self.current = self._by_name[branch]
        self._recent = [*(name for name in self._recent if name in names and name != branch), branch]
        for name in {*names} - {*self._recent[-MAX_SHOWN:]}:
            self._by_name[name].shown = None
        return went and self.current is not old

    def history_of(self, name: str) -> BranchHistory:
        """Return the past of a branch that exists."""
        return self._by_name[name]

    def other_steps(self) -> Mapping[str, Sequence[StepRow]]:
        """List for each other branch the steps that it does not share with the present one, after the last one that it shares."""
        return {
            name: tuple(past.steps[max(0, fork - 1) :])
            for name, past in self._by_name.items()
            if past is not self.current and (fork := _common_length(past.steps, self.current.steps)) < len(past.steps)
        }


def _common_length(a: Sequence[StepRow], b: Sequence[StepRow]) -> int:
    """How many steps two pasts have in common."""
    # By identity: a copied past holds the same rows, and other rows may be equal by chance.
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x is not y), min(len(a), len(b)))
