"""Linear layers that keep a random sketch of their input for backward, where others keep all rows.

Source: Bershatsky et al., "Memory-Efficient Backpropagation through Large Linear Layers", arXiv 2201.13195. Of the input X
(rows, in) backward needs dW = dY^T X. With a random S (rows, k), E[S S^T] = I, it is estimated by (dY^T S)(S^T X), of which
S^T X (k, in) is kept; S is drawn again from its seed. dX and the bias's gradient are exact. The estimate is right on average
and far off in a single draw, the more so the smaller k: this is noise in the gradient, not rounding.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from l2l_core.strategies.module_replacement import replace_modules

Tensor = torch.Tensor


class RandomizedLinear(nn.Linear):
    """A linear layer whose weight gradient is estimated from `share` of the rows' bytes.

    The seed of each forward comes from torch's CPU stream, which plans and relays put back before they run a layer again: so
    the estimate is the same wherever it is computed.

    Args:
        in_features, out_features, bias, device, dtype: as of `nn.Linear`.
        share: k / rows, above 0 and below 1; k is rounded, at least 1.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        device: Any = None,
        dtype: Any = None,
        share: float = 0.5,
    ) -> None:
        super().__init__(in_features, out_features, bias, device, dtype)
        self.share = _check_share(share)

    @classmethod
    def of(cls, linear: nn.Linear, share: float = 0.5) -> RandomizedLinear:
        """Make one with the parameters of a plain layer: the same objects, so optimizers and ties go on."""
        made = cls(linear.in_features, linear.out_features, linear.bias is not None, "meta", share=share)
        made.weight, made.bias = linear.weight, linear.bias
        return made.train(linear.training)

    def forward(self, x: Tensor) -> Tensor:
        """Map (..., in) to (..., out), exactly."""
        return _SketchedLinear.apply(x, self.weight, self.bias, self.share)

    def extra_repr(self) -> str:
        """Say what `nn.Linear` says, and the share."""
        return f"{super().extra_repr()}, share={self.share}"


def randomized_linear(
    model: nn.Module, share: float = 0.5, kinds: Sequence[type[nn.Linear]] = (nn.Linear,)
) -> list[str]:
    """Put `RandomizedLinear` in the place of all linear layers of these kinds, in place; returns their names.

    Raises:
        ValueError: there is none, or `share` is not between 0 and 1.
    """
    _check_share(share)
    return replace_modules(model, tuple(kinds), lambda module: RandomizedLinear.of(module, share), "kinds=")


class _SketchedLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, share: float) -> Tensor:
        rows = x.reshape(-1, x.shape[-1])
        ctx.seed = int(torch.randint(2**62, ()))
        ctx.kept = max(1, round(share * len(rows)))
        sketch = draw_sketch(len(rows), ctx.kept, ctx.seed, x).T @ rows if ctx.needs_input_grad[1] else None
        ctx.save_for_backward(sketch, weight)
        return nn.functional.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        sketch, weight = ctx.saved_tensors
        (grad,) = grads
        rows = grad.reshape(-1, grad.shape[-1])
        dx = grad @ weight if ctx.needs_input_grad[0] else None
        dw = None if sketch is None else (rows.T @ draw_sketch(len(rows), ctx.kept, ctx.seed, grad)) @ sketch
        db = rows.sum(0) if ctx.needs_input_grad[2] else None
        return dx, dw, db, None


def draw_sketch(rows: int, kept: int, seed: int, like: Tensor) -> Tensor:
    """Draw S (rows, kept): signs over the root of `kept`, on the device and in the type of `like`."""
    stream = torch.Generator(like.device).manual_seed(seed)
    signs = torch.randint(2, (rows, kept), generator=stream, device=like.device, dtype=like.dtype)
    return signs.mul_(2).sub_(1).div_(math.sqrt(kept))


def _check_share(share: float) -> float:
    if not 0 < share < 1:
        raise ValueError(
            f"share is {share}: the sketch has more than 0 and less than all of the rows; nn.Linear keeps all"
        )
    return share
