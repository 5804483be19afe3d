"""Races between recipes for a depth that changes during training, on branches of one session.

    plans = {name: recipe.plan(relay.steps, steps=40, depth=12) for name, recipe in RECIPES.items()}
    wb = Workbench(relay, batches, schedule=ByBranch(plans))
    race = start_race(wb, plans, steps=40).result()

A short race shows how recipes work, not which is best.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Protocol

from l2l_core import Edit, Schedule
from l2l_core.edits import SchedulableRelay, refuse_own_step
from workbench.session import Race, Snapshot


@dataclass(frozen=True)
class ByBranch(Schedule):
    """Schedule that applies a different schedule on each branch; a branch without one is not edited.

    Args:
        plans: schedules by the branch's name.

    Raises:
        ValueError: one overrides `step`.
    """

    plans: Mapping[str, Schedule]

    def __post_init__(self) -> None:
        for plan in self.plans.values():
            refuse_own_step(plan, "a race")

    def edits(self, relay: SchedulableRelay) -> Sequence[Edit]:
        return self._schedule_of(relay).edits(relay)

    def skip(self, relay: SchedulableRelay) -> Sequence[str]:
        return self._schedule_of(relay).skip(relay)

    def skip_in_evaluation(self, relay: SchedulableRelay) -> Sequence[str]:
        return self._schedule_of(relay).skip_in_evaluation(relay)

    def is_forced(self, relay: SchedulableRelay) -> bool:
        return self._schedule_of(relay).is_forced(relay)

    def lr_factor(self, relay: SchedulableRelay) -> float | None:
        return self._schedule_of(relay).lr_factor(relay)

    def prepare(self, relay: SchedulableRelay) -> None:
        self._schedule_of(relay).prepare(relay)

    def _schedule_of(self, relay: SchedulableRelay) -> Schedule:
        return self.plans.get(relay.branch, Schedule())  # type: ignore[attr-defined] - a relay has one


class RaceableSession(Protocol):
    """Interface that a race needs of a session or a workbench."""

    def snapshot(self) -> Snapshot: ...

    def fork(self, name: str) -> Future[Any]: ...

    def switch(self, name: str) -> Future[Any]: ...

    def discard(self, name: str) -> Future[None]: ...

    def race(self, *names: str, steps: int = 200) -> Future[Race]: ...


def start_race(bench: RaceableSession, names: Sequence[str] | Mapping[str, object], steps: int) -> Future[Race]:
    """Fork a branch for each name from the present state, and race them against the present branch.

    Raises:
        ValueError: a name is empty, given twice or taken, or the race is refused; no branch is left behind.
    """
    snapshot = bench.snapshot()
    taken = {branch.name for branch in snapshot.branches}
    for name in names:
        if not isinstance(name, str) or not name.strip():
            raise ValueError(f"{name!r} is no name for a branch: give a text that is not empty")
        if name in taken:
            raise ValueError(
                f"{name!r} is a branch already, or given twice: give another name, or free it with discard({name!r})"
            )
        taken.add(name)
    for name in names:
        bench.fork(name).result()
        bench.switch(snapshot.branch).result()
    try:
        return bench.race(snapshot.branch, *names, steps=steps)
    except ValueError:
        for name in names:
            bench.discard(name).result()
        raise
