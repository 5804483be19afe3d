"""History of every branch: its steps, changes, statistics and latest trace, including those from before its fork."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

from workbench.session.snapshot_values import Change, HeldOutRow, ShownStep, StepRow
from workbench.session.statistics import StatisticsLog

MAX_SHOWN = 4


@dataclass
class BranchHistory:
    """Steps, changes and held-out measurements that led to the state of one branch, in order."""

    steps: list[StepRow] = field(default_factory=list)
    changes: list[Change] = field(default_factory=list)
    statistics: StatisticsLog = field(default_factory=StatisticsLog)
    shown: ShownStep | None = None
    held_out: list[HeldOutRow] = field(default_factory=list)

    def copy(self) -> BranchHistory:
        """Copy the history, so that two branches can extend it independently."""
        return BranchHistory(
            list(self.steps), list(self.changes), deepcopy(self.statistics), self.shown, list(self.held_out)
        )


class BranchHistories:
    """Histories of all branches of a relay.

    Invariant: there is one history for each branch of the last call of `sync_branches`, and `current` is the active
    branch's. Traces are large, so only the `MAX_SHOWN` most recently active branches keep a step to show.

    Args:
        branch: name of the active branch.
        names: names of all branches; their histories begin empty.
    """

    def __init__(self, branch: str, names: Collection[str]) -> None:
        self._by_name = {name: BranchHistory() for name in names}
        self.parents: dict[str, str] = {}  # branch -> the branch that it was forked from
        self.current = self._by_name[branch]
        self._recent = [branch]  # least recently active first

    def sync_branches(self, branch: str, names: Collection[str]) -> bool:
        """Update the branches and the active one; a new branch counts as forked from the branch that was active before.

        Returns:
            True if another branch that already existed became active.
        """
        previous, existed = self.current, branch in self._by_name
        parents = self.parents | {name: self._recent[-1] for name in names if name not in self._by_name}
        self.parents = {name: parents[name] for name in names if name in parents}
        self._by_name = {name: self._by_name.get(name) or previous.copy() for name in names}
        self.current = self._by_name[branch]
        self._recent = [*(name for name in self._recent if name in names and name != branch), branch]
        for name in {*names} - {*self._recent[-MAX_SHOWN:]}:
            self._by_name[name].shown = None
        return existed and self.current is not previous

    def history_of(self, name: str) -> BranchHistory:
        """Return the history of a branch that exists."""
        return self._by_name[name]

    def other_steps(self) -> Mapping[str, Sequence[StepRow]]:
        """Return the steps of each other branch from the last step that it shares with the active one."""
        return {
            name: tuple(history.steps[max(0, fork - 1) :])
            for name, history in self._by_name.items()
            if history is not self.current
            and (fork := _common_length(history.steps, self.current.steps)) < len(history.steps)
        }

    def state_dict(self, number_of: Callable[[StepRow | Change | HeldOutRow], int]) -> dict[str, Any]:
        """Return the histories without steps to show, as plain data and arrays; `number_of` returns the number of a row."""
        branches = {
            name: {
                "steps": list(map(number_of, history.steps)),
                "changes": list(map(number_of, history.changes)),
                "held_out": list(map(number_of, history.held_out)),
                "statistics": history.statistics.state_dict(),
            }
            for name, history in self._by_name.items()
        }
        return {"branches": branches, "parents": self.parents, "recent": self._recent}

    def load_state_dict(self, state: Mapping[str, Any], rows: Sequence[Any]) -> None:
        """Restore histories from `state_dict`; `rows` are the rows by number."""
        self._by_name = {}
        for name, plain in state["branches"].items():
            history = BranchHistory([rows[i] for i in plain["steps"]], [rows[i] for i in plain["changes"]])
            history.held_out = [rows[i] for i in plain["held_out"]]
            history.statistics.load_state_dict(plain["statistics"])
            self._by_name[name] = history
        self.parents, self._recent = dict(state["parents"]), list(state["recent"])
        self.current = self._by_name[self._recent[-1]]


def _common_length(a: Sequence[StepRow], b: Sequence[StepRow]) -> int:
    """Return the number of steps that two histories share."""
    # By identity: a copied history holds the same rows, and other rows may be equal by chance.
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x is not y), min(len(a), len(b)))
