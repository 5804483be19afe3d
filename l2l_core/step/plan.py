"""What a pass intends to do with weights and graphs: a value, made before it, that the loop only asks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from l2l_core.eps.blocks import Unit
from l2l_core.step.micro_batch import KEEP_AT_THE_TURN, RECOMPUTE, Keeper


@dataclass(frozen=True)
class Plan:
    """The relay's own way, unless it is told otherwise: all weights are streamed, all layers but the last one recomputed.

    Attributes:
        order: the layers in the order in which they will probably be visited.
        resident: layers whose weights stay on the device from their first load to the end of the pass; others' are streamed.
        keeper_of: by the number of a visit, what becomes of the graphs that calls make there; None for the relay's own way.
    """

    order: Sequence[Unit]
    resident: frozenset[Unit] = frozenset()
    keeper_of: Callable[[int], Keeper] | None = None

    def keeper(self, visit: int) -> Keeper:
        """Say what becomes of graphs that are made in the visit with this number."""
        if self.keeper_of is not None:
            return self.keeper_of(visit)
        return KEEP_AT_THE_TURN if visit == len(self.order) - 1 else RECOMPUTE

    @property
    def there_and_back(self) -> list[Unit]:
        """The layers of all visits of a training step. Backward begins with the layer that is there already."""
        return [*self.order, *reversed(self.order[:-1])]
