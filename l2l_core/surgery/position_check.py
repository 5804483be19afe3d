"""Refuse layers at positions for which the model's class would build other layers.

Features that differ between layers of a stack are explained by a per-layer list of the configuration, or they belong to the
position: only the first block of a T5 stack owns the position bias that all use. Such a position accepts no other layer,
because the model built from the configuration would differ.
"""

from __future__ import annotations

import warnings
from collections.abc import Collection, Hashable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from l2l_core.model import Stack
from l2l_core.surgery import config_depth
from l2l_core.surgery.config_depth import PerLayerField
from l2l_core.surgery.layer_features import Feature, Features, describe_layer, read_description
from l2l_core.surgery.stack_context import REMEDY

_MAX_BUILT_LAYERS = 64  # building a model on the meta device takes some milliseconds per layer
_MAX_BUILT_MODELS = 64
_built_features: dict[Hashable, list[Features]] = {}  # a cache, for layer drop at every step
_UNKNOWN = object()


def check_interchangeable(
    model: nn.Module,
    stack: Stack,
    new: tuple[nn.Module, ...],
    lists: list[PerLayerField],
    moved_entries: list[list[Any]],
    copies: Mapping[int, Any],
    is_configured: bool,
    without_role: Collection[nn.Module],
) -> None:
    """Raise ValueError for a layer at a position for which the model would build another one."""
    old = [describe_layer(layer).features for layer in stack.layers]
    new_features = [describe_layer(layer).features for layer in new]
    names = _varying_features([*old, *new_features])
    if not is_configured:
        if names:
            _check_roles(stack, new, old, without_role)
        return
    entries = list(zip(*(each.entries for each in lists), strict=True)) or [()] * len(old)
    new_entries = list(zip(*map(config_depth.to_hashable, moved_entries), strict=True)) or [()] * len(new)
    explained = {name: _explain_feature(name, old, entries, new_entries) for name in names}
    expected = {name: values for name, values in explained.items() if values is not None}
    positional = [name for name, values in explained.items() if values is None]
    # Even if all layers are alike, the configuration may require another kind at an added position.
    is_resized = len(old) != len(new) <= _MAX_BUILT_LAYERS
    built = _features_as_built(model, stack, len(new), copies) if positional or is_resized else None
    if built is None:
        expected |= {name: _extrapolate_feature(name, old, len(new)) for name in positional}
    else:
        existing = {name for features in new_features for name in features}
        decided = existing.intersection([*positional, *_varying_features(built)])
        expected |= {name: [each.get(name) for each in built] for name in decided}
    for name in sorted(expected, reverse=True):  # parameters first, for a clearer message
        for i, (value, features) in enumerate(zip(expected[name], new_features, strict=True)):
            stays = i < len(old) and new[i] is stack.layers[i]
            if not stays and value is not _UNKNOWN and value != features.get(name):
                _refuse_unlike(stack, new, i, name, features.get(name), value)


def _varying_features(features: Sequence[Features]) -> list[Feature]:
    """List the features that are not equal everywhere."""
    kinds = list({id(each): each for each in features}.values())
    names = dict.fromkeys(name for kind in kinds for name in kind)
    return [name for name in names if len({kind.get(name) for kind in kinds}) > 1]


def _explain_feature(
    name: Feature, old: Sequence[Features], entries: Sequence[Hashable], new_entries: Sequence[Hashable]
) -> list[Hashable] | None:
    """Return the value at every new position, or `_UNKNOWN`; None if the entries explain nothing."""
    value_of: dict[Hashable, Hashable] = {}
    for entry, features in zip(entries, old, strict=True):
        if value_of.setdefault(entry, features.get(name)) != features.get(name):
            return None
    return [value_of.get(entry, _UNKNOWN) for entry in new_entries]


def _extrapolate_feature(name: Feature, old: Sequence[Features], count: int) -> list[Hashable]:
    """Extrapolate a feature to `count` positions: the old values repeat periodically, or else the last one does."""
    values = [features.get(name) for features in old]
    for period in range(2, len(values) // 2 + 1):
        if all(value == values[i % period] for i, value in enumerate(values)):
            return [values[i % period] for i in range(count)]
    return [values[min(i, len(values) - 1)] for i in range(count)]


def _features_as_built(model: nn.Module, stack: Stack, count: int, copies: Mapping[int, Any]) -> list[Features] | None:
    """Return the features that the model's class would build from the changed configuration; None if it never builds."""
    config = next((value for name, value in vars(model).items() if config_depth.is_config(name, value)), None)
    if id(config) not in copies or not hasattr(config, "to_dict"):  # the constructor may take other arguments
        return None
    try:
        found = _build_on_meta(model, copies[id(config)], stack.name)
    except Exception as error:
        try:
            _build_on_meta(model, config, stack.name)  # fails too if the edit is not the cause
        except Exception:  # the class takes other arguments, or cannot be built without data
            return None
        raise ValueError(
            f"{type(model).__name__} cannot be built with these {count} layers in {stack.title} "
            f"({type(error).__name__}: {error}), so that the saved model could not be loaded. Choose other layers; {REMEDY}"
        ) from error
    return found if len(found) == count else None  # a Sequential may hold more than layers


def _build_on_meta(model: nn.Module, config: Any, name: str) -> list[Features]:
    """Return the features of the layers in the container `name` that the model's class would build from `config`."""
    key = type(model), type(config), repr(config.to_dict()), name  # by content: every edit has another copy
    if key not in _built_features:
        while len(_built_features) >= _MAX_BUILT_MODELS:
            del _built_features[next(iter(_built_features))]
        with warnings.catch_warnings(), torch.random.fork_rng(devices=[]), torch.device("meta"):
            warnings.simplefilter("ignore")
            container = type(model)(config).get_submodule(name)
        layers = [child for child in container.children() if any(True for _ in child.parameters())]
        _built_features[key] = [read_description(layer).features for layer in layers]
    return _built_features[key]


def _refuse_unlike(stack: Stack, new: tuple[nn.Module, ...], i: int, name: Feature, has: object, built: object) -> None:
    titles = {layer: f"the layer of position {j}" for j, layer in enumerate(stack.layers)}
    shown = _describe_feature(name)
    has, built = (f"no {shown}" if value is None else f"{shown} = {value!r}" for value in (has, built))
    raise ValueError(
        f"the layers of {stack.title} are not interchangeable: {titles.get(new[i], 'the new layer')} would be at position {i} "
        f"and has {has}, where the model builds a layer that has {built}. Saved and loaded, the model would be another. Leave "
        f"such a layer at its position and put nothing before it; {REMEDY}"
    )


def _check_roles(
    stack: Stack, new: tuple[nn.Module, ...], old: list[Features], without_role: Collection[nn.Module]
) -> None:
    """Refuse to move a layer with parameters that the others of its class lack, for models without a configuration."""
    classes = [type(layer) for layer in stack.layers]
    for i, features in enumerate(old):
        peers = [old[j] for j, kind in enumerate(classes) if kind is classes[i] and j != i]
        own = [
            name for name in features if name[0] == "parameter" and peers and not any(name in peer for peer in peers)
        ]
        if stack.layers[i] not in without_role and own and new[: i + 1] != stack.layers[: i + 1]:
            raise ValueError(
                f"the layers of {stack.title} are not interchangeable: only the {classes[i].__name__} at position {i} has "
                f"{_describe_feature(own[0])}, and the others may rely on it. Leave it at its position and put nothing before "
                f"it; {REMEDY}"
            )


def _describe_feature(name: Feature) -> str:
    return ("parameter " if name[0] == "parameter" else "") + name[1]
