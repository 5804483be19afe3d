"""A schedule that freezes layers from the bottom: what is trained of a stack as a function of the step."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from l2l_core.edits.edit import Edit, Freeze, Unfreeze
from l2l_core.edits.schedules import (
    PerStep,
    SchedulableRelay,
    Schedule,
    check_step_values,
    in_stack,
    stack_of,
    value_at,
)


@dataclass(frozen=True)
class Freezing(Schedule):
    """Train all but the first layers of a stack; the stack is the schedule's, which thaws whatever else is frozen in it.

    Backward goes no further than it must: if nothing below is trained either (freeze the embedding too), frozen layers at the
    bottom are run forward only.

    Args:
        frozen: number of layers from the bottom that are frozen, by step, as `depth` of `Depth`.
        stack: dotted name of the container, if there are several.
    """

    frozen: PerStep
    stack: str | None = None

    def __post_init__(self) -> None:
        check_step_values("frozen", self.frozen, least=0)

    def edits(self, relay: SchedulableRelay) -> Sequence[Edit]:
        layers = stack_of(relay, self.stack)
        count = value_at("frozen", self.frozen, relay.steps, least=0)
        if count is None:
            return ()
        edits: list[Edit] = [
            Freeze(in_stack(self.stack, part))
            for part in _runs(i for i in range(min(count, len(layers))) if not layers[i].frozen)
        ]
        # A layer without parameters counts as frozen, and there is nothing to thaw in it
        thawing = (i for i in range(count, len(layers)) if layers[i].params and layers[i].frozen)
        return edits + [Unfreeze(in_stack(self.stack, part)) for part in _runs(thawing)]


def _runs(positions: Iterable[int]) -> Iterator[slice]:
    """Join ascending positions to slices without gaps."""
    run: list[int] = []
    for i in positions:
        if run and i != run[-1] + 1:
            yield slice(run[0], run[-1] + 1)
            run = []
        run.append(i)
    if run:
        yield slice(run[0], run[-1] + 1)
