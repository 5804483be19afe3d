"""Published recipes for depth that changes during training, each a schedule in one line, and how to race them.

    plans = {name: recipe.plan(relay.steps, steps=40, depth=12) for name, recipe in RECIPES.items()}
    wb = Workbench(relay, batches, schedule=ByBranch(plans))
    race = start_race(wb, plans, steps=40).result()

A recipe is written for a run of so many steps that ends, or begins, with `depth` layers. Papers time theirs for runs of many
thousands of steps; here the moments are shares of the run, so a short race shows how a recipe works and not which is best.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Protocol

from l2l_core import Depth, Edit, LayerDrop, Schedule
from l2l_core.edits import Steerable
from workbench.session import Race, Snapshot

Plan = Callable[[int, int, int], Schedule]  # of the first step, the number of steps, the depth


@dataclass(frozen=True)
class Recipe:
    """A published way to change the depth.

    Attributes:
        name: of the recipe.
        source: where it was published.
        what: it does, in one sentence.
        plan: the schedule of a run, given its first step, its number of steps, and the depth that it ends with (or begins
            with, where layers are dropped).
    """

    name: str
    source: str
    what: str
    plan: Plan


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
    ),
    Recipe(
        "G_stack",
        "Du et al., arXiv 2405.15319",
        "A quarter of the depth for an eighth of the steps, then the stack four times on top of itself, at once.",
        lambda first, steps, depth: Depth({first: depth // 4, first + steps // 8: depth}, "top", "top"),
    ),
    Recipe(
        "MIDAS",
        "Saunshi et al., arXiv 2409.19044",
        "A quarter of the depth more with every quarter of the steps; the block in the middle is copied.",
        lambda first, steps, depth: Depth(
            {first + i * steps // 4: (i + 1) * depth // 4 for i in range(4)}, "middle", "top"
        ),
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
        "Layers sit steps out more and more often, the last one up to half of the time.",
        lambda first, steps, depth: LayerDrop(
            lambda x, step: 0.5 * x * (1 - math.exp(-100 * max(0, step - first) / steps))
        ),
    ),
    Recipe(
        "pruning",
        "Men et al. (ShortGPT), arXiv 2403.03853",
        "After half of the steps, the quarter of the layers with the least influence is dropped; the rest goes on.",
        lambda first, steps, depth: Depth({first + steps // 2: depth - depth // 4}, shrink="influence"),
    ),
)


@dataclass(frozen=True)
class ByBranch(Schedule):
    """Follows another schedule on every branch; a branch without one stays as it is.

    Args:
        plans: schedules by name of the branch.
    """

    plans: Mapping[str, Schedule]

    def edits(self, relay: Steerable) -> Sequence[Edit]:
        return self._of(relay).edits(relay)

    def skip(self, relay: Steerable) -> Sequence[str]:
        return self._of(relay).skip(relay)

    def prepare(self, relay: Steerable) -> None:
        self._of(relay).prepare(relay)

    @property
    def trust(self) -> bool:  # type: ignore[override] - of any plan
        return any(plan.trust for plan in self.plans.values())

    def _of(self, relay: Steerable) -> Schedule:
        return self.plans.get(relay.branch, Schedule())  # type: ignore[attr-defined] - a relay has one


class Racing(Protocol):
    """Names what a race needs of a session or a workbench."""

    def snapshot(self) -> Snapshot: ...

    def fork(self, name: str) -> Future[object]: ...

    def switch(self, name: str) -> Future[object]: ...

    def race(self, *names: str, steps: int = 200) -> Future[Race]: ...


def start_race(bench: Racing, names: Sequence[str] | Mapping[str, object], steps: int) -> Future[Race]:
    """Fork a branch of each name from the present state, and race them against the present branch.

    The future gets a ValueError where there is such a branch already.
    """
    home = bench.snapshot().branch
    for name in names:
        bench.fork(name).result()
        bench.switch(home).result()
    return bench.race(home, *names, steps=steps)
