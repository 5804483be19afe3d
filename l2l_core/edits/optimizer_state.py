"""Optimizer state of layers that are copied, interpolated or rewritten.

Names alone decide, as torch's optimizers use them: moments scale with the gradients, counters of updates do not.
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

ParamState = Mapping[str, Any]  # optimizer state of one parameter, by name
Policy = Literal["fresh", "copy"] | float  # of the state of new layers; a number scales a copy
InheritFn = Callable[[ParamState], dict[str, Any] | None]  # state of a parameter -> state of its copy, None: no state

_COUNTER_NAMES = {"step", "mu_product", "eta", "mu"}  # depend on the number of updates (NAdam, ASGD)
_UNSCALED_NAMES = _COUNTER_NAMES | {"ax", "step_size"}  # independent of the size of gradients (ASGD, Rprop)
_SECOND_MOMENTS = {"square_avg", "sum", "acc_delta", "row_var", "col_var", "variance"}  # besides "..._sq"


class ParameterSnapshot(NamedTuple):
    """Values and optimizer state of a parameter; None is no state."""

    value: torch.Tensor
    state: dict[str, Any] | None

    @property
    def nbytes(self) -> int:
        return self.value.nbytes + state_bytes(self.state or {})


def states_of(unit: Unit, store: LayerStore) -> dict[nn.Parameter, ParamState]:
    """Return the optimizer state of the parameters of a layer in a stack, without parameters that have none."""
    state = store.optimizer.state
    return {param: state[master] for param, master in store.masters.master_by_param(unit).items() if master in state}


def make_inherit(policy: Policy) -> InheritFn:
    """Return the function that derives a new parameter's state; it raises ValueError if it has to scale quantised state."""
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
    """Interpolate two states; integers and counters are those of `a`.

    Return None if one is missing, if they have different entries (groups with other settings), or if a state is quantised.
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
    """Return whether `value` holds codes instead of numbers, as in 8-bit optimizers."""
    return isinstance(value, torch.Tensor) and value.dtype in (torch.uint8, torch.int8) and value.dim() > 0


def reshape_state(param: torch.Tensor, state: ParamState) -> dict[str, Any]:
    """Copy a state for a parameter of another shape with as many elements; entries of other sizes keep their shape."""

    def shaped(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        # A counter has no dimensions, but as many elements as a parameter with one element.
        return value.clone().view_as(param) if value.numel() == param.numel() and value.dim() else value.clone()

    return {name: shaped(value) for name, value in state.items()}


def check_policy(policy: object, warmup: object) -> None:
    """Raise ValueError for an invalid `optimizer=` or `warmup=` of a new layer."""
    if policy not in ("fresh", "copy") and not is_finite(policy):
        raise ValueError(
            f"optimizer={policy!r}: must be 'fresh', 'copy' or a finite number that scales the inherited state"
        )
    if not isinstance(warmup, int) or isinstance(warmup, bool) or warmup < 0:
        raise ValueError(f"warmup={warmup!r}: must be a number of updates, 0 for none")


def is_finite(value: object) -> bool:
    """Return whether `value` is a finite number."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
