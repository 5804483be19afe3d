"""Layers as slow as on a device of given speed, for lessons on the ratio of compute to copies."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from l2l_core.devices import sleep_until


class PacedLayer(nn.Module):
    """Layer that takes as long as on a device of `flops_per_s`: it computes, then waits.

    A matrix product does 2 operations per parameter and token in forward, and twice as many in backward
    (https://arxiv.org/abs/2001.08361, section 2.1). Outputs and gradients of the wrapped layer are unchanged.

    Args:
        layer: takes an input of shape (rows, tokens, width); other arguments are passed on.
        flops_per_s: operations per second; has no effect above the speed of this machine.

    Raises:
        ValueError: `flops_per_s` is not positive.
    """

    def __init__(self, layer: nn.Module, flops_per_s: float) -> None:
        super().__init__()
        if not flops_per_s > 0:
            raise ValueError(f"flops_per_s={flops_per_s!r}: give a positive number of operations per second")
        self.layer = layer
        self.s_per_token = 2 * sum(p.numel() for p in layer.parameters()) / flops_per_s

    def forward(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        seconds = self.s_per_token * x.shape[0] * x.shape[1]
        began_s = time.perf_counter()

        def enter() -> None:
            nonlocal began_s
            began_s = time.perf_counter()

        x = _BackwardHook.apply(
            x, lambda: sleep_until(began_s + 2 * seconds)
        )  # runs at the end of the layer's backward
        y = self.layer(x, *args, **kwargs)
        sleep_until(began_s + seconds)
        return _BackwardHook.apply(y, enter)  # runs at its beginning


class _BackwardHook(torch.autograd.Function):
    """Identity that calls a function in backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, in_backward: Callable[[], None]) -> torch.Tensor:
        ctx.in_backward = in_backward
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, dx: torch.Tensor) -> tuple[torch.Tensor, None]:  # type: ignore[override]  # torch's stub takes any number of gradients
        ctx.in_backward()
        return dx, None
