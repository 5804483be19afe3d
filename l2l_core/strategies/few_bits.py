"""Activations that keep a few bits per element for backward, where others keep their whole input.

Source: Novikov et al., "Few-Bit Backward", arXiv 2202.00441. The forward is exact. Backward multiplies the gradient by one of
2 ** bits levels, so gradients differ from those of the exact activation; they are the same under every plan and in a relay.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from l2l_core.strategies.derivative_levels import derivative_levels
from l2l_core.strategies.module_replacement import replace_modules

Tensor = torch.Tensor

SMOOTH_ACTIVATIONS: tuple[type[nn.Module], ...] = (nn.GELU, nn.SiLU, nn.Sigmoid, nn.Tanh, nn.Softplus, nn.Mish, nn.ELU)


class FewBit(nn.Module):
    """An elementwise activation whose backward reads `bits` bits per element.

    Args:
        function: an elementwise module without parameters, such as `nn.GELU()`.
        bits: 1 to 8.

    Raises:
        ValueError: `bits` is out of range, or the module is not elementwise or has parameters.
    """

    def __init__(self, function: nn.Module, bits: int = 3) -> None:
        super().__init__()
        if not 1 <= bits <= 8:
            raise ValueError(f"bits is {bits}: an element has 1 to 8")
        _check_elementwise(function)
        levels = derivative_levels(function, bits)
        self.function, self.bits = function, bits
        self.register_buffer("borders", torch.tensor(levels.borders), persistent=False)
        self.register_buffer("values", torch.tensor(levels.values), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return the exact activation, in the shape of `x`."""
        return _FewBitFunction.apply(x, self.function, self.borders, self.values)

    def extra_repr(self) -> str:
        """Say how many bits."""
        return f"bits={self.bits}"


def few_bit(model: nn.Module, bits: int = 3, kinds: Sequence[type[nn.Module]] = SMOOTH_ACTIVATIONS) -> list[str]:
    """Put `FewBit` in the place of all activations of these kinds, in place; returns their names.

    A model's own kinds (`type(model.h[0].mlp.act)`) may be named. What piecewise linear functions like ReLU keep is no more
    than a bit of information already, and they are exact with it, so they are not among the default.

    Raises:
        ValueError: there is none.
    """
    return replace_modules(model, tuple(kinds), lambda module: FewBit(module, bits), "kinds=")


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
    """Unpack what `pack` has packed, to int32 of a shape."""
    places = torch.arange(8, dtype=torch.uint8, device=packed.device)
    flat = sum(((packed[bit][:, None] >> places & 1).int() << bit) for bit in range(bits))
    return flat.reshape(-1)[: shape.numel()].view(shape)  # type: ignore[union-attr]


def _check_elementwise(function: nn.Module) -> None:
    name = type(function).__name__
    if any(True for _ in function.parameters()):
        raise ValueError(
            f"{name} has parameters, whose gradients need its whole input: few bits are for functions of one variable"
        )
    x = torch.linspace(-3, 3, 12)
    with torch.no_grad():
        whole, parts = function(x), torch.cat([function(part) for part in x.split(5)])
    if whole.shape != x.shape or not torch.allclose(whole, parts, rtol=1e-5, atol=1e-6):
        raise ValueError(f"{name} is not elementwise: its values depend on other elements, or on chance")
