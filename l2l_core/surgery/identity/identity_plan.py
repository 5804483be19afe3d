"""Plan of parameter values with which inserting a layer does not change the model's function."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn


@dataclass(frozen=True, slots=True)
class ParameterTransfer:
    """Move of a parameter's value and optimizer state to the new layer, elementwise; the old value becomes `neutral`."""

    preceding: str
    new: str
    neutral: float  # 1 for a gain, 0 for a shift


@dataclass(frozen=True, slots=True)
class IdentityPlan:
    """New values of a layer's parameters, by name; other parameters keep their values."""

    zeroed: tuple[str, ...] = ()
    ones: tuple[str, ...] = ()
    minus_ones: tuple[str, ...] = ()  # gains that are stored as gain - 1
    transfers: tuple[ParameterTransfer, ...] = ()
    max_abs_error: float = 0.0  # of the hidden state, on the sample
    side_outputs: int = 0  # further output tensors that are not arguments

    @property
    def exact(self) -> bool:
        """Whether the output equals the hidden state to the bit; otherwise it differs by `max_abs_error` on the sample."""
        return not self.transfers and self.max_abs_error == 0.0


def apply_plan(plan: IdentityPlan, layer: nn.Module, preceding: nn.Module | None = None) -> None:
    """Set the parameters of `layer`, and of `preceding` if there are transfers, in place; do not move optimizer state."""
    params = dict(layer.named_parameters())
    preceding_params = dict(preceding.named_parameters()) if preceding else {}
    with torch.no_grad():
        for names, value in ((plan.zeroed, 0.0), (plan.ones, 1.0), (plan.minus_ones, -1.0)):
            for name in names:
                params[name].fill_(value)
        for item in plan.transfers:
            params[item.new].copy_(preceding_params[item.preceding].view_as(params[item.new]))
            preceding_params[item.preceding].fill_(item.neutral)
