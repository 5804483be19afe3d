"""By what an optimizer of torch's own is known again, so that it need not be tried twice."""

from __future__ import annotations

from collections.abc import Hashable
from functools import cache

import torch
from torch.optim import Optimizer

from l2l_core.eps.optimizers.toys import dims_of
from l2l_core.model import Tensors, encode


def key_of(optimizer: Optimizer) -> Hashable | None:
    """Return what determines how toys of a new optimizer of torch's behave.

    None where more might: of another class, with a state, with hooks or attributes that torch does not give it (a `step` of its
    own, as schedulers do), or with settings that are tensors or no plain data.
    """
    kind, held = type(optimizer), vars(optimizer)
    is_as_made = f"{kind.__module__}.".startswith("torch.optim.") and held.keys() <= _names()
    if not is_as_made or optimizer.state or any(held[name] for name in held if name.endswith("_hooks")):
        return None
    groups = optimizer.param_groups
    tensors: Tensors = {}
    settings = [optimizer.defaults, *({n: v for n, v in group.items() if n != "params"} for group in groups)]
    try:
        plain = encode(settings, "settings", tensors)
    except ValueError:
        return None
    # In words, since 1, 1.0 and True are equal, and other settings.
    words = repr((plain, [dims_of(group["params"]) for group in groups]))
    return None if tensors else (kind, kind.step, torch.get_default_dtype(), torch.get_default_device(), words)


@cache
def _names() -> set[str]:
    """Of what torch keeps on an optimizer of its own."""
    return set(vars(torch.optim.AdamW([torch.zeros(())], fused=True)))
