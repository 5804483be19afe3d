"""Update the configuration of a model to a stack's new depth.

A configuration is never changed in place, because several models may share it (Llama runs as many layers as its
configuration has).
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

from torch import nn

from l2l_core.surgery import config_depth
from l2l_core.surgery.assignments import Assignments
from l2l_core.surgery.config_depth import DepthField, PerLayerField
from l2l_core.surgery.layer_features import attributes_at, describe_layer
from l2l_core.surgery.stack_context import REMEDY, StackContext


def find_depth_fields(context: StackContext, wanted: str | None, is_resized: bool, force: bool) -> list[DepthField]:
    """Return the fields to set to the new depth, in every config from the owner's to the model's.

    Raises:
        ValueError: several fields or none may be the depth, or settings of single layers would not be updated.
    """
    if wanted is not None:
        return _find_named_field(context, wanted)
    followed: list[DepthField] = []
    for holder, config in context.configs:
        inside = {id(inner) for _, inner in config_depth.nested_configs(config)}
        if inside & {id(each.config) for each in followed}:
            continue
        found = config_depth.find_depth_candidates(config, context.location)
        chosen = config_depth.most_specific(found)
        if len(chosen) > 1:
            raise ValueError(
                f"several fields of {type(config).__name__} may be the depth of {context.stack.title} "
                f"({context.location.depth}): {', '.join(each.label for each in chosen)}; choose one: "
                f"depth_field={chosen[0].label!r}"
            )
        if holder is context.owner:  # a config of this stack alone (T5): its general depth is the stack's, too
            standard = config_depth.stored_name(config, "num_hidden_layers")
            chosen = chosen + [e for e in found if e.config is config and e.name == standard and e not in chosen]
        followed += chosen
        if not chosen and hasattr(config, "to_dict") and is_resized and not force:
            _refuse_unknown_depth(context, config)
    for each in followed:
        if "_heterogeneity_spec" in config_depth.stored_fields(each.config) and not force:
            raise ValueError(
                "the configuration overrides settings for single layers (per_layer_config), and these would not be updated with "
                f"the layers of {context.stack.title}; {REMEDY}"
            )
    return followed


def _refuse_unknown_depth(context: StackContext, config: Any) -> None:
    place = context.location
    in_stages = f", stage {place.stage} of {place.stages}" if place.stage is not None else ""
    raise ValueError(
        f"no field of {type(config).__name__} is the depth of {context.stack.title} ({place.depth}{in_stages}), so that the "
        f"saved model could not be loaded. Fields with this value: {_list_fields([config], place.depth)}; pass the right one as "
        f"depth_field=; {REMEDY}"
    )


def _find_named_field(context: StackContext, wanted: str) -> list[DepthField]:
    """Return the field given as `depth_field`, in all configs that have it."""
    place, found = context.location, {}
    head, dot, last = wanted.rpartition(".")
    for _, config in context.configs:
        for prefix, inner in config_depth.nested_configs(config):
            name = config_depth.stored_name(inner, last)
            value = config_depth.stored_fields(inner).get(name)
            if prefix != head + dot:
                continue
            if _equals_depth(value, place.depth):
                found[id(inner)] = DepthField(inner, name, wanted)
            elif (
                place.stage is not None
                and isinstance(value, list | tuple)
                and len(value) > place.stage
                and _equals_depth(value[place.stage], place.depth)
            ):
                found[id(inner)] = DepthField(inner, name, wanted, place.stage)
    if not found:
        raise ValueError(
            f"depth_field={wanted!r} is not {place.depth}, the depth of {context.stack.title}, in any configuration of the "
            f"model; fields with this value: {_list_fields([config for _, config in context.configs], place.depth)}"
        )
    return list(found.values())


def _list_fields(configs: list[Any], number: int) -> str:
    """List the fields that equal `number`, for a message."""
    inside = (each for config in configs for each in config_depth.nested_configs(config))
    labels = [
        f"{prefix}{name}"
        for prefix, config in inside
        for name, value in config_depth.stored_fields(config).items()
        if _equals_depth(value, number)
    ]
    return ", ".join(dict.fromkeys(labels)) or "none"


def _equals_depth(value: Any, number: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value == number


def copy_configs(
    context: StackContext,
    depth_fields: list[DepthField],
    lists: list[PerLayerField],
    moved_entries: list[list[Any]],
    count: int,
) -> dict[int, Any]:
    """Return changed copies by the id of the original config; configs inside others are copied with them."""
    memo: dict[int, Any] = {}
    touched = {id(each.config) for each in depth_fields}
    for _, config in reversed(context.configs):  # the model's first: it may contain the others
        if id(config) not in memo and touched & {id(inner) for _, inner in config_depth.nested_configs(config)}:
            copy.deepcopy(config, memo)  # one memo, so that an object shared by two configs is shared by the copies
    for each in depth_fields:
        config_depth.stored_fields(memo[id(each.config)])[each.name] = each.value(count)
    for listed, entries in zip(lists, moved_entries, strict=True):
        if id(listed.config) in memo:
            config_depth.stored_fields(memo[id(listed.config)])[listed.name] = listed.to_value(entries)
    return memo


def assign_configs(
    assignments: Assignments, context: StackContext, new: tuple[nn.Module, ...], copies: Mapping[int, Any]
) -> None:
    """Assign the changed configs to every module; new layers, which may hold a copy of a config, get the model's."""
    for _, module in context.shell:
        for name, value in vars(module).items():
            if config_depth.is_config(name, value) and id(value) in copies:
                assignments.set(vars(module), name, copies[id(value)])
    stack = context.stack
    own, usual = set(stack.layers), {}
    for layer in stack.layers:
        for place in describe_layer(layer).configs:
            if place not in usual:
                usual[place] = attributes_at(layer, place[0]).get(place[1])
    for layer in new:
        for path, name in describe_layer(layer).configs:
            attributes = attributes_at(layer, path)
            value = attributes.get(name)
            if layer not in own and type(usual.get((path, name))) is type(value):
                value = usual[path, name]
            value = copies.get(id(value), value)
            if value is not attributes.get(name):
                assignments.set(attributes, name, value)
