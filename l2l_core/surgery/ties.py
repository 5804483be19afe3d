"""Which names of a model stand for one tensor: tied weights, shared buffers, modules that are held in several places."""

from __future__ import annotations

from collections import defaultdict

import torch
from torch import nn

__all__ = ["ties_of"]


def ties_of(model: nn.Module) -> list[list[str]]:
    """List the names of every parameter and buffer that has more than one, in the order of the model.

    Two models with the same names, shapes and ties compute alike, given the same weights and the same code.
    """
    names: defaultdict[torch.Tensor, list[str]] = defaultdict(list)
    for name, param in model.named_parameters(remove_duplicate=False):
        names[param].append(name)
    for name, buffer in model.named_buffers(remove_duplicate=False):
        names[buffer].append(name)
    return [several for several in names.values() if len(several) > 1]
