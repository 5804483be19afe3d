"""The modules and attributes around a stack, and their update for other layers, or a refusal.

`config_update.py` updates the configuration.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import nn

from l2l_core.model import Stack
from l2l_core.surgery import config_depth
from l2l_core.surgery.config_depth import DepthField, StackLocation

REMEDY = "force=True skips this check"

Assignment = tuple[dict[str, Any], str, Any]  # attributes of a module, name, new value


@dataclass(frozen=True)
class StackContext:
    """A stack and the modules around it."""

    stack: Stack
    inside: frozenset[nn.Module]  # the stack's layers
    chain: list[tuple[str, nn.Module]]  # (name, module) from the model down to the owner of the container
    shell: list[tuple[str, nn.Module]]  # (name, module), without the stack's layers and their submodules
    location: StackLocation
    # (first module of the chain that holds it, config), nearest to the stack first
    configs: list[tuple[nn.Module, Any]]

    @property
    def owner(self) -> nn.Module:
        """The module that holds the container, or the container if it is the model."""
        return self.chain[-1][1]

    @classmethod
    def of(cls, model: nn.Module, stack: Stack) -> StackContext:
        modules = [("", model)]
        for part in filter(None, stack.name.split(".")):
            name, module = modules[-1]
            child = module._modules.get(part)
            if child is None:
                break
            modules.append((f"{name}.{part}".lstrip("."), child))
        if modules[-1][1] is not stack.container:
            raise ValueError(
                f"the model was changed: its {stack.title} is not the container of this stack; call find_stacks again"
            )
        around, stage, stages = modules[:-1] or modules, None, 0
        for (_, outer), (name, _) in reversed(list(pairwise(modules))):
            if isinstance(outer, nn.ModuleList | nn.Sequential) and name.rpartition(".")[2].isdigit():
                stage, stages = (int(name.rpartition(".")[2]), len(outer)) if len(outer) > 1 else (None, 0)
                break
        # Not a ModuleList: configuration and depth are attributes of the module that holds the list.
        owner = next((m for _, m in reversed(around) if not isinstance(m, nn.ModuleList)), model)
        words = config_depth.name_words(stack.name.replace(".", "_")) | config_depth.name_words(type(owner).__name__)
        configs: dict[int, tuple[nn.Module, Any]] = {}
        for _, module in around:
            for name, value in vars(module).items():
                if config_depth.is_config(name, value):
                    configs.setdefault(id(value), (module, value))
        chain, inside = around[: [m for _, m in around].index(owner) + 1], frozenset(stack.layers)
        # `named_modules` omits the modules in `memo`, and what is below them.
        shell = list(model.named_modules(memo={*inside}))
        location = StackLocation(words, len(stack.layers), stage, stages)
        return cls(stack, inside, chain, shell, location, list(configs.values())[::-1])


def layer_list_assignments(context: StackContext, new: tuple[nn.Module, ...]) -> Iterator[Assignment]:
    """Update lists of all layers; refuse other references to single layers."""
    stack, inside = context.stack, context.inside
    for name, module in context.shell:
        for part, child in module._modules.items():
            if child in inside and module is not stack.container:
                raise ValueError(
                    f"a layer of {stack.title} is also in the model as {f'{name}.{part}'.lstrip('.')!r}, which would not be "
                    "updated; keep each layer in one place"
                )
        for attribute, value in vars(module).items():
            if attribute in ("_modules", "_parameters", "_buffers") or not isinstance(value, list | tuple | dict | set):
                continue
            held = value.values() if isinstance(value, dict) else value
            if not any(isinstance(each, nn.Module) and each in inside for each in held):
                continue
            if not isinstance(value, list | tuple) or tuple(value) != stack.layers:
                raise ValueError(
                    f"{f'{name}.{attribute}'.lstrip('.')!r} holds layers of {stack.title} in another arrangement, which cannot "
                    f"be updated; keep all {len(stack)} in order there, or take them from the container when needed"
                )
            yield vars(module), attribute, type(value)(new)


def named_configs(modules: Iterable[tuple[str, nn.Module]]) -> Iterator[tuple[str, Any]]:
    """Yield each config that modules hold, and those inside it, once, with its dotted name."""
    seen: set[int] = set()
    for path, module in modules:
        for name, value in vars(module).items():
            for prefix, inner in config_depth.nested_configs(value) if config_depth.is_config(name, value) else ():
                if id(inner) not in seen:
                    seen.add(id(inner))
                    yield f"{path}.{name}.{prefix}".strip("."), inner


def possible_depth_reads(model: nn.Module, stack: Stack) -> list[str]:
    """List attributes of the modules around a stack that have an entry per layer, or are numbered as layers."""
    context, count = StackContext.of(model, stack), len(stack)
    found: list[str] = []
    for path, module in context.chain if count > 1 else ():
        for held in (module._parameters, module._buffers, vars(module), module._modules):
            for name, value in held.items():
                if not name.startswith("_") and value is not stack.container and _may_be_by_depth(value, context):
                    found.append(f"{path}.{name}".lstrip("."))
    return found


def _may_be_by_depth(value: Any, context: StackContext) -> bool:
    count = len(context.stack)
    if isinstance(value, torch.Tensor):
        return value.ndim > 0 and value.shape[0] == count
    if isinstance(value, nn.ModuleDict):
        return len(value) > 0 and all(key.isdigit() and int(key) < count for key in value)
    if isinstance(value, nn.ModuleList | nn.ParameterList):
        return len(value) == count and context.inside.isdisjoint(value)
    if type(value) is dict:
        return {*value} == {*range(count)}
    return type(value) in (list, tuple) and len(value) == count and not any(isinstance(e, nn.Module) for e in value)


def check_companions(context: StackContext) -> None:
    """Refuse lists and parameters beside the container with one member or row per layer: they would have to grow, too."""
    owner, stack, count = context.owner, context.stack, len(context.stack)
    prefix = f"{context.chain[-1][0]}.".lstrip(".")
    for name, child in owner._modules.items():
        if not isinstance(child, nn.ModuleList | nn.ParameterList) or child is stack.container:
            continue
        if len(child) == count and len({type(member) for member in child}) == 1:
            raise ValueError(
                f"{prefix}{name} has {count} members, probably one for each of the {count} layers of {stack.title}, and would "
                "not be updated: put a layer and its member into one module. If they have nothing to do with each other, "
                f"{REMEDY}"
            )
    for path, module in context.chain:
        for name, param in module._parameters.items():
            rows = param.shape[0] if param is not None and param.ndim else 0
            if "layer" in config_depth.name_words(name) and rows in (count, count + 1):
                raise ValueError(
                    f"parameter {f'{path}.{name}'.lstrip('.')} has {rows} rows, probably for the {count} layers of "
                    f"{stack.title}, and would not be updated. If it has nothing to do with them, {REMEDY}"
                )


def depth_assignments(context: StackContext, depth_fields: list[DepthField], count: int) -> Iterator[Assignment]:
    """Set depth attributes: of the container's owner by their words, further up only under the name of a depth field."""
    names = {each.name for each in depth_fields} | ({"num_hidden_layers"} if depth_fields else set())
    for _, module in context.chain if context.location.stage is None else ():
        for name, value in vars(module).items():
            named = name in names or (module is context.owner and config_depth.is_depth_name(name, context.location))
            if named and config_depth.is_int(value) and value == context.location.depth:
                yield vars(module), name, count
