"""Refusal of models that keep a tensor in the memory of a weight, which a relay moves between steps."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import nn

from l2l_core._torch import pytree
from l2l_core.eps.blocks import Unit
from l2l_core.model import storage_key
from l2l_core.step.guards.module_attributes import MODULE_INTERNALS

_CONTAINERS = (list, tuple, dict, deque)


def refuse_kept_weights(model: nn.Module, units: Sequence[Unit], on_device: Iterable[torch.Tensor]) -> None:
    """Raise ValueError if an attribute of a module is a tensor in the memory of weights, but no parameter.

    Plain training updates weights in place, so that such a tensor follows them. In a relay it would have old values, or those of
    the layer that is loaded next.

    Args:
        model: after a forward, which may have set such attributes.
        units: its shell and layers.
        on_device: buffers that hold weights in this pass.
    """
    places = {storage_key(buffer) for buffer in on_device}
    for block in (block for unit in units for block in unit.blocks):
        block.left_storages = [each for each in block.left_storages if not each.expired()]
        places.update(each.cdata for each in block.left_storages)
    params = {id(param) for unit in units for param in unit.params}
    for name, value in _attribute_tensors(model):
        if id(value) not in params and storage_key(value) in places:
            raise ValueError(
                f"attribute {name} is a tensor in the memory of weights: in plain training it follows their updates, and a relay "
                "moves weights, so it would have old values, or those of another layer. Nothing was trained. Read the parameter "
                "in every forward (w = self.weight.view(-1), in a variable that is not kept), or keep a copy, which does not "
                "follow it (.detach().clone())"
            )


def _attribute_tensors(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors on plain attributes of all modules, also those in containers, with their dotted names."""
    for prefix, module in model.named_modules():
        for attribute, value in vars(module).items():
            if attribute in MODULE_INTERNALS or not isinstance(value, (torch.Tensor, *_CONTAINERS)):
                continue
            name = f"{prefix}.{attribute}" if prefix else attribute
            yield from ((name, leaf) for leaf in pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor))
