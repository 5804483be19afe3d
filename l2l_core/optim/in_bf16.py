"""Any torch optimizer with its state in bfloat16: 4 bytes per parameter for AdamW, where float32 takes 8; weights too, if asked.

A step unpacks the state of its parameters into float32, lets the optimizer work as it always does, and packs what it has made.
A relay steps over one block at a time, so that no more than a block's state is ever unpacked.

How a value is rounded decides whether it learns. A second moment changes by a thousandth per step (``1 - beta2``), and
bfloat16 has steps of a 128th to a 256th: rounded to nearest it would stand still wherever it is, which is a bias that does not
go away. So it is rounded at random, up or down with the probabilities that make the mean right. A first moment changes by a
tenth per step, and is rounded to nearest. A weight changes by about the learning rate, which is far less than a 256th of it: it
is rounded at random, too (``weights=True``).

Random numbers are a function of parameter, step and element, whatever else is drawn and in which order: each parameter
keeps a number in its state, which begins as a checksum of its first second moment and counts on. A checksum tells parameters
apart without names or places, which edits change and parts of an optimizer do not know. So updates in parts, a resumed run,
a branch and plain training have the same bits.

What it is not: bfloat16 gradients, and a type to compute in. Weights are values of bfloat16 after every step, whether they lie
in bfloat16 (a model after `model.bfloat16()`) or in float32; both have the same bits.
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

NOISE = "noise"  # in a parameter's state: what its next random numbers are drawn from
_TO_NEAREST = frozenset({"exp_avg", "momentum_buffer"})  # change by more per step than bfloat16 rounds away
_COUNTS = frozenset({"step", "eta", "mu", "mu_product"})  # of a parameter without dimensions they look like its moments


@cache
def in_bf16(kind: type[Optimizer], weights: bool = False) -> type[Optimizer]:
    """Make the class of optimizers that are like `kind` and keep their state in bfloat16.

    What has the shape of its parameter is packed; factored moments (Adafactor) and counts stay as they are. A state that was
    saved in float32 can be loaded, and is packed then.

        Relay(model, partial(in_bf16(torch.optim.AdamW), lr=3e-4, fused=True))
        Relay(model.bfloat16(), partial(in_bf16(torch.optim.AdamW, weights=True), lr=3e-4, fused=True))

    Args:
        kind: any class of torch optimizers that keeps its state by parameter, in float32.
        weights: keep weights in bfloat16 as well, rounded at random after every step. Parameters may be of bfloat16 then, with
            gradients of float32, and a relay has masters of 2 bytes per parameter.

    Raises:
        TypeError: it is no class of optimizers.
    """
    if not (isinstance(kind, type) and issubclass(kind, Optimizer)):
        raise TypeError(f"in_bf16({kind!r}): give a class, as torch.optim.AdamW, and its settings to what comes back")
    plain_step = _without_hooks(kind.step)

    class InBf16(kind):  # type: ignore[valid-type, misc]
        rounds_weights = weights  # what a relay asks before it takes parameters of bfloat16

        @torch.no_grad()
        def step(self, closure: Callable[[], Any] | None = None) -> Any:
            # Now, not in the plain step: whoever has no gradient by then is not updated, and draws nothing
            if closure is not None:
                with torch.enable_grad():
                    loss = closure()
            moving = [param for group in self.param_groups for param in group["params"] if param.grad is not None]
            homes = {param: _widen(param) for param in moving if weights}
            packed = [_unpack(param, self.state[param]) for param in moving]
            try:
                plain_step(self)
            finally:
                for param, into in zip(moving, packed, strict=True):
                    _pack(param, self.state[param], into, weights)
                for param, home in homes.items():
                    _settle(param, *home)
            return None if closure is None else loss

        def load_state_dict(self, state_dict: Any) -> None:
            super().load_state_dict(state_dict)  # gives moments the type of their parameter
            for param, state in self.state.items():
                known = {NOISE: state[NOISE]} if NOISE in state else {}
                _pack(param, state, {}, weights=False)
                state.update(known)  # what was packed before fits as it is, and has drawn nothing

    InBf16.__name__ = InBf16.__qualname__ = f"{kind.__name__}{'AllInBf16' if weights else 'InBf16'}"
    InBf16.__doc__ = (
        f"{kind.__name__} with its state{' and the weights' if weights else ''} in bfloat16, see `in_bf16`."
    )
    return InBf16


Home = tuple[torch.Tensor, torch.Tensor | None]  # where a parameter's values were, and its gradient


def _widen(param: nn.Parameter) -> Home:
    """Let a parameter and its gradient have float32 in place of bfloat16; returns what they had."""
    home = param.data, param.grad
    param.data = param.data.float()  # the same memory, if that is float32
    if param.grad is not None and param.grad.dtype != torch.float32:
        param.grad = param.grad.float()
    return home


def _settle(param: nn.Parameter, values: torch.Tensor, grad: torch.Tensor | None) -> None:
    """Give a parameter back what `_widen` has returned, with its values as they are now."""
    if param.dtype != values.dtype:
        param.data = values.copy_(param.detach())
    if param.grad is not grad:
        param.grad = grad


def _unpack(param: nn.Parameter, state: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Put float32 in place of bfloat16; returns what was there, by name."""
    packed = {name: value for name, value in state.items() if _is_moment(name, value, param, torch.bfloat16)}
    state.update((name, value.float()) for name, value in packed.items())
    return packed


def _pack(param: nn.Parameter, state: dict[str, Any], into: dict[str, torch.Tensor], weights: bool) -> None:
    """Put bfloat16 in place of float32: into the memory that it had, by name, or into new. Round `weights` where they lie."""
    for name, value in list(state.items()):
        if not _is_moment(name, value, param, torch.float32):
            continue
        if name not in _TO_NEAREST:
            _round(value, name, state)
        packed = into.get(name)
        state[name] = torch.empty_like(value, dtype=torch.bfloat16) if packed is None else packed
        state[name].copy_(value)
    if weights:
        _round(param.detach(), "weights", state)
    if NOISE in state:
        state[NOISE] += 1


def _round(value: torch.Tensor, name: str, state: dict[str, Any]) -> None:
    if NOISE not in state:
        state[NOISE] = _checksum(value) << 24  # above what counts steps; 56 bits, so that it fits any integer
    round_at_random(value, zlib.crc32(f"{state[NOISE]}/{name}".encode()))  # 32 bits are all that a generator takes


def _is_moment(name: str, value: Any, param: nn.Parameter, dtype: torch.dtype) -> bool:
    """Tell whether it is of the type and has one element for each of the parameter's."""
    return (
        isinstance(value, torch.Tensor)
        and value.dtype == dtype
        and param.dtype in (torch.float32, torch.bfloat16)
        and value.shape == param.shape
        and name not in _COUNTS
    )


def _checksum(value: torch.Tensor) -> int:
    return zlib.crc32(value.detach().cpu().contiguous().numpy())


def _without_hooks(step: Callable[..., Any]) -> Callable[..., Any]:
    """Undo what torch does to `step` of a class when its first instance is made: hooks would be fired twice."""
    return step.__wrapped__ if getattr(step, "hooked", False) else step  # type: ignore[attr-defined]
