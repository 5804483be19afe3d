"""What a pass intends to do with weights and graphs: a value, made before it, that the loop only asks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from l2l_core.config import RelayConfig
from l2l_core.eps.blocks import Unit
from l2l_core.rules import kept_layers
from l2l_core.step.micro_batch import KEEP, KEEP_AT_THE_TURN, RECOMPUTE, Keeper


@dataclass(frozen=True)
class Plan:
    """The relay's own way, unless it is told otherwise: all weights are streamed, all layers but the last one recomputed.

    Attributes:
        order: the layers in the order in which they will probably be visited.
        resident: slots for weights besides those that streaming needs.
        kept: of how many of the last visits the graphs stay until backward.
        keeper_of: by the number of a visit, what becomes of the graphs that calls make there; None for the relay's own way.
    """

    order: Sequence[Unit]
    resident: int = 0
    kept: int = 0
    keeper_of: Callable[[int], Keeper] | None = None

    @staticmethod
    def of(config: RelayConfig, order: Sequence[Unit]) -> Plan:
        """Make the plan that the settings ask for."""
        return Plan(order, config.resident, kept_layers(config.keep, config.ahead, config.resident))

    def keeper(self, visit: int) -> Keeper:
        """Say what becomes of graphs that are made in the visit with this number."""
        if self.keeper_of is not None:
            return self.keeper_of(visit)
        behind = len(self.order) - 1 - visit  # how many visits come after it, as far as is known
        if 0 <= behind < self.kept:
            return KEEP
        return RECOMPUTE if behind else KEEP_AT_THE_TURN

    @property
    def there_and_back(self) -> list[Unit]:
        """The layers of all visits of a training step. Backward begins with the layer that is there already."""
        return [*self.order, *reversed(self.order[:-1])]
