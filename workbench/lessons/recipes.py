"""Published recipes for a depth that changes during training, each a schedule in one line, and races between them.

    plans = {name: recipe.plan(relay.steps, steps=40, depth=12) for name, recipe in RECIPES.items()}
    wb = Workbench(relay, batches, schedule=ByBranch(plans))
    race = start_race(wb, plans, steps=40).result()

A recipe is for a run of a given number of steps that ends, or begins, with `depth` layers. Papers use many thousands of
steps; here the moments of change are shares of the run, so a short race shows how recipes work, not which is best. Shares of
steps and layers are rounded down, and a run in which a stage would vanish is refused.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Protocol

from l2l_core import Depth, Edit, LayerDrop, Schedule
from l2l_core.edits import SchedulableRelay
from workbench.session import Race, Snapshot

ScheduleFactory = Callable[[int, int, int], Schedule]  # of the first step, the number of steps, the depth


@dataclass(frozen=True)
class Recipe:
    """A published way to change the depth during training.

    Attributes:
        name: name of the recipe.
        source: publication.
        description: effect of the recipe in one sentence.
        schedule: makes the schedule of a run, see `plan`.
        least_steps, least_depth: smallest run in which every stage has a step and a layer.
    """

    name: str
    source: str
    description: str
    schedule: ScheduleFactory
    least_steps: int = 1
    least_depth: int = 1

    def plan(self, first: int, steps: int, depth: int) -> Schedule:
        """Make the schedule of a run.

        Args:
            first: number of finished steps at its beginning.
            steps: number of steps of the run.
            depth: depth at the end, or at the beginning if layers are dropped.

        Raises:
            ValueError: too few steps or layers for the stages of the recipe.
        """
        for name, value, least in (("steps", steps, self.least_steps), ("depth", depth, self.least_depth)):
            if value < least:
                raise ValueError(f"{name}={value} is too few for the stages of {self.name}: give it {least} or more")
        return self.schedule(first, steps, depth)


def _recipes(*recipes: Recipe) -> Mapping[str, Recipe]:
    return {recipe.name: recipe for recipe in recipes}


RECIPES = _recipes(
    Recipe(
        "stacking",
        "Gong et al., ICML 2019, https://proceedings.mlr.press/v97/gong19a.html",
        "A quarter of the depth for an eighth of the steps, half of it for a sixth, then all; each time the whole stack is "
        "copied on top of itself.",
        lambda first, steps, depth: Depth(
            {first: depth // 4, first + steps // 8: depth // 2, first + 3 * steps // 10: depth}, "top", "top"
        ),
        least_steps=8,
        least_depth=4,
    ),
    Recipe(
        "G_stack",
        "Du et al., arXiv 2405.15319",
        "A quarter of the depth for an eighth of the steps, then the stack four times on top of itself, at once.",
        lambda first, steps, depth: Depth({first: depth // 4, first + steps // 8: depth}, "top", "top"),
        least_steps=8,
        least_depth=4,
    ),
    Recipe(
        "MIDAS",
        "Saunshi et al., arXiv 2409.19044",
        "A quarter of the depth more with every quarter of the steps; the block in the middle is copied.",
        lambda first, steps, depth: Depth(
            {first + i * steps // 4: (i + 1) * depth // 4 for i in range(4)}, "middle", "top"
        ),
        least_steps=4,
        least_depth=4,
    ),
    Recipe(
        "LayerDrop",
        "Fan et al., arXiv 1909.11556",
        "All layers all the time, but each sits out a fifth of the steps, drawn at random.",
        lambda first, steps, depth: LayerDrop(0.2),
    ),
    Recipe(
        "progressive drop",
        "Zhang and He, arXiv 2010.13369",
        "Layers sit steps out, later ones more often, the last one half of the time. The rates rise in the first twentieth "
        "of the steps, as in the paper; in a run of a few dozen steps they are there at once.",
        lambda first, steps, depth: LayerDrop(
            lambda x, step: (
                0.5 * x * (1 - math.exp(-100 * max(0, step - first) / steps))
            )  # the paper's gamma is 100 / steps
        ),
    ),
    Recipe(
        "pruning",
        "Men et al. (ShortGPT), arXiv 2403.03853",
        "After half of the steps, the quarter of the layers with the least influence is dropped; the others train on.",
        lambda first, steps, depth: Depth({first + steps // 2: depth - depth // 4}, shrink="influence"),
        least_steps=2,
        least_depth=4,
    ),
)


@dataclass(frozen=True)
class ByBranch(Schedule):
    """Schedule that applies a different schedule on each branch; a branch without one is not edited.

    Args:
        plans: schedules by the branch's name.
    """

    plans: Mapping[str, Schedule]

    def edits(self, relay: SchedulableRelay) -> Sequence[Edit]:
        return self._schedule_of(relay).edits(relay)

    def skip(self, relay: SchedulableRelay) -> Sequence[str]:
        return self._schedule_of(relay).skip(relay)

    def prepare(self, relay: SchedulableRelay) -> None:
        self._schedule_of(relay).prepare(relay)

    @property
    def force(self) -> bool:  # type: ignore[override] - True if any plan needs it
        return any(plan.force for plan in self.plans.values())

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
