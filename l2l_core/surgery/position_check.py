"""Refuse layers at positions for which the model's class would build other layers."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Mapping
from typing import Any

from torch import nn

from l2l_core.model import Stack
from l2l_core.surgery import config_depth, layer_features
from l2l_core.surgery.config_depth import PerLayerField
from l2l_core.surgery.layer_features import Feature, describe_layer
from l2l_core.surgery.stack_context import REMEDY

_MAX_BUILT_LAYERS = 64  # building a model on the meta device takes some milliseconds per layer


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
    names = layer_features.varying_features([*old, *new_features])
    if not is_configured:
        if names:
            _check_roles(stack, new, old, without_role)
        return
    expected: dict[Feature, list[Hashable]] = {}
    entries = list(zip(*(each.entries for each in lists), strict=True)) or [()] * len(old)
    new_entries = list(zip(*map(config_depth.to_hashable, moved_entries), strict=True)) or [()] * len(new)
    positional = []
    for name in names:
        values = layer_features.explain_feature(name, old, entries, new_entries)
        if values is None:
            positional.append(name)
        else:
            expected[name] = values
    # Even if all layers are alike, the configuration may require another kind at an added position.
    is_resized = len(old) != len(new) <= _MAX_BUILT_LAYERS
    built = _features_as_built(model, stack, len(new), copies) if positional or is_resized else None
    if built is None:
        expected |= {name: layer_features.extrapolate_feature(name, old, len(new)) for name in positional}
    else:
        existing = {name for features in new_features for name in features}
        expected |= {
            name: [each.get(name) for each in built]
            for name in [*positional, *layer_features.varying_features(built)]
            if name in existing
        }
    for name in sorted(expected, reverse=True):  # parameters first, for a clearer message
        for i, (value, features) in enumerate(zip(expected[name], new_features, strict=True)):
            stays = i < len(old) and new[i] is stack.layers[i]
            if not stays and value is not layer_features.UNKNOWN and value != features.get(name):
                _refuse_unlike(stack, new, i, name, features.get(name), value)


def _features_as_built(
    model: nn.Module, stack: Stack, count: int, copies: Mapping[int, Any]
) -> list[layer_features.Features] | None:
    """Return the features that the model's class would build from the changed configuration; None if it cannot be built.

    Raises:
        ValueError: the class builds the model from the old configuration but not from the changed one.
    """
    config = next((value for name, value in vars(model).items() if config_depth.is_config(name, value)), None)
    if id(config) not in copies or not hasattr(config, "to_dict"):  # the constructor may take other arguments
        return None
    try:
        found = layer_features.features_as_built(model, copies[id(config)], stack.name)
    except Exception as error:
        try:
            layer_features.features_as_built(model, config, stack.name)  # fails too if the edit is not the cause
        except Exception:  # the class takes other arguments, or cannot be built without data
            return None
        raise ValueError(
            f"{type(model).__name__} cannot be built with these {count} layers in {stack.title} "
            f"({type(error).__name__}: {error}), so that the saved model could not be loaded. Choose other layers; {REMEDY}"
        ) from error
    return found if len(found) == count else None  # a Sequential may hold more than layers


def _refuse_unlike(
    stack: Stack, new: tuple[nn.Module, ...], i: int, name: layer_features.Feature, has: object, built: object
) -> None:
    titles = {layer: f"the layer of position {j}" for j, layer in enumerate(stack.layers)}
    title, shown = titles.get(new[i], "the new layer"), layer_features.describe_feature(name)
    raise ValueError(
        f"the layers of {stack.title} are not interchangeable: {title} would be at position {i} and has "
        f"{_describe_value(shown, has)}, where the model builds a layer that has {_describe_value(shown, built)}. Saved and "
        f"loaded, the model would be another. Leave such a layer at its position and put nothing before it; {REMEDY}"
    )


def _describe_value(name: str, value: object) -> str:
    return f"no {name}" if value is None else f"{name} = {value!r}"


def _check_roles(
    stack: Stack, new: tuple[nn.Module, ...], old: list[layer_features.Features], without_role: Collection[nn.Module]
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
                f"{layer_features.describe_feature(own[0])}, and the others may rely on it. Leave it at its position and put "
                f"nothing before it; {REMEDY}"
            )
