"""Update the configuration of a model to a stack's new depth.

A configuration is never changed in place, because several models may share it (Llama runs as many layers as its
configuration has).
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import nn

from l2l_core.model import Stack
from l2l_core.surgery import config_depth
from l2l_core.surgery.config_depth import DepthField, PerLayerField
from l2l_core.surgery.layer_features import attributes_at, describe_layer
from l2l_core.surgery.stack_context import REMEDY, Assignment, StackContext, named_configs


def find_depth_fields(context: StackContext, is_resized: bool, force: bool) -> list[DepthField]:
    """Return the fields to set to the new depth, in every config from the owner's to the model's.

    Raises:
        ValueError: several fields or none may be the depth, or settings of single layers would not be updated.
    """
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
                f"({context.location.depth}): {', '.join(each.label for each in chosen)}; delete all but one of them from the "
                "configuration before the edit"
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


def per_layer_lists(context: StackContext, depth_fields: Sequence[DepthField]) -> list[PerLayerField]:
    """List the lists of configurations and of the stack's owner with one entry per layer; they move with the layers."""
    configs = {id(field.config): field.config for field in depth_fields}.values()
    # With stages the lists of a configuration have one entry per stage.
    holders = [*(configs if context.location.stage is None else ()), vars(context.owner)]
    return [each for holder in holders for each in config_depth.find_per_layer_fields(holder, context.location)]


def lists_that_follow(model: nn.Module, stack: Stack) -> set[str]:
    """Return the dotted names of the lists whose entries move with the layers of a stack."""
    context = StackContext.of(model, stack)
    found = per_layer_lists(context, find_depth_fields(context, is_resized=False, force=True))
    names = {id(config): name for name, config in named_configs(model.named_modules(memo={*context.inside}))}
    names[id(vars(context.owner))] = context.chain[-1][0]
    return {f"{names.get(id(field.config), '')}.{field.name}".lstrip(".") for field in found}


def _refuse_unknown_depth(context: StackContext, config: Any) -> None:
    place = context.location
    in_stages = f", stage {place.stage} of {place.stages}" if place.stage is not None else ""
    equal = [
        f"{prefix}{name}"
        for prefix, inner in config_depth.nested_configs(config)
        for name, value in config_depth.stored_fields(inner).items()
        if config_depth.is_int(value) and value == place.depth
    ]
    raise ValueError(
        f"no field of {type(config).__name__} is the depth of {context.stack.title} ({place.depth}{in_stages}), so that the "
        f"saved model could not be loaded. Fields with this value: {', '.join(dict.fromkeys(equal)) or 'none'}; {REMEDY}"
    )


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


def config_assignments(
    context: StackContext, new: tuple[nn.Module, ...], copies: Mapping[int, Any]
) -> Iterator[Assignment]:
    """Assign the changed configs to every module; new layers, which may hold a copy of a config, get the model's."""
    for _, module in context.shell:
        for name, value in vars(module).items():
            if config_depth.is_config(name, value) and id(value) in copies:
                yield vars(module), name, copies[id(value)]
    usual: dict[tuple[str, str], Any] = {}
    for layer in context.stack.layers:
        for path, name in describe_layer(layer).configs:
            usual.setdefault((path, name), attributes_at(layer, path).get(name))
    for layer in new:
        for path, name in describe_layer(layer).configs:
            attributes = attributes_at(layer, path)
            value = held = attributes.get(name)
            if layer not in context.inside and type(usual.get((path, name))) is type(value):
                value = usual[path, name]
            value = copies.get(id(value), value)
            if value is not held:
                yield attributes, name, value
