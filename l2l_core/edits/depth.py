"""Schedules that grow or shrink a stack with the step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from l2l_core.edits.edit import Drop, Duplicate, Edit, Insert, check_choice
from l2l_core.edits.optimizer_state import Policy
from l2l_core.edits.schedules import (
    PerStep,
    SchedulableRelay,
    Schedule,
    check_step_values,
    in_stack,
    stack_of,
    value_at,
)
from l2l_core.eps.blocks import Unit

GrowMode = Literal["top", "middle", "interleaved", "identity"]
ShrinkMode = Literal["influence", "top", "bottom"]


@dataclass(frozen=True)
class Depth(Schedule):
    """Grow or shrink a stack to a depth that depends on the step.

    Args:
        depth: number of layers: an integer, a mapping from the first step of each value, as ``{0: 3, 100: 6, 200: 12}``, or a
            function of the number of finished steps.
        grow: from n to m layers. "top": copies of the last m - n layers are added on top (stacking: Gong et al. 2019,
            StackBERT; Du et al., arXiv 2405.15319). "middle": a block of m - n layers in the middle is followed by its copy
            (MIDAS: Saunshi et al., arXiv 2409.19044; with an even number of blocks the one below the middle). "interleaved":
            m - n evenly spread layers are each followed by a copy. "identity": evenly spread new layers that are the identity
            at first. Beyond 2n layers the stack is doubled several times, in one group of edits.
        shrink: from n to m layers. "influence": drop the layers with the least influence in the last step (ShortGPT: Men et
            al., arXiv 2403.03853), once it is measured for enough layers. "top", "bottom": drop the last, the first layers.
        stack: dotted name of the container, if there are several.
        optimizer, warmup: for new layers, as in `Insert`; None is "copy" for copies and "fresh" for identity layers.
        park: for dropped layers, as in `Drop`.
        force: apply edits that are refused on evidence alone; see `Relay.apply`.

    Example:
        >>> from l2l_core import Depth
        >>> schedule = Depth({0: 6, 2: 8}, grow="top")  # two more layers after two steps
        >>> for _ in range(3):
        ...     result = schedule.step(relay, batch)
        ...     print(len(relay.stack))
        6
        6
        8
    """

    depth: PerStep
    grow: GrowMode = "middle"
    shrink: ShrinkMode = "influence"
    stack: str | None = None
    optimizer: Policy | None = None
    warmup: int = 0
    park: Literal["memory", "disk"] | None = "memory"
    force: bool = False

    def __post_init__(self) -> None:
        check_step_values("depth", self.depth, least=1)
        check_choice("grow", self.grow, GrowMode)
        check_choice("shrink", self.shrink, ShrinkMode)
        # Check the values now, not at the step that uses them.
        Insert(0, optimizer="copy" if self.optimizer is None else self.optimizer, warmup=self.warmup)
        Drop(0, park=self.park)

    def edits(self, relay: SchedulableRelay) -> Sequence[Edit]:
        layers = stack_of(relay, self.stack)
        depth = value_at("depth", self.depth, relay.steps, least=1)
        if depth is None or depth == len(layers):
            return ()
        if depth < len(layers):
            return self._drop_edits(layers, len(layers) - depth)
        edits, count = list[Edit](), len(layers)
        while count < depth:
            more = min(count, depth - count)
            edits += self._growth_edits(count, more)
            count += more
        return edits

    def _growth_edits(self, count: int, more: int) -> list[Edit]:
        """List the edits that add `more` layers to `count`."""
        policy = "copy" if self.optimizer is None else self.optimizer
        if self.grow == "top":
            return [Duplicate(in_stack(self.stack, slice(count - more, count)), "top", policy, self.warmup)]
        if self.grow == "middle":
            first = more * ((count // more - 1) // 2) + count % more // 2
            return [Duplicate(in_stack(self.stack, slice(first, first + more)), "middle", policy, self.warmup)]
        # The last one first, so that insertions do not move the remaining places.
        spread = [(2 * i + 1) * count // (2 * more) for i in reversed(range(more))]
        if self.grow == "interleaved":
            return [Duplicate(in_stack(self.stack, i), "interleaved", policy, self.warmup) for i in spread]
        policy = "fresh" if self.optimizer is None else self.optimizer
        return [Insert(in_stack(self.stack, i + 1), optimizer=policy, warmup=self.warmup) for i in spread]

    def _drop_edits(self, layers: Sequence[Unit], fewer: int) -> list[Edit]:
        if self.shrink == "influence":
            measured = [unit for unit in layers if "influence" in unit.stats]
            least = sorted(measured, key=lambda unit: unit.stats["influence"])[:fewer]
            return [Drop(unit.key, self.park) for unit in layers if unit in least] if len(least) == fewer else []
        first = len(layers) - fewer if self.shrink == "top" else 0
        return [Drop(in_stack(self.stack, slice(first, first + fewer)), self.park)]
