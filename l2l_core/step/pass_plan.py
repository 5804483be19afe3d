"""Inputs of a pass, and its plan: the weights and graphs that stay on the device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from l2l_core.config import RelayConfig
from l2l_core.eps.blocks import Unit
from l2l_core.schedule_rules import kept_layers
from l2l_core.step.micro_batch import KEEP, KEEP_UNTIL_SUSPENDED, RECOMPUTE, ActivationPolicy

PassTask = Callable[[nn.Module, Any], Any]


@dataclass(frozen=True)
class PassPlan:
    """Plan of a pass. By default all weights are streamed, and all layers but the last one are recomputed.

    Attributes:
        layer_order: the layers in the expected order of visits.
        resident: weight slots besides those that streaming needs.
        kept_graphs: number of last visits whose graphs stay on the device until backward.
        policy_override: activation policy by number of visit, in place of the plan's own.
    """

    layer_order: Sequence[Unit]
    resident: int = 0
    kept_graphs: int = 0
    policy_override: Callable[[int], ActivationPolicy] | None = None

    @staticmethod
    def of(config: RelayConfig, layer_order: Sequence[Unit]) -> PassPlan:
        """Make the plan for these settings; `keep` must be a number of layers."""
        assert isinstance(config.keep, int), f"keep={config.keep!r} was not resolved to a number of layers"
        return PassPlan(layer_order, config.resident, kept_layers(config.keep, config.ahead, config.resident))

    def policy_for(self, visit: int) -> ActivationPolicy:
        """Return the activation policy of the visit with this number."""
        if self.policy_override is not None:
            return self.policy_override(visit)
        remaining = len(self.layer_order) - 1 - visit  # expected visits after this one
        if 0 <= remaining < self.kept_graphs:
            return KEEP
        return RECOMPUTE if remaining else KEEP_UNTIL_SUSPENDED

    @property
    def forward_then_backward(self) -> list[Unit]:
        """The layers of all visits of a training step; the first layer of backward is loaded already."""
        return [*self.layer_order, *reversed(self.layer_order[:-1])]


@dataclass(frozen=True, slots=True)
class PassSpec:
    """Inputs of a pass.

    Attributes:
        config: settings.
        plan: weights and graphs that stay on the device.
        task: returns the result of a micro-batch; in training its loss.
        micro_batches: inputs of the model.
        seeds: one per micro-batch, for its random stream.
        check: called after each forward; it may raise to refuse the step.
    """

    config: RelayConfig
    plan: PassPlan
    task: PassTask
    micro_batches: Sequence[Any]
    seeds: Sequence[int]
    check: Callable[[], None] = lambda: None
