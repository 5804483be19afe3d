"""What becomes of the optimizer's state when a layer is made like another one, mixed with one, or rewritten.

An optimizer's state is known by its names alone: which entries are moments, and so scale with the gradients, and which
count updates, is read off the names that optimizers of torch give them.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple

import torch
from torch import nn

from l2l_core.eps import LayerStore
from l2l_core.eps.blocks import Unit
from l2l_core.eps.optimizers import state_bytes

ParamState = Mapping[str, Any]  # what the optimizer knows of one parameter, by name
Policy = Literal["fresh", "copy"] | float  # of the state of new layers; a number scales a copy
InheritFn = Callable[
    [ParamState], dict[str, Any] | None
]  # the state of a copy from that of a parameter; None: start anew

_COUNTER_NAMES = {"step", "mu_product", "eta", "mu"}  # go with the number of updates (NAdam, ASGD)
_UNSCALED_NAMES = _COUNTER_NAMES | {
    "ax",
    "step_size",
}  # of weights and of steps, whatever the gradients are (ASGD, Rprop)
_SECOND_MOMENTS = {"square_avg", "sum", "acc_delta", "row_var", "col_var", "variance"}  # besides "..._sq"


class ParameterSnapshot(NamedTuple):
    """Is what a parameter is to have, or had: values, and what the optimizer knows of it (None: it starts anew)."""

    value: torch.Tensor
    state: dict[str, Any] | None

    @property
    def nbytes(self) -> int:
        return self.value.nbytes + state_bytes(self.state or {})


def states_of(unit: Unit, store: LayerStore) -> dict[nn.Parameter, ParamState]:
    """Give what the optimizer knows of each parameter of a layer in a stack; nothing, where it has not been updated."""
    state = store.optimizer.state
    return {param: state[master] for param, master in store.masters.master_by_param(unit).items() if master in state}


def make_inherit(policy: Policy) -> InheritFn:
    """Make the function that says what a new parameter takes over from the state of its model.

    What it makes raises ValueError where quantised state is to be scaled.
    """
    if policy == "fresh":
        return lambda state: None
    factor = 1.0 if policy == "copy" else float(policy)

    def scaled(name: str, value: Any) -> Any:
        if factor != 1.0 and _is_quantised(value):
            raise ValueError(
                f"optimizer={policy!r}: the state {name!r} is quantised, and {value.dtype} codes cannot be scaled. Use "
                "optimizer='copy' or 'fresh'"
            )
        if not isinstance(value, torch.Tensor):
            return copy.deepcopy(value)
        if name in _UNSCALED_NAMES or factor == 1.0:
            return value.clone()
        return value * (factor**2 if name.endswith("_sq") or name in _SECOND_MOMENTS else factor)

    return lambda state: {name: scaled(name, value) for name, value in state.items()} or None


def mix_states(a: ParamState | None, b: ParamState | None, weight: float) -> dict[str, Any] | None:
    """Mix both states; whole numbers, the count of steps and what goes with it are those of `a`.

    Where one is missing, or holds other things than the other (groups with other settings), the optimizer starts anew; so it
    does where state is quantised, whose codes have no mean.
    """
    if not a or not b or a.keys() != b.keys() or any(map(_is_quantised, a.values())):
        return None
    return {
        name: torch.lerp(value, b[name], weight)
        if isinstance(value, torch.Tensor) and value.is_floating_point() and name not in _COUNTER_NAMES
        else copy.deepcopy(value)
        for name, value in a.items()
    }


def _is_quantised(value: Any) -> bool:
    """Tell whether it holds codes in place of numbers, as 8-bit optimizers do."""
    return isinstance(value, torch.Tensor) and value.dtype in (torch.uint8, torch.int8) and value.dim() > 0


def reshape_state(param: torch.Tensor, state: ParamState) -> dict[str, Any]:
    """Copy a state for a parameter of another, equally large shape; what is no moment (a count) stays as it is."""

    def shaped(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        # A count is a tensor without dimensions, and as large as a parameter of one element
        return value.clone().view_as(param) if value.numel() == param.numel() and value.dim() else value.clone()

    return {name: shaped(value) for name, value in state.items()}


def check_policy(policy: object, warmup: object) -> None:
    """Refuse what says nothing about the state and the learning rate of a new layer.

    Raises:
        ValueError: of either; says what would be valid.
    """
    if policy not in ("fresh", "copy") and not is_finite(policy):
        raise ValueError(
            f"optimizer={policy!r}: must be 'fresh', 'copy' or a finite number that scales what is inherited"
        )
    if not isinstance(warmup, int) or isinstance(warmup, bool) or warmup < 0:
        raise ValueError(f"warmup={warmup!r}: must be a number of updates, 0 for none")


def describe_policy(policy: Policy, warmup: int) -> str:
    """Word both as the journal says them."""
    words = policy if isinstance(policy, str) else f"scaled by {policy:g}"
    return words + (f", warm-up over {warmup} updates" if warmup else "")


def is_finite(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
