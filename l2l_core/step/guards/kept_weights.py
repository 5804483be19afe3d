"""Tensors in the memory of a weight, which a relay moves: refused in a model, and warned of elsewhere."""

from __future__ import annotations

import gc
import warnings
from collections import deque
from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import nn

from l2l_core.eps.blocks import Unit, left_storages
from l2l_core.model import storage_key
from l2l_core.step.guards.module_attributes import MODULE_INTERNALS

_CONTAINERS = (list, tuple, dict, deque)
_MOST_ITEMS = 1000  # a longer container holds data


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
    for param in (param for unit in units for param in unit.params if param.requires_grad):
        places.update(left_storages(param))
    params = {id(param) for unit in units for param in unit.params}
    for name, value in _attribute_tensors(model):
        if id(value) not in params and storage_key(value) in places:
            raise ValueError(
                f"attribute {name} is a tensor in the memory of weights: in plain training it follows their updates, and a relay "
                "moves weights, so it would have old values, or those of another layer. Nothing was trained. Read the parameter "
                "in every forward (w = self.weight.view(-1), in a variable that is not kept), or keep a copy, which does not "
                "follow it (.detach().clone())"
            )


def warn_of_tensors_in_left_memory(model: nn.Module, units: Sequence[Unit]) -> None:
    """Warn of a tensor in memory that trained weights have just left, such as a `state_dict()` taken before.

    Those on attributes of the model are refused in the first step, unless the forward sets them anew.
    """
    params = [param for unit in units for param in unit.params if param.requires_grad]
    if not any(map(left_storages, params)):
        return
    gc.collect()  # what no variable has any more
    places = {place: param for param in params for place in left_storages(param)}
    for _, tensor in _attribute_tensors(model):
        places.pop(storage_key(tensor), None)
    for value in gc.get_objects() if places else ():
        # By its class: `isinstance` may run code of a user, and other tensors may have no memory.
        if type(value) not in (torch.Tensor, nn.Parameter) or value.layout is not torch.strided:
            continue
        if (param := places.get(storage_key(value))) is not None:
            name = next(name for name, each in model.named_parameters() if each is param)
            warnings.warn(
                f"a tensor of shape {tuple(value.shape)} outside of the model is in the memory of parameter {name}, as those of "
                "a state_dict() are: in plain training it would follow the updates, and it keeps these values from now on. Take "
                "model.state_dict() where it is used, and drop this one; to keep its values, copy it: copy.deepcopy(...)",
                stacklevel=4,
            )
            return


def _attribute_tensors(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors on plain attributes of all modules, also those in containers, with their dotted names."""
    seen: set[int] = set()  # containers may refer to themselves
    for prefix, module in model.named_modules():
        for attribute, value in vars(module).items():
            if attribute in MODULE_INTERNALS:
                continue
            waiting = [value]
            while waiting:
                value = waiting.pop()
                if isinstance(value, torch.Tensor):
                    if value.layout is torch.strided:
                        yield f"{prefix}.{attribute}" if prefix else attribute, value
                elif isinstance(value, _CONTAINERS) and len(value) <= _MOST_ITEMS and id(value) not in seen:
                    seen.add(id(value))
                    waiting += value.values() if isinstance(value, dict) else value
