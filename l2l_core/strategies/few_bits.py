"""Activations that keep a few bits per element for backward, instead of their whole input.

Source: Novikov et al., "Few-Bit Backward: Quantized Gradients of Activation Functions", arXiv 2202.00441. The forward is
exact. Backward multiplies the gradient by one of 2 ** bits levels, so gradients differ from those of the exact activation;
they are the same under every plan and in a relay. The levels are a piecewise constant fit to the derivative with the least
squared error over an interval, by dynamic programming; pieces end at points of a grid.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from l2l_core.strategies.module_replacement import replace_modules

SMOOTH_ACTIVATIONS: tuple[type[nn.Module], ...] = (nn.GELU, nn.SiLU, nn.Sigmoid, nn.Tanh, nn.Softplus, nn.Mish, nn.ELU)
FIT_RANGE = 10.0  # derivatives are fitted on [-10, 10]; beyond it the outermost pieces apply
GRID_POINTS = 2000


class FewBit(nn.Module):
    """An elementwise activation whose backward reads `bits` bits per element.

    Args:
        function: an elementwise module without parameters, such as `nn.GELU()`.
        bits: 1 to 8.

    Raises:
        ValueError: `bits` is out of range, or the module is not elementwise or has parameters.

    Example:
        >>> from l2l_core.strategies import FewBit
        >>> gelu, x = FewBit(nn.GELU(), bits=3), torch.randn(8, 16)
        >>> torch.equal(gelu(x), nn.functional.gelu(x))  # only the backward is approximate
        True
    """

    borders: Tensor
    values: Tensor

    def __init__(self, function: nn.Module, bits: int = 3) -> None:
        super().__init__()
        if not 1 <= bits <= 8:
            raise ValueError(f"bits is {bits}: give 1 to 8 bits per element")
        _check_elementwise(function)
        levels = derivative_levels(function, bits)
        self.function, self.bits = function, bits
        self.register_buffer("borders", torch.tensor(levels.borders), persistent=False)
        self.register_buffer("values", torch.tensor(levels.values), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return the exact activation, in the shape of `x`."""
        return _FewBitFunction.apply(x, self.function, self.borders, self.values)

    def extra_repr(self) -> str:
        """Return the number of bits."""
        return f"bits={self.bits}"


def few_bit(model: nn.Module, bits: int = 3, kinds: Sequence[type[nn.Module]] = SMOOTH_ACTIVATIONS) -> list[str]:
    """Replace all activations of these kinds by `FewBit`, in place; return their names.

    `kinds` may contain a model's own classes (`type(model.h[0].mlp.act)`). Piecewise linear functions like ReLU are not in
    the default, because they already keep about one bit of information, without an error.

    Raises:
        ValueError: the model has no such activation.

    Example:
        >>> from l2l_core.strategies import few_bit
        >>> net = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16))
        >>> few_bit(net, bits=3)
        ['1']
        >>> net
        Sequential(
          (0): Linear(in_features=16, out_features=32, bias=True)
          (1): FewBit(
            bits=3
            (function): GELU(approximate='none')
          )
          (2): Linear(in_features=32, out_features=16, bias=True)
        )
    """
    return replace_modules(model, tuple(kinds), lambda module: FewBit(module, bits))


class _FewBitFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, function: Callable[[Tensor], Tensor], borders: Tensor, values: Tensor) -> Tensor:
        ctx.bits, ctx.shape = len(values).bit_length() - 1, x.shape
        if ctx.needs_input_grad[0]:
            ctx.save_for_backward(pack_bits(torch.bucketize(x, borders.to(x.dtype), out_int32=True), ctx.bits), values)
        return function(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        packed, values = ctx.saved_tensors
        (grad,) = grads
        return grad * values.to(grad.dtype)[unpack_bits(packed, ctx.bits, ctx.shape)], None, None, None


def pack_bits(indices: Tensor, bits: int) -> Tensor:
    """Pack small integers as planes of bits: (...) to uint8 (bits, ceil(elements / 8))."""
    flat = nn.functional.pad(indices.reshape(-1), (0, -indices.numel() % 8)).view(-1, 8)
    places = torch.arange(8, dtype=torch.int32, device=indices.device)
    planes = [((flat >> bit & 1) << places).sum(1, dtype=torch.int32).to(torch.uint8) for bit in range(bits)]
    return torch.stack(planes)


def unpack_bits(packed: Tensor, bits: int, shape: torch.Size) -> Tensor:
    """Unpack the result of `pack_bits` to int32 of the given shape."""
    places = torch.arange(8, dtype=torch.uint8, device=packed.device)
    flat = torch.zeros(packed.shape[1], 8, dtype=torch.int32, device=packed.device)
    for bit in range(bits):
        flat += (packed[bit][:, None] >> places & 1).int() << bit
    return flat.reshape(-1)[: shape.numel()].view(shape)


def _check_elementwise(function: nn.Module) -> None:
    name = type(function).__name__
    if any(True for _ in function.parameters()):
        raise ValueError(
            f"{name} has parameters, whose gradients need its whole input: give a function of one variable, such as nn.GELU()"
        )
    x = torch.linspace(-3, 3, 12)
    with torch.no_grad():
        whole, parts = function(x), torch.cat([function(part) for part in x.split(5)])
    if whole.shape != x.shape or not torch.allclose(whole, parts, rtol=1e-5, atol=1e-6):
        raise ValueError(
            f"{name} is not elementwise, its values depend on other elements or on chance: give an elementwise function, such "
            "as nn.GELU()"
        )


# -- levels ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class DerivativeLevels:
    """A piecewise constant function."""

    borders: tuple[float, ...]  # ends of pieces, ascending
    values: tuple[float, ...]  # one more than borders
    error: float  # integral of the squared error over the interval


def derivative_levels(function: Callable[[Tensor], Tensor], bits: int) -> DerivativeLevels:
    """Fit 2 ** bits levels to the derivative of an elementwise function."""
    x = (torch.arange(GRID_POINTS, dtype=torch.float64) + 0.5) * (2 * FIT_RANGE / GRID_POINTS) - FIT_RANGE
    with torch.enable_grad():
        x.requires_grad_()
        (slopes,) = torch.autograd.grad(function(x).sum(), x)
    return _fit_cached(slopes.numpy().tobytes(), 2**bits)


@lru_cache(maxsize=32)
def _fit_cached(slopes: bytes, pieces: int) -> DerivativeLevels:
    """Fit levels, once for all equal activations of a model."""
    return fit_levels(np.frombuffer(slopes), pieces)


def fit_levels(slopes: np.ndarray, pieces: int, fit_range: float = FIT_RANGE) -> DerivativeLevels:
    """Fit constant pieces to a function on [-fit_range, fit_range], given at the centers of equal cells.

    `least[j]` is the least error of the first j cells with the pieces so far. One more piece ends at j and begins at the i
    that minimises the sum of `least[i]` and its own error, the spread of its cells around their mean.
    """
    n, cell = len(slopes), 2 * fit_range / len(slopes)
    total, square = (np.concatenate([[0.0], np.cumsum(slopes**power)]) for power in (1, 2))
    ends = np.arange(n + 1)

    def spread(i: np.ndarray, j: int) -> np.ndarray:
        return np.maximum(square[j] - square[i] - (total[j] - total[i]) ** 2 / (j - i), 0.0)

    least = np.concatenate([[0.0], [spread(np.array([0]), j)[0] for j in range(1, n + 1)]])
    begins = []
    for piece in range(1, pieces):
        following, begin = np.full(n + 1, np.inf), np.zeros(n + 1, dtype=int)
        for j in range(piece + 1, n + 1):
            errors = least[piece:j] + spread(ends[piece:j], j)
            best = int(errors.argmin())
            following[j], begin[j] = errors[best], piece + best
        least = following
        begins.append(begin)
    cuts = [n]
    for begin in reversed(begins):
        cuts.append(int(begin[cuts[-1]]))
    cuts = [0, *reversed(cuts)]
    values = [float((total[b] - total[a]) / (b - a)) for a, b in pairwise(cuts)]
    return DerivativeLevels(tuple(-fit_range + cell * cut for cut in cuts[1:-1]), tuple(values), float(least[n] * cell))
