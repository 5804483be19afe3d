"""Linear layers that keep a random sketch of their input for backward, instead of all rows.

Source: Bershatsky et al., "Memory-Efficient Backpropagation through Large Linear Layers", arXiv 2201.13195. For an input X
(rows, in) backward needs dW = dY^T X. With a random S (rows, k), E[S S^T] = I, the estimate is (dY^T S)(S^T X), and only
S^T X (k, in) is kept; S is drawn again from its seed. dX and the gradient of the bias are exact. The estimate is unbiased,
and the smaller k, the larger is the error of a single draw: it is noise in the gradient, not rounding.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from l2l_core.strategies.module_replacement import replace_modules


class RandomizedLinear(nn.Linear):
    """A linear layer whose weight gradient is estimated from `share` of the rows' bytes.

    The seed of each forward is drawn from torch's CPU generator, which plans and relays restore before a layer runs again,
    so the estimate is the same everywhere.

    Args:
        in_features, out_features, bias, device, dtype: as in `nn.Linear`.
        share: k / rows, above 0 and below 1; k is rounded, at least 1.

    Example:
        >>> from l2l_core.strategies import RandomizedLinear
        >>> layer, x = RandomizedLinear(16, 32, share=0.5), torch.randn(8, 16)
        >>> layer(x).sum().backward()
        >>> torch.equal(layer.bias.grad, torch.full((32,), 8.0))  # only the gradient of the weight is an estimate
        True
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
        if not 0 < share < 1:
            raise ValueError(
                f"share is {share}: give a number above 0 and below 1, or use nn.Linear, which keeps all rows"
            )
        self.share = share

    @classmethod
    def of(cls, linear: nn.Linear, share: float = 0.5) -> RandomizedLinear:
        """Return a layer with the parameter objects of a plain layer, so that optimizers and ties stay valid."""
        made = cls(linear.in_features, linear.out_features, linear.bias is not None, "meta", share=share)
        made.weight, made.bias = linear.weight, linear.bias
        return made.train(linear.training)

    def forward(self, x: Tensor) -> Tensor:
        """Map (..., in) to (..., out), exactly."""
        return _SketchedLinear.apply(x, self.weight, self.bias, self.share)

    def extra_repr(self) -> str:
        """Return the text of `nn.Linear`, and the share."""
        return f"{super().extra_repr()}, share={self.share}"


def randomized_linear(
    model: nn.Module, share: float = 0.5, kinds: Sequence[type[nn.Linear]] = (nn.Linear,)
) -> list[str]:
    """Replace all linear layers of these kinds by `RandomizedLinear`, in place; return their names.

    Raises:
        ValueError: the model has no such layer, or `share` is not between 0 and 1.

    Example:
        >>> from l2l_core.strategies import randomized_linear
        >>> net = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16))
        >>> randomized_linear(net, share=0.25)
        ['0', '2']
    """
    return replace_modules(model, tuple(kinds), lambda module: RandomizedLinear.of(module, share))


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
    """Draw S (rows, kept): random signs divided by sqrt(kept), with the device and dtype of `like`."""
    generator = torch.Generator(like.device).manual_seed(seed)
    signs = torch.randint(2, (rows, kept), generator=generator, device=like.device, dtype=like.dtype)
    return signs.mul_(2).sub_(1).div_(math.sqrt(kept))
