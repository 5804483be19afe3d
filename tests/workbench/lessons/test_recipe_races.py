"""Published recipes: the depth at every step as they are described, and a race of them, whose branches train as if alone."""

from collections.abc import Callable, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from l2l_core import (
    RECIPES,
    ActiveLayers,
    Depth,
    Drop,
    Edit,
    EmulatedDevice,
    LayerDrop,
    Relay,
    RelayConfig,
    Schedule,
    WarmupStableDecay,
)
from workbench.lessons.corpus import load_corpus
from workbench.lessons.demo import draw_batch, make_model
from workbench.lessons.demo_values import Settings
from workbench.lessons.recipe_races import ByBranch, start_race
from workbench.session import Session

STEPS, DEPTH = 16, 4
SMALL = Settings(layers=DEPTH, width=16, heads=2, context=8, rows=4, micro_batches=2)
DRAWN = torch.Generator().manual_seed(0)
TEXT = load_corpus().train
BATCHES = [draw_batch(TEXT, SMALL, DRAWN) for _ in range(STEPS + 2)]
DEPTHS = {
    "scratch": [4] * 16,
    "stacking": [1] * 2 + [2] * 2 + [4] * 12,
    "G_stack": [1] * 2 + [4] * 14,
    "MIDAS": [1] * 4 + [2] * 4 + [3] * 4 + [4] * 4,
    "staged training": [2] * 8 + [4] * 8,
    "doubling once": [2] * 8 + [4] * 8,
    "one layer, late": [1] * 12 + [4] * 4,  # running
    "zero layers, late": [0] * 12 + [4] * 4,
    "LayerDrop": [4] * 16,
    "progressive drop": [4] * 16,
    "pruning": [4] * 8 + [3] * 8,
}
SOURCES = {
    "scratch": "control",
    "stacking": "gong19a",
    "G_stack": "2405.15319",
    "MIDAS": "2409.19044",
    "staged training": "2203.06211",
    "doubling once": "2605.13405",
    "one layer, late": "2511.04981",
    "zero layers, late": "2511.04981",
    "LayerDrop": "1909.11556",
    "progressive drop": "2010.13369",
    "pruning": "2403.03853",
}
STAGES = {"stacking": 3, "G_stack": 2, "MIDAS": 4, "pruning": 1}  # values of the depth that the schedule sets


def make_relay() -> Relay:
    optimizer = partial(torch.optim.AdamW, lr=3e-3)
    relay = Relay(make_model(SMALL), optimizer, device=EmulatedDevice(), config=RelayConfig(micro_batches=2))
    for batch in BATCHES[STEPS:]:  # recipes count from the step at which they begin
        relay.step(batch)
    return relay


def alone(name: str) -> tuple[list[int], list[float]]:
    """Layers at every step, and its losses, of a run that follows one recipe."""
    with make_relay() as relay:
        plan, depths, losses = RECIPES[name].plan(relay.steps, STEPS, DEPTH), [], []
        for batch in BATCHES[:STEPS]:
            left_out = len(plan.skip(relay)) if isinstance(plan, ActiveLayers) else 0
            losses.append(plan.step(relay, batch).loss)
            depths.append(len(relay.stack) - left_out)
    return depths, losses


@pytest.mark.parametrize("name", RECIPES)
def test_the_depth_is_as_described(name: str) -> None:
    assert alone(name)[0] == DEPTHS[name]


def test_layers_sit_out_as_often_as_described() -> None:
    """LayerDrop: a fifth of the time. Progressive: hardly at the start, at the end the more often the later they come."""
    with make_relay() as relay:
        keys = [unit.key for unit in relay.stack]
        drop, progressive = (RECIPES[name].plan(10, 1000, DEPTH) for name in ("LayerDrop", "progressive drop"))
        assert isinstance(drop, LayerDrop) and isinstance(progressive, LayerDrop)
        assert set(drop.rates(keys, 10).values()) == {0.2}
        assert set(progressive.rates(keys, 10).values()) == {0.0}
        assert list(progressive.rates(keys, 1010).values()) == pytest.approx([0, 1 / 6, 1 / 3, 1 / 2])


def test_progressive_drop_rises_as_it_says() -> None:
    """To its end within the first twentieth of a run, so in a short one at once."""

    def last_rates(steps: int, *at: int) -> list[float]:
        progressive = RECIPES["progressive drop"].plan(0, steps, DEPTH)
        assert isinstance(progressive, LayerDrop)
        return [progressive.rates(["first", "last"], step)["last"] for step in at]

    assert last_rates(1000, 0, 10, 50) == pytest.approx([0, 0.316, 0.497], abs=1e-3)
    assert last_rates(24, 0, 1) == pytest.approx([0, 0.492], abs=1e-3)


def test_every_recipe_names_its_source() -> None:
    assert {name: [source for source in {*SOURCES.values()} if source in RECIPES[name].source] for name in RECIPES} == {
        name: [source] for name, source in SOURCES.items()
    }


@pytest.mark.parametrize("name", STAGES)
def test_the_shortest_run_has_all_stages_and_a_shorter_one_is_refused(name: str) -> None:
    recipe = RECIPES[name]
    shortest = recipe.plan(7, recipe.least_steps, recipe.least_depth)
    assert isinstance(shortest, Depth) and isinstance(shortest.depth, dict)
    assert len(shortest.depth) == len(set(shortest.depth.values())) == STAGES[name]
    assert all(7 + (name == "pruning") <= step < 7 + recipe.least_steps for step in shortest.depth)
    with pytest.raises(ValueError, match=rf"steps={recipe.least_steps - 1} .*{name}.* {recipe.least_steps} or more"):
        recipe.plan(7, recipe.least_steps - 1, DEPTH)
    with pytest.raises(ValueError, match=rf"depth=3 .*{name}.* 4 or more"):
        recipe.plan(7, STEPS, 3)


@pytest.mark.slow
def test_branches_of_a_race_train_as_if_alone() -> None:
    with make_relay() as relay:
        plans = {name: recipe.plan(relay.steps, STEPS, DEPTH) for name, recipe in RECIPES.items()}
        with Session(relay, BATCHES[:STEPS], schedule=ByBranch(plans), probe=False) as session:
            race = start_race(session, plans, STEPS).result(60)
    assert [racer.name for racer in race.racers] == ["main", *RECIPES]
    for name in RECIPES:
        assert not race[name].left and [row.loss for row in race[name].steps] == alone(name)[1], name
    assert race["main"].layers == DEPTH and not race["main"].changes  # no plan: stays as it is


class Everything(Schedule):
    """Schedule that returns something else than the default everywhere."""

    def edits(self, relay: Any) -> Sequence[Edit]:
        return [Drop(0)]

    def skip(self, relay: Any) -> Sequence[str]:
        return ["skipped"]

    def skip_in_evaluation(self, relay: Any) -> Sequence[str]:
        return ["skipped in evaluation"]

    def lr_factor(self, relay: Any) -> float | None:
        return 0.5

    def is_forced(self, relay: Any) -> bool:
        return True

    def prepare(self, relay: Any) -> None:
        relay.prepared.append(self)


@pytest.mark.parametrize("wrap", [lambda one: ByBranch({"main": one}), lambda one: Schedule() + one])
def test_schedules_of_schedules_forward_all_that_a_session_or_study_reads(wrap: Callable[[Schedule], Schedule]) -> None:
    one, relay = Everything(), SimpleNamespace(branch="main", prepared=[])
    whole = wrap(one)
    read = [name for name in vars(Schedule) if not name.startswith("_") and name not in ("force", "step", "prepare")]
    assert {*read} == {*vars(Everything)} - {"__module__", "__doc__", "prepare"} - {*dir(object)}, "all are compared"
    for name in read:
        assert getattr(whole, name)(relay) == getattr(one, name)(relay) != getattr(Schedule(), name)(relay), name
    whole.prepare(relay)
    assert relay.prepared == [one]


def test_a_branch_is_forced_by_its_own_schedule_alone() -> None:
    plans = ByBranch({"main": LayerDrop(0.5), "forced": LayerDrop(0.5, force=True)}) + WarmupStableDecay(9)
    assert [plans.is_forced(SimpleNamespace(branch=name)) for name in ("main", "forced", "other")] == [
        False,
        True,
        False,
    ]


def test_a_study_of_branches_evaluates_the_layers_that_train() -> None:
    with make_relay() as relay:
        plans = ByBranch({"main": ActiveLayers(1)})
        plans.step(relay, BATCHES[0])
        assert plans.skip_in_evaluation(relay) == [unit.key for unit in relay.stack[1:]]


@pytest.mark.parametrize(
    "names, steps, said",
    [
        (["new", "main"], 2, "'main' is a branch already"),
        (["new", "new"], 2, "given twice"),
        (["new", " "], 2, "is no name"),
        (["new", "newer"], 0, "steps=0"),
    ],
)
def test_what_cannot_race_is_refused_and_leaves_no_branch(names: list[str], steps: int, said: str) -> None:
    with make_relay() as relay, Session(relay, BATCHES, probe=False) as session:
        with pytest.raises(ValueError, match=said):
            start_race(session, names, steps)
        now = session.snapshot()
        assert now.branch == "main" and [branch.name for branch in now.branches] == ["main"]
        assert all(not change.what.startswith("forked") for change in now.changes) or steps == 0, (
            "nothing was forked to begin with"
        )
