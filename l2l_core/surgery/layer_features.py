"""Features that distinguish the layers of a stack, and the features of layers built from a configuration.

A layer's *features* are the shapes of its parameters by name, and the numbers and strings in its modules' attributes. Features
that differ between layers of a stack are explained by a per-layer list of the configuration, or they belong to the position:
only the first block of a T5 stack owns the position bias that all use. Such a position accepts no other layer, because the
model built from the configuration would differ.
"""

from __future__ import annotations

import hashlib
import warnings
from collections import defaultdict
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn

from l2l_core.model import is_compile_wrapper
from l2l_core.surgery.config_depth import is_config, name_words

Feature = tuple[str, str]  # ("parameter" | "attribute", dotted name)
Features = Mapping[Feature, Hashable]

_TORCH_OWN = frozenset(vars(nn.Module())) | {"training"}
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
_built_features: dict[Hashable, list[Features]] = {}  # a cache, for layer drop at every step
_MAX_BUILT = 64


def describe_layer(layer: nn.Module) -> LayerDescription:
    """Return the layer's description, cached at the first call."""
    found = _descriptions.get(layer)
    if found is None:
        found = _descriptions[layer] = _describe(layer)
    return found


def ties_of(model: nn.Module) -> list[list[str]]:
    """List the names of every parameter and buffer that has several, in the order of the model."""
    names: defaultdict[torch.Tensor, list[str]] = defaultdict(list)
    for name, param in model.named_parameters(remove_duplicate=False):
        names[param].append(name)
    for name, buffer in model.named_buffers(remove_duplicate=False):
        names[buffer].append(name)
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
                and name not in _TORCH_OWN
                and (path, name) not in positions
                and (setting := _plain_setting(value)) is not None
            ):
                rows.append((path, name, setting))
    return hashlib.sha256(repr((sorted(rows, key=repr), ties_of(layer))).encode()).hexdigest()


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
    module: Any = layer
    for part in path.split(".") if path else ():
        module = module._modules[part]
    return vars(module)


def _describe(layer: nn.Module) -> LayerDescription:
    features: dict[Feature, Hashable] = {("attribute", "class"): type(layer).__qualname__}
    positions, configs = [], []
    for path, module in layer.named_modules():
        for name, param in module._parameters.items():
            if param is not None:
                features["parameter", f"{path}.{name}".lstrip(".")] = tuple(param.shape)
        is_dropout = "drop" in type(module).__name__.lower()
        for name, value in vars(module).items():
            if name in _TORCH_OWN or name.startswith("_"):
                continue
            if is_config(name, value):
                configs.append((path, name))
            elif isinstance(value, int) and not isinstance(value, bool) and is_position_name(name):
                positions.append((path, name))
            elif isinstance(value, int | float | str) and not is_dropout and "drop" not in name:
                # Dropout may grow with depth and has no effect in evaluation.
                features["attribute", f"{path}.{name}".lstrip(".")] = value
    key = frozenset(features.items())  # equal layers share one object, so that they are compared by identity
    return LayerDescription(_interned.setdefault(key, features), tuple(positions), tuple(configs))


def is_position_name(name: str) -> bool:
    """Return whether an attribute of this name may be a layer's position (layer_idx, layer_id, block_index, idx)."""
    parts = name_words(name)
    return bool(parts & _POSITION_WORDS) and (bool(parts & {"layer", "block"}) or parts <= _POSITION_WORDS)


def varying_features(features: Sequence[Features]) -> list[Feature]:
    """List the features that are not equal everywhere."""
    kinds = list({id(each): each for each in features}.values())
    names = dict.fromkeys(name for kind in kinds for name in kind)
    return [name for name in names if len({kind.get(name) for kind in kinds}) > 1]


def explain_feature(
    name: Feature, old: Sequence[Features], entries: Sequence[Hashable], new_entries: Sequence[Hashable]
) -> list[Hashable] | None:
    """Return the value of a feature at every new position, derived from the entries of the configuration.

    Args:
        old, entries: features and entries of the layers in the stack.
        new_entries: entries of the layers to be put there.

    Returns:
        One value per new position, `UNKNOWN` for an entry that is new; None if the entries do not explain the feature.
    """
    value_of: dict[Hashable, Hashable] = {}
    for entry, features in zip(entries, old, strict=True):
        if value_of.setdefault(entry, features.get(name)) != features.get(name):
            return None
    return [value_of.get(entry, UNKNOWN) for entry in new_entries]


UNKNOWN = object()


def extrapolate_feature(name: Feature, old: Sequence[Features], count: int) -> list[Hashable]:
    """Extrapolate a feature to `count` positions: the old values repeat periodically, or else the last one does."""
    values = [features.get(name) for features in old]
    for period in range(2, len(values) // 2 + 1):
        if all(value == values[i % period] for i, value in enumerate(values)):
            return [values[i % period] for i in range(count)]
    return [values[min(i, len(values) - 1)] for i in range(count)]


def features_as_built(model: nn.Module, config: Any, name: str) -> list[Features]:
    """Return the features of the layers in the container `name` that the model's class would build from `config`.

    The model is built on the meta device. The model's class may raise any exception.
    """
    key = type(model), type(config), repr(config.to_dict()), name  # by content: every edit has another copy
    if key not in _built_features:
        while len(_built_features) >= _MAX_BUILT:
            del _built_features[next(iter(_built_features))]
        _built_features[key] = _build_on_meta(model, config, name)
    return _built_features[key]


def _build_on_meta(model: nn.Module, config: Any, name: str) -> list[Features]:
    with warnings.catch_warnings(), torch.random.fork_rng(devices=[]), torch.device("meta"):
        warnings.simplefilter("ignore")
        container = type(model)(config).get_submodule(name)
    layers = [child for child in container.children() if any(True for _ in child.parameters())]
    return [_describe(layer).features for layer in layers]


def describe_feature(name: Feature) -> str:
    """Return a feature's name for a message."""
    return ("parameter " if name[0] == "parameter" else "") + name[1]
