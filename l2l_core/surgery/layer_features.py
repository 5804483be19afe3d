"""Features that distinguish the layers of a stack.

A layer's *features* are the shapes of its parameters by name, and the numbers and strings in its modules' attributes.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Hashable, Mapping, Set
from dataclasses import dataclass
from itertools import chain
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn

from l2l_core.model import is_compile_wrapper
from l2l_core.surgery.config_depth import is_config, is_int, name_words

Feature = tuple[str, str]  # ("parameter" | "attribute", dotted name)
Features = Mapping[Feature, Hashable]

_TORCH_OWN = frozenset(vars(nn.Module())) | {"training"}
_FLAG_4BIT = "compute_type_is_set"  # of bitsandbytes' Linear4bit, which takes its dtype from the first input
_POSITION_WORDS = {"id", "idx", "index", "number"}


@dataclass(frozen=True)
class LayerDescription:
    """Features and attribute names of a layer; it holds no reference that keeps the layer alive."""

    features: Features  # equal features are the same object
    positions: tuple[tuple[str, str], ...]  # (submodule, attribute) of integers that may be the layer's position
    configs: tuple[tuple[str, str], ...]  # (submodule, attribute) of configuration objects


# A cache, for edits of stacks with 1,000 layers.
_descriptions: WeakKeyDictionary[nn.Module, LayerDescription] = WeakKeyDictionary()
_interned: dict[frozenset[tuple[Feature, Hashable]], Features] = {}


def describe_layer(layer: nn.Module) -> LayerDescription:
    """Return the layer's description, cached at the first call."""
    if layer not in _descriptions:
        _descriptions[layer] = read_description(layer)
    return _descriptions[layer]


def ties_of(model: nn.Module) -> list[list[str]]:
    """List the names of every parameter and buffer that has several, in the order of the model."""
    names: defaultdict[torch.Tensor, list[str]] = defaultdict(list)
    tensors = chain(model.named_parameters(remove_duplicate=False), model.named_buffers(remove_duplicate=False))
    for name, tensor in tensors:
        names[tensor].append(name)
    return [several for several in names.values() if len(several) > 1]


def layer_fingerprint(layer: nn.Module) -> str:
    """Return a checksum of a layer without weights and position; layers with equal checksums compute alike.

    It includes more than the features: the classes of all parts, all settings (dropout and tuples too), and ties. Functions
    without a name are not included.
    """
    description = describe_layer(layer)  # cached: the parameters of a layer on disk have no shapes
    positions = set(description.positions)
    rows: list[Any] = [(*name, shape) for name, shape in description.features.items() if name[0] == "parameter"]
    for path, module in layer.named_modules():
        rows.append((path, "class", type(module).__qualname__))
        buffers = module._buffers.items()
        rows += [(path, name, None if b is None else (tuple(b.shape), str(b.dtype))) for name, b in buffers]
        for name, value in () if is_compile_wrapper(module) else vars(module).items():
            if (
                not name.startswith("_")
                and name not in _own_names(module)
                and (path, name) not in positions
                and (setting := _plain_setting(value)) is not None
            ):
                rows.append((path, name, setting))
    return hashlib.sha256(repr((sorted(rows, key=repr), ties_of(layer))).encode()).hexdigest()


def _own_names(module: nn.Module) -> Set[str]:
    """Return the attributes that are no settings: torch's own, and those that a first forward or the CPU decides."""
    if _FLAG_4BIT not in vars(module):
        return _TORCH_OWN
    return _TORCH_OWN | {_FLAG_4BIT, "compute_dtype", "support_avx512bf16_for_cpu"}


def _plain_setting(value: Any) -> Any:
    """Return a setting in a form that is equal in every process; None for other values."""
    if isinstance(value, bool | int | float | str | torch.dtype):
        return repr(value)
    if isinstance(value, tuple | list):
        return [_plain_setting(each) for each in value]
    if isinstance(value, torch.Tensor):
        return tuple(value.shape), str(value.dtype)
    return getattr(value, "__qualname__", None) if callable(value) and not isinstance(value, nn.Module) else None


def forget_description(layer: nn.Module) -> None:
    """Remove the layer's description from the cache, because the layer may have been changed."""
    _descriptions.pop(layer, None)


def attributes_at(layer: nn.Module, path: str) -> dict[str, Any]:
    """Return the attributes of the submodule at `path` ("" is the layer itself)."""
    return vars(layer.get_submodule(path))


def read_description(layer: nn.Module) -> LayerDescription:
    """Return the layer's description without the cache."""
    features: dict[Feature, Hashable] = {("attribute", "class"): type(layer).__qualname__}
    positions, configs = [], []
    for path, module in layer.named_modules():
        for name, param in module._parameters.items():
            if param is not None:
                features["parameter", f"{path}.{name}".lstrip(".")] = tuple(param.shape)
        is_dropout = "drop" in type(module).__name__.lower()
        for name, value in vars(module).items():
            if name in _own_names(module) or name.startswith("_"):
                continue
            if is_config(name, value):
                configs.append((path, name))
            elif is_int(value) and _is_position_name(name):
                positions.append((path, name))
            elif isinstance(value, int | float | str) and not is_dropout and "drop" not in name:
                # Dropout may grow with depth and has no effect in evaluation.
                features["attribute", f"{path}.{name}".lstrip(".")] = value
    key = frozenset(features.items())  # equal layers share one object, so that they are compared by identity
    return LayerDescription(_interned.setdefault(key, features), tuple(positions), tuple(configs))


def _is_position_name(name: str) -> bool:
    """Return whether an attribute of this name may be a layer's position (layer_idx, layer_id, block_index, idx)."""
    parts = name_words(name)
    return bool(parts & _POSITION_WORDS) and (bool(parts & {"layer", "block"}) or parts <= _POSITION_WORDS)
