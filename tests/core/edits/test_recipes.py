"""Published recipes on a model of several stacks; their depths by step are in `tests/workbench/lessons`."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from l2l_core import LOOPED_RECIPES, RECIPES, Recipe, Relay, RelayConfig

STEPS, DEPTH = 16, 4
EVERY = {**RECIPES, **LOOPED_RECIPES}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.linear(x))


class Stacks(nn.Module):
    """A model of one or two stacks, each run as often as a number says."""

    def __init__(self, names: list[str], layers: int, loops: int) -> None:
        super().__init__()
        for more, name in enumerate(names):  # of different depths, or they would have to grow together
            self.add_module(name, nn.ModuleList(Block() for _ in range(layers + more)))
        self.head = nn.Linear(4, 4)
        self.names = names
        self.first_loops, self.second_loops = loops, loops

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for name, loops in zip(self.names, (self.first_loops, self.second_loops), strict=False):
            for _ in range(loops):
                for layer in self.get_submodule(name):
                    x = layer(x)
        return self.head(x)


def batch_of(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    drawn = torch.Generator().manual_seed(step)
    return torch.randn(4, 4, generator=drawn), torch.randn(4, 4, generator=drawn)


def run(recipe: Recipe, names: list[str], stack: str | None) -> list[tuple[int, int, list[str]]]:
    """Return layers, loops and skipped layers of the first stack at every step; check that no other stack changes."""
    torch.manual_seed(0)
    looped = recipe.name in LOOPED_RECIPES
    model, rows = Stacks(names, 2 if looped else DEPTH, DEPTH if looped else 1), list[tuple[int, int, list[str]]]()
    plan = recipe.plan(0, STEPS, DEPTH, stack)
    with Relay(model, device="cpu", loss=nn.MSELoss(), config=RelayConfig(micro_batches=2)) as relay:
        others = {name: (keys_of(relay, name), relay.loops.get(name)) for name in names[1:]}
        for step in range(STEPS):
            with relay.expect(batch_of(step)):
                plan.prepare(relay)
                skipped = list(plan.skip(relay))
                relay.step(batch_of(step), skip=skipped)
            rows.append((len(relay.stacks["first"]), relay.loops.get("first", 1), skipped))
            assert {name: (keys_of(relay, name), relay.loops.get(name)) for name in names[1:]} == others
    return rows


def keys_of(relay: Relay, stack: str) -> list[str]:
    return [unit.key for unit in relay.stacks[stack]]


@pytest.mark.parametrize("name", EVERY)
def test_a_recipe_for_a_named_stack_leaves_the_others_as_they_are(name: str) -> None:
    """The draws of skipped layers depend on keys, which are the same in the first stack of both models."""
    assert run(EVERY[name], ["first", "second"], "first") == run(EVERY[name], ["first"], None)


def test_a_recipe_without_the_name_is_refused_and_the_remedy_works() -> None:
    with pytest.raises(ValueError, match=r"stack=None: pass the name of the stack .*'first' \(4 layers\)"):
        run(RECIPES["MIDAS"], ["first", "second"], None)
    run(RECIPES["MIDAS"], ["first", "second"], "first")
