"""What a pass intends to do with weights and graphs: a value, made before it, that the loop only asks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from l2l_core.config import RelayConfig
from l2l_core.eps.blocks import Unit
from l2l_core.schedule_rules import kept_layers
from l2l_core.step.micro_batch import KEEP, KEEP_UNTIL_SUSPENDED, RECOMPUTE, ActivationPolicy


@dataclass(frozen=True)
class PassPlan:
    """The relay's own way, unless it is told otherwise: all weights are streamed, all layers but the last one recomputed.

    Attributes:
        order: the layers in the order in which they will probably be visited.
        resident: slots for weights besides those that streaming needs.
        kept: of how many of the last visits the graphs stay until backward.
        keeper_of: by the number of a visit, what becomes of the graphs that calls make there; None for the relay's own way.
    """

    layer_order: Sequence[Unit]
    resident: int = 0
    kept_graphs: int = 0
    policy_override: Callable[[int], ActivationPolicy] | None = None

    @staticmethod
    def of(config: RelayConfig, layer_order: Sequence[Unit]) -> PassPlan:
        """Make the plan that the settings ask for."""
        return PassPlan(layer_order, config.resident, kept_layers(config.keep, config.ahead, config.resident))

    def policy_for(self, visit: int) -> ActivationPolicy:
        """Say what becomes of graphs that are made in the visit with this number."""
        if self.policy_override is not None:
            return self.policy_override(visit)
        behind = len(self.layer_order) - 1 - visit  # how many visits come after it, as far as is known
        if 0 <= behind < self.kept_graphs:
            return KEEP
        return RECOMPUTE if behind else KEEP_UNTIL_SUSPENDED

    @property
    def forward_then_backward(self) -> list[Unit]:
        """The layers of all visits of a training step. Backward begins with the layer that is there already."""
        return [*self.layer_order, *reversed(self.layer_order[:-1])]
