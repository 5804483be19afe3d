"""Any torch optimizer with its state, and optionally the weights, in bfloat16.

A step unpacks the state of its parameters to float32, runs the plain step, and packs the new state. A relay steps one block
at a time, so only one block's state is unpacked at once.

A second moment changes by a thousandth per step (``1 - beta2``), less than bfloat16 resolves (1/256 to 1/128): rounded to
nearest it would never change. So it is rounded at random, with the right expected value. A first moment changes by a tenth
per step and is rounded to nearest. A weight changes by about the learning rate, far less than 1/256 of it: it is rounded at
random, too (``weights=True``).

Random numbers depend only on parameter, step and element: each parameter's state has a seed, which starts as a checksum of
its first second moment and counts up. A checksum needs no name or position, which edits change and parts of an optimizer
lack. So updates in parts, a resumed run, a branch and plain training have the same bits.

Gradients and computation stay float32. After every step the weights are bfloat16 values, whether they are stored as
bfloat16 (a model after `model.bfloat16()`) or as float32; both have the same bits.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from l2l_core.rounding import round_at_random

NOISE = "noise"  # in a parameter's state: seed of its next random numbers
_TO_NEAREST = frozenset({"exp_avg", "momentum_buffer"})  # change by more per step than bfloat16's resolution
_COUNTS = frozenset({"step", "eta", "mu", "mu_product"})  # have the shape of a scalar parameter's moments


@cache
def in_bf16(kind: type[Optimizer], weights: bool = False) -> type[Optimizer]:
    """Return a class of optimizers like `kind` with its state in bfloat16.

    Packs state of the parameter's shape; factored moments (Adafactor) and counts stay unchanged. A state saved in float32
    can be loaded and is packed then.

        Relay(model, partial(in_bf16(torch.optim.AdamW), lr=3e-4, fused=True))
        Relay(model.bfloat16(), partial(in_bf16(torch.optim.AdamW, weights=True), lr=3e-4, fused=True))

    Args:
        kind: any class of torch optimizers with float32 state by parameter.
        weights: keep weights in bfloat16, too, rounded at random after every step. Parameters may be bfloat16 then, with
            float32 gradients, and a relay's masters have 2 bytes per parameter.

    Raises:
        TypeError: `kind` is not a class of optimizers.

    Example:
        >>> from functools import partial
        >>> from l2l_core import in_bf16
        >>> optimizer = partial(in_bf16(torch.optim.AdamW), lr=1e-3)
        >>> relay.close()  # a model belongs to one relay
        >>> with Relay(model, optimizer, device="cpu", loss=nn.CrossEntropyLoss()) as relay:
        ...     result = relay.step(batch)
        ...     {state["exp_avg"].dtype for state in relay.optimizer.state.values()}
        {torch.bfloat16}
    """
    if not (isinstance(kind, type) and issubclass(kind, Optimizer)):
        raise TypeError(
            f"in_bf16({kind!r}): give a class, as torch.optim.AdamW, and pass its settings to the returned class"
        )
    # Without torch's wrapper around it, which would call hooks twice
    plain_step = kind.step.__wrapped__ if getattr(kind.step, "hooked", False) else kind.step

    class InBf16(kind):  # type: ignore[valid-type, misc] - the base class is a parameter
        rounds_weights = weights  # a relay needs it for parameters in bfloat16

        @torch.no_grad()
        def step(self, closure: Callable[[], Any] | None = None) -> Any:
            # Here, not in the plain step: parameters without a gradient draw no random numbers
            loss = None
            if closure is not None:
                with torch.enable_grad():
                    loss = closure()
            updated = [param for group in self.param_groups for param in group["params"] if param.grad is not None]
            originals = {param: _widen(param) for param in updated if weights}
            packed = [_unpack(param, self.state[param]) for param in updated]
            try:
                plain_step(self)
            finally:
                for param, tensors in zip(updated, packed, strict=True):
                    _pack(param, self.state[param], tensors, weights)
                for param, original in originals.items():
                    _settle(param, *original)
            return loss

        def load_state_dict(self, state_dict: Any) -> None:
            super().load_state_dict(state_dict)  # casts moments to the type of their parameter
            for param, state in self.state.items():
                seed = {NOISE: state[NOISE]} if NOISE in state else {}
                _pack(param, state, {}, weights=False)
                state.update(seed)  # rounding packed values changes nothing and must draw nothing

    InBf16.__name__ = InBf16.__qualname__ = f"{kind.__name__}{'AllInBf16' if weights else 'InBf16'}"
    InBf16.__doc__ = (
        f"{kind.__name__} with its state{' and the weights' if weights else ''} in bfloat16, see `in_bf16`."
    )
    return InBf16


def _widen(param: nn.Parameter) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Convert a bfloat16 parameter and its gradient to float32; return the original tensors."""
    original = param.data, param.grad
    param.data = param.data.float()  # the same tensor if it is float32
    if param.grad is not None and param.grad.dtype != torch.float32:
        param.grad = param.grad.float()
    return original


def _settle(param: nn.Parameter, values: torch.Tensor, grad: torch.Tensor | None) -> None:
    """Restore the tensors of `_widen`, with the present values."""
    if param.dtype != values.dtype:
        param.data = values.copy_(param.detach())
    if param.grad is not grad:
        param.grad = grad


def _unpack(param: nn.Parameter, state: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Convert bfloat16 state to float32; return the packed tensors by name."""
    packed = {name: value for name, value in state.items() if _is_moment(name, value, param, torch.bfloat16)}
    state.update((name, value.float()) for name, value in packed.items())
    return packed


def _pack(param: torch.Tensor, state: dict[str, Any], packed: dict[str, torch.Tensor], weights: bool) -> None:
    """Convert float32 state to bfloat16, into the tensors of `packed` by name, or new ones. Round `weights` in place."""
    for name, value in list(state.items()):
        if not _is_moment(name, value, param, torch.float32):
            continue
        if name not in _TO_NEAREST:
            _round(value, name, state)
        target = packed.get(name)
        state[name] = torch.empty_like(value, dtype=torch.bfloat16) if target is None else target
        state[name].copy_(value)
    if weights:
        _round(param.detach(), "weights", state)
    if NOISE in state:
        state[NOISE] += 1


def _round(value: torch.Tensor, name: str, state: dict[str, Any]) -> None:
    if NOISE not in state:
        checksum = zlib.crc32(value.detach().cpu().contiguous().numpy().data)
        state[NOISE] = checksum << 24  # above 24 bits that count steps; 56 bits fit any integer
    round_at_random(value, zlib.crc32(f"{state[NOISE]}/{name}".encode()))  # a generator takes 32 bits


def _is_moment(name: str, value: Any, param: torch.Tensor, dtype: torch.dtype) -> bool:
    """Return True for a tensor of this type with the parameter's shape."""
    return (
        isinstance(value, torch.Tensor)
        and value.dtype == dtype
        and param.dtype in (torch.float32, torch.bfloat16)
        and value.shape == param.shape
        and name not in _COUNTS
    )
