"""Layers that take as long as on a device of stated speed, so that a lesson sets the ratio of compute and copies."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from l2l_core.devices import sleep_until


class PacedLayer(nn.Module):
    """Wraps a layer so that it waits, when it has computed, until a device of this speed would be done.

    A matrix product does 2 operations per parameter and token in forward, and twice as many in backward
    (https://arxiv.org/abs/2001.08361, section 2.1). What the layer gives, and its gradients, are unchanged.

    Args:
        layer: of one input of shape (rows, tokens, width), and others that are passed on.
        flops_per_s: operations per second; less than this machine achieves, or nothing is waited for.
    """

    def __init__(self, layer: nn.Module, flops_per_s: float) -> None:
        super().__init__()
        if not flops_per_s > 0:
            raise ValueError(f"flops_per_s={flops_per_s!r}: must be positive")
        self.layer = layer
        self.s_per_token = 2 * sum(p.numel() for p in layer.parameters()) / flops_per_s

    def forward(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        seconds = self.s_per_token * x.shape[0] * x.shape[1]
        began_s = time.perf_counter()

        def enter() -> None:
            nonlocal began_s
            began_s = time.perf_counter()

        x = _BackwardHook.apply(x, lambda: sleep_until(began_s + 2 * seconds))  # where backward leaves the layer
        y = self.layer(x, *args, **kwargs)
        sleep_until(began_s + seconds)
        return _BackwardHook.apply(y, enter)  # where backward enters it


class _BackwardHook(torch.autograd.Function):
    """The identity; calls something when backward passes."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, in_backward: Callable[[], None]) -> torch.Tensor:
        ctx.in_backward = in_backward
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, dx: torch.Tensor) -> tuple[torch.Tensor, None]:  # type: ignore[override]
        ctx.in_backward()
        return dx, None
