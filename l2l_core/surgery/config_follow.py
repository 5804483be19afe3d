"""The configuration follows a stack: which of its fields must say the new depth, and the changed copies of it.

A configuration is never changed in place: models that were built from one object must not change together (Llama runs as
many layers as its configuration says).
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

from torch import nn

from l2l_core.surgery import config_depth
from l2l_core.surgery.assignments import Assignments
from l2l_core.surgery.config_depth import DepthField, LayerList
from l2l_core.surgery.likeness import anatomy, attributes_at
from l2l_core.surgery.surroundings import REMEDY, Surroundings


def find_depth_fields(around: Surroundings, wanted: str | None, is_resized: bool, trust: bool) -> list[DepthField]:
    """Find the fields that must say the new depth, in every config from the owner's to the model's.

    Raises:
        ValueError: several may be the depth, or none is, or settings of single layers would not follow.
    """
    if wanted is not None:
        return _wanted_fields(around, wanted)
    followed: list[DepthField] = []
    for holder, config in around.configs:
        inside = {id(inner) for _, inner in config_depth.nested(config)}
        if inside & {id(each.config) for each in followed}:
            continue
        found = config_depth.depth_fields(config, around.place)
        chosen = config_depth.best(found)
        if len(chosen) > 1:
            raise ValueError(
                f"several fields of {type(config).__name__} may be the depth of {around.stack.title} ({around.place.depth}): "
                f"{', '.join(each.label for each in chosen)}; say which one: depth_field={chosen[0].label!r}"
            )
        if holder is around.owner:  # a config of this stack alone (T5): its general depth is that of the stack, too
            standard = config_depth.alias(config, "num_hidden_layers")
            chosen = chosen + [e for e in found if e.config is config and e.name == standard and e not in chosen]
        followed += chosen
        if not chosen and hasattr(config, "to_dict") and is_resized and not trust:
            _refuse_unknown_depth(around, config)
    for each in followed:
        if "_heterogeneity_spec" in config_depth.fields(each.config) and not trust:
            raise ValueError(
                "the configuration overrides settings for single layers (per_layer_config), and these would not follow the "
                f"layers of {around.stack.title}; {REMEDY}"
            )
    return followed


def _refuse_unknown_depth(around: Surroundings, config: Any) -> None:
    place = around.place
    in_stages = f", stage {place.stage} of {place.stages}" if place.stage is not None else ""
    raise ValueError(
        f"no field of {type(config).__name__} is the depth of {around.stack.title} ({place.depth}{in_stages}), so that the "
        f"saved model could not be loaded. Fields with this value: {_listed([config], place.depth)}; name the right one with "
        f"depth_field=, or {REMEDY}"
    )


def _wanted_fields(around: Surroundings, wanted: str) -> list[DepthField]:
    """Find the field that the caller named, in all configs that have it."""
    place, found = around.place, {}
    head, dot, last = wanted.rpartition(".")
    for _, config in around.configs:
        for prefix, inner in config_depth.nested(config):
            name = config_depth.alias(inner, last)
            value = config_depth.fields(inner).get(name)
            if prefix != head + dot:
                continue
            if _says(value, place.depth):
                found[id(inner)] = DepthField(inner, name, wanted)
            elif place.stage is not None and isinstance(value, list | tuple) and len(value) > place.stage:
                if _says(value[place.stage], place.depth):
                    found[id(inner)] = DepthField(inner, name, wanted, place.stage)
    if not found:
        raise ValueError(
            f"depth_field={wanted!r} is not {place.depth}, the depth of {around.stack.title}, in any configuration of the "
            f"model; fields with this value: {_listed([config for _, config in around.configs], place.depth)}"
        )
    return list(found.values())


def _listed(configs: list[Any], number: int) -> str:
    """List the fields that are `number`, for a message."""
    inside = (each for config in configs for each in config_depth.nested(config))
    labels = [
        f"{prefix}{name}"
        for prefix, config in inside
        for name, value in config_depth.fields(config).items()
        if _says(value, number)
    ]
    return ", ".join(dict.fromkeys(labels)) or "none"


def _says(value: Any, number: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value == number


def changed_configs(
    around: Surroundings,
    followed: list[DepthField],
    lists: list[LayerList],
    travelled: list[list[Any]],
    count: int,
) -> dict[int, Any]:
    """Copy and change configs, by the id of each; configs inside others are copied with them."""
    memo: dict[int, Any] = {}
    touched = {id(each.config) for each in followed}
    for _, config in reversed(around.configs):  # the model's first: it may hold the others
        if id(config) not in memo and touched & {id(inner) for _, inner in config_depth.nested(config)}:
            copy.deepcopy(config, memo)  # one memo for all: what two of them hold is one object in the copies too
    for each in followed:
        config_depth.fields(memo[id(each.config)])[each.name] = each.value(count)
    for listed, entries in zip(lists, travelled, strict=True):
        if id(listed.config) in memo:
            config_depth.fields(memo[id(listed.config)])[listed.name] = listed.write(entries)
    return memo


def point_to(
    assignments: Assignments, around: Surroundings, new: tuple[nn.Module, ...], copies: Mapping[int, Any]
) -> None:
    """Let every module hold the changed configs, new layers as well: a deep copy has a copy of the configuration."""
    for _, module in around.shell:
        for name, value in vars(module).items():
            if config_depth.is_config(name, value) and id(value) in copies:
                assignments.set(vars(module), name, copies[id(value)])
    stack = around.stack
    own, usual = set(stack.layers), {}
    for layer in stack.layers:
        for place in anatomy(layer).configs:
            if place not in usual:
                usual[place] = attributes_at(layer, place[0]).get(place[1])
    for layer in new:
        for path, name in anatomy(layer).configs:
            attributes = attributes_at(layer, path)
            value = attributes.get(name)
            if layer not in own and type(usual.get((path, name))) is type(value):
                value = usual[path, name]
            value = copies.get(id(value), value)
            if value is not attributes.get(name):
                assignments.set(attributes, name, value)
