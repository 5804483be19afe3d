"""What generated programs may name besides torch: custom functions, and modules that need more than a line."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

__all__ = ["Bent", "Kept", "Noted", "Sine", "Square", "checkpoint", "parametrizations"]


class Sine(Function):
    """Saves its input with `save_for_backward`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.sin()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return grad * x.cos()


class Square(Function):
    """Saves its output, and takes a weight."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        out = torch.tanh(x * weight)
        ctx.save_for_backward(x, weight, out)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, weight, out = ctx.saved_tensors
        inner = grad * (1 - out * out)
        return inner * weight, (inner * x).sum((0, 1))


class Kept(Function):
    """Keeps a tensor of its own making as a plain attribute of its context."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.slope = 1 / (1 + x * x)
        return x.atan()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * ctx.slope


class Noted(Function):
    """Keeps its very input as a plain attribute of its context."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.x = x
        return x * x * 0.1

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * ctx.x * 0.2


class Bent(nn.Module):
    """Normalises with statistics of its own, which it keeps in buffers and updates in place."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.register_buffer("mean", torch.zeros(width))
        self.register_buffer("count", torch.zeros((), dtype=torch.long))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            with torch.no_grad():
                self.mean.lerp_(x.mean((0, 1)), 0.1)
                self.count += 1
        return (x - self.mean) * self.weight
