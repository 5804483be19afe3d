"""Published recipes: the depth at every step as they are described, and a race of them, whose branches train as if alone."""

from functools import partial

import pytest
import torch

from l2l_core import EmulatedDevice, LayerDrop, Relay, RelayConfig
from workbench.lessons.corpus import load_corpus
from workbench.lessons.demo import draw_batch, make_model
from workbench.lessons.demo_values import Settings
from workbench.lessons.recipes import RECIPES, ByBranch, start_race
from workbench.session import Session

STEPS, DEPTH = 16, 4
SMALL = Settings(layers=DEPTH, width=16, heads=2, context=8, rows=4, micro_batches=2)
DRAWN = torch.Generator().manual_seed(0)
BATCHES = [draw_batch(load_corpus().train, SMALL, DRAWN) for _ in range(STEPS + 2)]
DEPTHS = {
    "stacking": [1] * 2 + [2] * 2 + [4] * 12,
    "G_stack": [1] * 2 + [4] * 14,
    "MIDAS": [1] * 4 + [2] * 4 + [3] * 4 + [4] * 4,
    "LayerDrop": [4] * 16,
    "progressive drop": [4] * 16,
    "pruning": [4] * 8 + [3] * 8,
}


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
            losses.append(plan.step(relay, batch).loss)
            depths.append(len(relay.stack))
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


def test_every_recipe_names_its_source() -> None:
    assert all("arXiv" in recipe.source or "https://" in recipe.source for recipe in RECIPES.values())
    assert [recipe.name for recipe in RECIPES.values()] == list(RECIPES)


def test_branches_of_a_race_train_as_if_alone() -> None:
    with make_relay() as relay:
        plans = {name: recipe.plan(relay.steps, STEPS, DEPTH) for name, recipe in RECIPES.items()}
        with Session(relay, BATCHES[:STEPS], schedule=ByBranch(plans), probe=False) as session:
            race = start_race(session, plans, STEPS).result(60)
    assert [racer.name for racer in race.racers] == ["main", *RECIPES]
    for name in RECIPES:
        assert not race[name].left and [row.loss for row in race[name].steps] == alone(name)[1], name
    assert race["main"].layers == DEPTH and not race["main"].changes  # no plan: stays as it is


def test_a_name_that_is_taken_is_refused() -> None:
    with make_relay() as relay, Session(relay, BATCHES, probe=False) as session:
        with pytest.raises(ValueError, match="main"):
            start_race(session, ["main"], 2)
        assert session.snapshot().branch == "main"
