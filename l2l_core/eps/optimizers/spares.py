"""Whether an optimizer leaves alone what has no gradient, found out by trying it on a toy.

Torch's own do. Then the undo of an update needs a copy of what has a gradient alone: of adapters, not of the frozen model
around them. What it is not: a condition. An optimizer that writes more has more copied.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from l2l_core.eps.optimizers.parts import over, silent

_STEPS = 3
_MOVING = 0.1  # in place of rates that may be 0 for now, at the beginning of a schedule


def spares_others(optimizer: Optimizer) -> bool:
    """Tell whether parameters without a gradient stay as they are, without any state."""
    toy = over(optimizer, [_toy_group(group) for group in optimizer.param_groups], defaultdict(dict))
    for name, value in list(vars(toy).items()):
        if name not in ("param_groups", "state", "defaults") and isinstance(value, dict | list | torch.Tensor):
            setattr(toy, name, copy.copy(value))  # the optimizer's own must not hear of the toy
    pairs = [group["params"] for group in toy.param_groups]
    before = [other.detach().clone() for _, other in pairs]
    for _ in range(_STEPS):
        for learns, _ in pairs:
            learns.grad = torch.ones_like(learns)
        try:
            with silent(optimizer):  # the toy has no hooks of its own, but those of all optimizers would hear of it
                toy.step()
        except Exception:  # it cannot do without: then nothing is known
            return False
    return all(
        torch.equal(other, was) and not toy.state.get(other) for (_, other), was in zip(pairs, before, strict=True)
    )


def _toy_group(group: dict[str, Any]) -> dict[str, Any]:
    """Make a group with settings as in one of the optimizer's, over two parameters: one will have a gradient."""
    dims = max((param.dim() for param in group["params"]), default=1)
    settings = {name: copy.deepcopy(value) for name, value in group.items() if name not in ("params", "param_names")}
    for name in {"lr", "weight_decay"}.intersection(settings):
        is_tensor = isinstance(settings[name], torch.Tensor)
        settings[name] = torch.full_like(settings[name], _MOVING) if is_tensor else _MOVING
    return {**settings, "params": [nn.Parameter(torch.ones((3,) * dims)) for _ in range(2)]}
