"""What to set in a layer, and in the one before it, so that inserting it leaves the model's function as it is."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn


@dataclass(frozen=True, slots=True)
class ParameterTransfer:
    """Lets the new layer's parameter take over value and optimizer state, elementwise; `neutral` stays behind."""

    preceding: str
    new: str
    neutral: float  # 1 for a gain, 0 for a shift


@dataclass(frozen=True, slots=True)
class IdentityPlan:
    """Says what becomes of a layer's parameters, by their names. What is not named keeps its value."""

    zeroed: tuple[str, ...] = ()
    ones: tuple[str, ...] = ()
    minus_ones: tuple[str, ...] = ()  # gains that are kept as 1 + w
    transfers: tuple[ParameterTransfer, ...] = ()
    max_abs_error: float = 0.0  # of the hidden state, on the sample
    side_outputs: int = 0  # tensors that it gives out besides, which are not arguments passed on

    @property
    def exact(self) -> bool:
        """Whether the hidden state passes to the bit. Otherwise it is off by `max_abs_error` on the sample, of rounding."""
        return not self.transfers and self.max_abs_error == 0.0


def apply_plan(plan: IdentityPlan, layer: nn.Module, preceding: nn.Module | None = None) -> None:
    """Set the parameters of `layer`, and of `preceding` if it hands over, in place. Optimizer state is the caller's."""
    params, theirs = dict(layer.named_parameters()), dict(preceding.named_parameters()) if preceding else {}
    with torch.no_grad():
        for names, value in ((plan.zeroed, 0.0), (plan.ones, 1.0), (plan.minus_ones, -1.0)):
            for name in names:
                params[name].fill_(value)
        for item in plan.transfers:
            # The copy first: what stays behind would be handed over otherwise
            params[item.new].copy_(theirs[item.preceding].view_as(params[item.new]))
            theirs[item.preceding].fill_(item.neutral)
