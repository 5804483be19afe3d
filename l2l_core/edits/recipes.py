"""Published recipes for a depth that changes during training, each a schedule in one line.

    schedule = RECIPES["one layer, late"].plan(0, steps=1000, depth=12) + WarmupStableDecay(1000, warmup=20, decay=100)
    for batch in batches:
        schedule.step(relay, batch)

A recipe is for a run of a given number of steps that ends, or begins, with `depth` layers. Recipes that grow begin with a model
of the full depth, whose upper layers are dropped or skipped before the first step. Papers use many thousands of steps; here the
moments of change are shares of the run, rounded down, and a run in which a stage would vanish is refused.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from l2l_core.edits.depth import Depth
from l2l_core.edits.loops import Looping
from l2l_core.edits.schedules import Schedule
from l2l_core.edits.skip_schedules import ActiveLayers, LayerDrop

ScheduleFactory = Callable[[int, int, int], Schedule]  # of the first step, the number of steps, the depth


@dataclass(frozen=True)
class Recipe:
    """A published way to change the depth during training.

    Attributes:
        name: name of the recipe.
        source: publication.
        description: effect of the recipe in one sentence.
        assumes: assumptions about model and training.
        needs: requirements on optimizer state and learning rate.
        schedule: makes the schedule of a run, see `plan`.
        least_steps, least_depth: smallest run in which every stage has a step and a layer.

    Example:
        >>> from l2l_core import RECIPES
        >>> RECIPES["LayerDrop"].source
        'Fan et al., arXiv 1909.11556'
    """

    name: str
    source: str
    description: str
    assumes: str
    needs: str
    schedule: ScheduleFactory
    least_steps: int = 1
    least_depth: int = 1

    def plan(self, first: int, steps: int, depth: int, stack: str | None = None) -> Schedule:
        """Make the schedule of a run.

        Args:
            first: number of finished steps at its beginning.
            steps: number of steps of the run.
            depth: depth at the end, or at the beginning if layers are dropped.
            stack: dotted name of the stack, as in ``relay.stacks``, if there are several. Without it, "LayerDrop" and
                "progressive drop" are for all stacks, and other recipes are refused at their first step.

        Raises:
            ValueError: too few steps or layers for the stages of the recipe.
        """
        for name, value, least in (("steps", steps, self.least_steps), ("depth", depth, self.least_depth)):
            if value < least:
                raise ValueError(f"{name}={value} is too few for the stages of {self.name}: give it {least} or more")
        schedule: Any = self.schedule(first, steps, depth)  # of a class with a field `stack`
        return schedule if stack is None else replace(schedule, stack=stack)


def _recipes(*recipes: Recipe) -> Mapping[str, Recipe]:
    return {recipe.name: recipe for recipe in recipes}


_COPIES = "Optimizer state of the copies: copied. The learning rate does not change; no reset, no new warm-up."
_LATE = (
    "New layers begin without optimizer state; the others keep theirs. Warm-up, constant rate, decay at the end; the growth is "
    "in the constant part. Initial weights and rates by muP, from a small model whose rate is tuned: `mup_scaling`. All layers "
    "are in the model from the first step, so they have the groups, rates and initial weights of the whole model."
)

RECIPES = _recipes(
    Recipe(
        "scratch",
        "the control of all papers",
        "All layers from the first step to the last.",
        "None.",
        "Any rate; for a comparison the same one as the other recipes.",
        lambda first, steps, depth: Depth({first: depth}, "top", "top"),
    ),
    Recipe(
        "stacking",
        "Gong et al., ICML 2019, https://proceedings.mlr.press/v97/gong19a.html",
        "A quarter of the depth for an eighth of the steps, half of it for a sixth, then all; each time the whole stack is "
        "copied on top of itself.",
        "Layers of one kind, so that a copy of a layer is useful higher up.",
        _COPIES,
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
        "The small model's loss jumps at the growth, and enough steps are left to recover.",
        _COPIES,
        lambda first, steps, depth: Depth({first: depth // 4, first + steps // 8: depth}, "top", "top"),
        least_steps=8,
        least_depth=4,
    ),
    Recipe(
        "MIDAS",
        "Saunshi et al., arXiv 2409.19044",
        "A quarter of the depth more with every quarter of the steps; the block in the middle is copied.",
        "Layers in the middle are more alike than the first and the last.",
        _COPIES,
        lambda first, steps, depth: Depth(
            {first + i * steps // 4: (i + 1) * depth // 4 for i in range(4)}, "middle", "top"
        ),
        least_steps=4,
        least_depth=4,
    ),
    Recipe(
        "staged training",
        "Shen et al., arXiv 2203.06211",
        "Half of the depth for half of the steps, then every layer is followed by its copy, with half of its optimizer state.",
        "Two copies in sequence share the work of one layer; the scale 1/2 is a choice made here.",
        "Optimizer state of the copies: first moments times 1/2, second moments times 1/4; the rate does not change.",
        lambda first, steps, depth: Depth(
            {first: depth // 2, first + steps // 2: depth}, "interleaved", "top", optimizer=0.5
        ),
        least_steps=2,
        least_depth=2,
    ),
    Recipe(
        "doubling once",
        "arXiv 2605.13405",
        "Half of the depth for half of the steps, then the stack is copied on top of itself.",
        "A growth by two is the most reliable; gains shrink with the tokens per parameter.",
        _COPIES,
        lambda first, steps, depth: Depth({first: depth // 2, first + steps // 2: depth}, "top", "top"),
        least_steps=2,
        least_depth=2,
    ),
    Recipe(
        "one layer, late",
        "arXiv 2511.04981",
        "One layer for four fifths of the steps, then all at once; the others have the initial weights of the whole model.",
        "A deep model recovers from new random layers within the last fifth.",
        _LATE,
        lambda first, steps, depth: ActiveLayers({first: 1, first + 4 * steps // 5: depth}),
        least_steps=5,
        least_depth=2,
    ),
    Recipe(
        "zero layers, late",
        "arXiv 2511.04981",
        "Embedding and head alone for four fifths of the steps, then all layers at once, with their initial weights.",
        "A layer's output is as its input, so that a model without running layers computes.",
        _LATE,
        lambda first, steps, depth: ActiveLayers({first: 0, first + 4 * steps // 5: depth}),
        least_steps=5,
    ),
    Recipe(
        "LayerDrop",
        "Fan et al., arXiv 1909.11556",
        "All layers all the time, but each sits out a fifth of the steps, drawn at random.",
        "Layers are residual; their outputs are not rescaled.",
        "The optimizer state of a skipped layer does not change in that step; the rate does not change.",
        lambda first, steps, depth: LayerDrop(0.2),
    ),
    Recipe(
        "progressive drop",
        "Zhang and He, arXiv 2010.13369",
        "Layers sit steps out, later ones more often, the last one half of the time. The rates rise in the first twentieth "
        "of the steps, as in the paper; in a run of a few dozen steps they are there at once.",
        "Layers are residual and normalised at their beginning; their outputs are not rescaled.",
        "As LayerDrop. The paper raises the rate, which this recipe does not.",
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
        "A layer that hardly turns its input is not needed; the loss jumps, and the steps that follow heal it.",
        "Optimizer state of the other layers: kept. The rate does not change; a decayed rate needs a restart.",
        lambda first, steps, depth: Depth({first + steps // 2: depth - depth // 4}, shrink="influence"),
        least_steps=2,
        least_depth=4,
    ),
)

# For models whose forward runs a stack several times; `depth` is the number of loops at the end.
LOOPED_RECIPES = _recipes(
    Recipe(
        "fixed loops",
        "the control; Saunshi et al., arXiv 2502.17416, https://arxiv.org/abs/2502.17416",
        "All loops from the first step to the last.",
        "The forward runs the whole stack as often as a number of the model, which is found by observation.",
        "Any rate; for a comparison the same one as the other recipe.",
        lambda first, steps, depth: Looping({first: depth}),
    ),
    Recipe(
        "growing loops",
        "openai/parameter-golf, pull request 835 (no paper)",
        "Half of the loops for 40 % of the steps, three quarters for another 25 %, then all: 2, 3 and 4 loops of 4. There, the "
        "shares are of the time.",
        "As for fixed loops; the loss jumps when the number grows, since the function changes.",
        "Optimizer state: kept. A gradient is a sum over the loops, so it grows with their number; Adam rescales it, SGD needs a "
        "lower rate. The rate does not change; no reset, no new warm-up.",
        lambda first, steps, depth: Looping(
            {first: depth // 2, first + 2 * steps // 5: 3 * depth // 4, first + 13 * steps // 20: depth}
        ),
        least_steps=4,
        least_depth=4,
    ),
)
