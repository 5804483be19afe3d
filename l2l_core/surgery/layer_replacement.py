"""Replace the layers of a stack so that the model stays an ordinary model.

`replace_layers` changes a stack's container and everything that depends on the depth or on a layer's position: the
configuration, its per-layer lists, `layer_idx`. If something cannot be updated, the edit is refused before anything changes.
It does not handle weights, optimizers and the relay, and does not compare the shapes of layers.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from torch import nn

from l2l_core.model import Stack
from l2l_core.surgery.config_update import config_assignments, copy_configs, find_depth_fields, per_layer_lists
from l2l_core.surgery.layer_entries import move_entries, position_assignments, save_removed_entries
from l2l_core.surgery.layer_features import forget_description
from l2l_core.surgery.position_check import check_interchangeable
from l2l_core.surgery.stack_context import (
    Assignment,
    StackContext,
    check_companions,
    depth_assignments,
    layer_list_assignments,
)


def replace_layers(
    model: nn.Module,
    stack: Stack,
    layers: Sequence[nn.Module],
    like: Mapping[nn.Module, nn.Module] | None = None,
    force: bool = False,
    without_role: Collection[nn.Module] = (),
) -> Callable[[], None]:
    """Put `layers` in place of the stack's layers; update everything that depends on depth or position.

    Afterwards `model.config` is another object, and `stack` is outdated: the new one is
    ``replace(stack, layers=tuple(layers))``.

    Args:
        layers: at least one module, of the stack or new, in any order, each once. If the stack has a module in several places,
            so may `layers`, as long as the number of places stays.
        like: new layer -> layer of the stack whose entries it gets in lists of the configuration (`layer_types`). Not
            needed for layers that were in the stack before, nor if attributes or shapes decide.
        force: skip the refusals that rest on evidence: layers that differ by position, modules beside the stack with one
            member per layer, a configuration without a field for the depth.
        without_role: layers inserted by edits; parameters that only they have are not needed by other layers.

    Returns:
        A function that restores the same modules, attributes and configuration objects. Several are called in reverse
        order; it raises RuntimeError otherwise.

    Raises:
        ValueError, TypeError: the replacement is not possible; nothing has changed.
    """
    new = tuple(layers)
    # Assignments are only collected here, and made in the last line after all checks.
    context = StackContext.of(model, stack)
    _check_layers(stack, new, context, force)
    members = _new_members(stack, new)
    for layer in set(new) - set(stack.layers):
        forget_description(layer)  # the user may have changed a layer that was in no stack
    assignments = [*layer_list_assignments(context, new)]
    if len(new) != len(stack) > 1 and not force:
        check_companions(context)
    followed = find_depth_fields(context, len(new) != len(stack), force)
    lists = per_layer_lists(context, followed)
    moved = move_entries(lists, stack, new, like or {})
    copies = copy_configs(context, followed, lists, moved, len(new))
    if not force:
        check_interchangeable(model, stack, new, lists, moved, copies, bool(followed), without_role)
    assignments += config_assignments(context, new, copies)
    for each, entries in zip(lists, moved, strict=True):  # lists of a configuration are in its copy already
        if each.config is vars(context.owner):
            assignments.append((each.config, each.name, each.to_value(entries)))
    assignments += [*depth_assignments(context, followed, len(new)), *position_assignments(stack, new)]
    save_removed_entries(stack, new, lists)
    return _apply(model, assignments, stack, members)


def substitute_modules(model: nn.Module, substitutes: Mapping[nn.Module, nn.Module]) -> Callable[[], None]:
    """Put other modules in the places of layers, wherever the model refers to these; return a function that undoes it.

    Nothing else changes: every place keeps its name, its position and its part of the configuration.
    """
    had_captures = _captures_outputs(model)
    for layer, substitute in substitutes.items():
        _copy_captures(layer, substitute)
    old: list[tuple[dict[str, Any], str, Any]] = []
    for _, module in list(model.named_modules(memo={*substitutes})):
        for attributes in (module._modules, vars(module)):
            for name, value in attributes.items():
                if value is not module._modules and (new := _substituted(value, substitutes)) is not value:
                    old.append((attributes, name, value))
                    attributes[name] = new

    def undo() -> None:
        if not had_captures and _captures_outputs(model):  # the layers lack the hooks that were installed meanwhile
            _forget_captures(model)
        for attributes, name, value in old:
            attributes[name] = value

    return undo


_CAPTURES = "transformers.utils.output_capturing"  # installs its hooks once, in the first forward that collects outputs
_IS_CAPTURED = "_output_capturing_hooks_installed"


def _captures_outputs(model: nn.Module) -> bool:
    """Whether transformers has installed the hooks by which it collects hidden states of layers."""
    return any(vars(module).get(_IS_CAPTURED) for module in model.modules())


def _copy_captures(source: nn.Module, target: nn.Module) -> None:
    """Give a layer the capture hooks of another one; hooks that are there keep their order."""
    modules = dict(source.named_modules())
    for name, module in target.named_modules():
        for hook in _captures_of(modules.get(name, module)):
            if hook not in module._forward_hooks.values():
                module.register_forward_hook(hook)


def _captures_of(module: nn.Module) -> list[Any]:
    return [hook for hook in module._forward_hooks.values() if getattr(hook, "__module__", "") == _CAPTURES]


def _has_captures(layer: nn.Module) -> bool:
    return any(_captures_of(module) for module in layer.modules())


def _forget_captures(*roots: nn.Module) -> None:
    """Remove capture hooks, so that transformers installs them anew."""
    for module in (each for root in roots for each in root.modules()):
        vars(module).pop(_IS_CAPTURED, None)
        for key, hook in list(module._forward_hooks.items()):
            if getattr(hook, "__module__", "") == _CAPTURES:
                del module._forward_hooks[key]


def _capture_members(model: nn.Module, layers: Collection[nn.Module], new: Sequence[nn.Module]) -> None:
    """Let transformers collect the outputs of new layers as those of others of their class.

    Args:
        model: with the new layers in their places.
        layers: all layers of the stack, before or after the change, with the hooks of those that were there.
    """
    if not _captures_outputs(model):
        _forget_captures(*new)  # copies of layers of a model that had them would get them twice
        return
    for layer in (each for each in new if not _has_captures(each)):
        if alike := [each for each in layers if type(each) is type(layer) and _has_captures(each)]:
            _copy_captures(alike[0], layer)


def _substituted(value: Any, substitutes: Mapping[nn.Module, nn.Module]) -> Any:
    """Return a module's substitute, or a container with the substitutes of its members; other values unchanged."""
    if isinstance(value, nn.Module):
        return substitutes.get(value, value)
    if type(value) is dict:
        new = {key: _substituted(each, substitutes) for key, each in value.items()}
        return new if any(new[key] is not value[key] for key in new) else value
    if type(value) in (list, tuple, set) and any(isinstance(each, nn.Module) and each in substitutes for each in value):
        return type(value)(_substituted(each, substitutes) for each in value)
    return value


def _apply(
    model: nn.Module, assignments: list[Assignment], stack: Stack, members: dict[str, Any]
) -> Callable[[], None]:
    """Make the assignments and put `members` into the container; return a function that undoes both."""
    held = stack.container._modules
    old = dict(held), [target.get(name) for target, name, _ in assignments]
    both: dict[nn.Module, None] = dict.fromkeys([*old[0].values(), *members.values()])
    _refill(held, members)
    _capture_members(model, both, [each for each in members.values() if each not in old[0].values()])
    for target, name, value in assignments:
        target[name] = value

    def undo() -> None:
        if list(held.items()) != list(members.items()):  # with the order: two layers may have been exchanged
            raise RuntimeError(
                f"{stack.title} does not hold the layers that this edit put there: undo later edits first, each once"
            )
        _refill(held, old[0])
        _capture_members(model, both, [each for each in old[0].values() if each not in members.values()])
        for (target, name, _), value in zip(assignments, old[1], strict=True):
            target[name] = value

    return undo


def _refill(target: dict[str, Any], content: dict[str, Any]) -> None:
    target.clear()  # the container holds this dict, and its order matters
    target.update(content)


def _check_layers(stack: Stack, new: tuple[nn.Module, ...], context: StackContext, force: bool) -> None:
    """Refuse an outdated stack, and layers that are no modules, are given twice, or are in the model elsewhere."""
    title = stack.title
    if not new:
        raise ValueError(f"{title} would be left without layers; at least one must stay")
    for layer in new:
        if not isinstance(layer, nn.Module):
            raise TypeError(f"layers contains {layer!r}; pass modules")
    inside = context.inside
    held = [child for child in stack.container if child in inside]
    if tuple(held) != stack.layers:
        raise ValueError(f"{title} no longer holds the stack's layers in this order; call find_stacks again")
    if len(inside) < len(held) != len(new) and not force:
        raise ValueError(
            f"{title} holds one module in several places: its layers share weights and have no single position, so their number "
            f"stays {len(held)}. Give every place a separate layer first (Delink)"
        )
    for layer in new if len(set(new)) < len(new) and not force else ():
        if new.count(layer) > max(1, held.count(layer)):
            places = ", ".join(str(i) for i, each in enumerate(new) if each is layer)
            raise ValueError(
                f"positions {places} of {title} would hold the same {type(layer).__name__}: it would be two layers with one set "
                "of weights and one position; put in a copy (copy.deepcopy)"
            )
    names = {module: name for name, module in context.shell}
    for layer in new:
        if layer in names:
            raise ValueError(
                f"a {type(layer).__name__} among the new layers is already in the model, as {names[layer]!r}; "
                "put in a copy of it (copy.deepcopy)"
            )


def _new_members(stack: Stack, new: tuple[nn.Module, ...]) -> dict[str, Any]:
    """List the container's members by name, with `new` in place of the stack's layers."""
    old = list(stack.container._modules.items())
    inside = set(stack.layers)
    slots = [i for i, (_, child) in enumerate(old) if child in inside]
    first, last = slots[0], slots[-1]
    between = [type(child).__name__ for _, child in old[first:last] if child not in inside]
    if between:
        if len(new) != len(slots):
            raise ValueError(
                f"between the layers of {stack.title} are other members ({', '.join(dict.fromkeys(between))}), which cannot be "
                "assigned to layers: the layers can change places but not their number. Put a layer and its members into one "
                "module"
            )
        children = [child for _, child in old]
        for i, layer in zip(slots, new, strict=True):
            children[i] = layer
        return {name: child for (name, _), child in zip(old, children, strict=True)}
    before, after = old[:first], old[last + 1 :]
    # If all members are numbered, those after the layers are renumbered, as in a newly built container.
    if [name for name, _ in old] == [str(i) for i in range(len(old))]:
        children = [child for _, child in before] + list(new) + [child for _, child in after]
        return {str(i): child for i, child in enumerate(children)}
    names = _member_names(stack, [old[i][0] for i in slots], len(new), {name for name, _ in before + after})
    return dict(before) | dict(zip(names, new, strict=True)) | dict(after)


def _member_names(stack: Stack, old: list[str], count: int, taken: set[str]) -> list[str]:
    """Return names of `count` members, numbered as the old ones ("block1", "block2")."""
    numbered = [re.fullmatch(r"(.*?)(\d+)", name) for name in old]
    if count <= len(old):
        return old[:count]
    heads = {match[1] for match in numbered if match}
    begin = int(numbered[0][2]) if numbered[0] else 0
    names = [f"{head}{begin + i}" for head in heads for i in range(count)]
    if len(heads) != 1 or names[: len(old)] != old or taken & set(names):
        raise ValueError(
            f"the layers of {stack.title} are named {', '.join(old)}, which gives no name for another one. Number them "
            "(layer0, layer1, ...), or use a ModuleList"
        )
    return names
