"""Find the layers of a model from its module tree.

`find_layers` runs nothing, changes nothing, and has no list of model families.

The rules (for each, a model in `tests/core/model/test_layers.py` needs it):

1. A *container* is an `nn.ModuleList`, an `nn.Sequential` or an `nn.ModuleDict` that cannot run by itself. Its members
   are its slots; a slot that cannot run by itself (a nested ModuleList, a ModuleDict) stands for its own slots.
2. Containers are grouped by *pattern*, their path with slots written `*` (`stages.*.layers`). A class that occurs
   twice in one container is repeated; all members of that class in all containers of the pattern form a *stack*.
   In a ModuleList the other members of the same rank (rule 3) belong to it too: a model with one attention layer
   among seven state-space layers loops over all eight. In a Sequential they do not: it also holds embedding and head.
   A ModuleList with a single member is a stack of one (ALBERT; any model of depth 1), unless others beside it rank as high.
3. *Rank*: members of two or more operations (submodules that own a matrix or kernel) come first, then an operation
   with its wrapping (convolution and norm), then a bare operation, then what owns vectors only. The highest rank
   found decides, so the `Sequential(Linear, GELU, Linear)` inside a block is not chosen, a plain one is.
4. If members hold an inner stack that owns most of their weights, they are *stages* and the inner layers replace them
   (Swin, ConvNeXt). Otherwise they are the layers (blocks with a list of attention heads).
5. Experts of a mixture are replaced by the layer that holds them, large or not: they run for some of the tokens,
   the layer for all. An inner stack counts as experts if a matrix beside it, in the module that owns it, has one row or
   column per member (the router), or if its path contains "expert".
6. A model whose blocks are in no container (Inception, DLA, RegNet) keeps them as attributes: then every module's
   attributes count as the members of a container, in the order of definition. The choice is logged.
"""

import logging
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.nn.utils.parametrize import ParametrizationList, type_before_parametrizations

from l2l_core.model.compiled import is_compile_wrapper

logger = logging.getLogger("l2l_core")

NamedModules = dict[str, nn.Module]  # dotted name -> module

_SEVERAL = 3  # the highest rank: a member of several operations


@dataclass(frozen=True)
class _Container:
    """A container, or a module that serves as one, with its parameterised members (rule 1)."""

    pattern: str  # dotted path, slots written "*"
    members: list[nn.Module]
    is_loop: bool  # the members of every class run in turn
    single: list[nn.Module]  # members that are alone in a ModuleList, this one or one in it
    is_routed: bool  # the members count as experts (rule 5)


@dataclass(frozen=True)
class _LayerStack:
    """Members of one rank in all containers of one pattern."""

    members: set[nn.Module]
    rank: int
    depth: int  # of the pattern; a stack inside another is deeper
    is_routed: bool


def find_layers(model: nn.Module) -> NamedModules:
    """Return the layers of `model` by dotted name, in the order in which the model defines them.

    A module in several slots appears once, under its first name. The module docstring has the rules.
    Raises ValueError if no layers are found.

    Example:
        >>> from l2l_core import find_layers
        >>> list(find_layers(model))  # dotted names in the model
        ['0', '1', '2', '3', '4', '5']
    """
    layers = _choose_layers(_stacks(model, _is_container))
    found = {name: module for name, module in model.named_modules() if module in layers}
    if not found:
        stacks = [stack for stack in _stacks(model, _has_attributes) if stack.rank >= _SEVERAL]
        layers = _choose_layers(stacks)
        found = {name: module for name, module in model.named_modules() if module in layers}
        if found:
            logger.info(
                "%s has no list of blocks: the layers are these %d of its modules: %s. Pass layers= to choose others",
                type(model).__name__, len(found), ", ".join(found),
            )  # fmt: skip
    if not found:
        raise ValueError(_no_layers_message(model))
    return found


# --- stacks: rules 1 to 3 ------------------------------------------------------------------------------------------


def _choose_layers(stacks: list[_LayerStack]) -> set[nn.Module]:
    """Choose the layers among the stacks of the highest rank, by rules 4 and 5."""
    best = max((stack.rank for stack in stacks), default=0)
    layers: dict[nn.Module, bool] = {}  # layer -> is it an expert?
    # Deepest first, so that `layers` holds those inside a stack's members before the stack is added.
    for stack in sorted((s for s in stacks if s.rank == best), key=lambda s: s.depth, reverse=True):
        _resolve_nesting(layers, stack)
    return set(layers)


def _stacks(model: nn.Module, is_container: Callable[[nn.Module], bool]) -> list[_LayerStack]:
    by_pattern: defaultdict[str, list[_Container]] = defaultdict(list)
    for container in _containers(model, model, "", "", is_container):
        by_pattern[container.pattern].append(container)
    return [stack for containers in by_pattern.values() for stack in _stacks_of_pattern(containers)]


def _containers(
    module: nn.Module, owner: nn.Module, name: str, pattern: str, is_container: Callable[[nn.Module], bool]
) -> Iterator[_Container]:
    """Find the containers in and below `module`; `owner` is the nearest enclosing module that is no container."""
    if isinstance(module, ParametrizationList):  # a ModuleList by inheritance only
        return
    contains = is_container(module)
    children = _members(module, name) if contains else _children(module, name)
    if contains:
        members = [child for child in children.values() if _is_parameterised(child)]
        is_routed = "expert" in name.lower() or (_is_container(module) and _has_router(owner, module, len(children)))
        is_loop = isinstance(module, nn.ModuleList) or not _is_container(module)
        yield _Container(pattern, members, is_loop, [*_single_members(module)], is_routed)
    for child_name, child in children.items():
        step = "*" if contains else child_name.rpartition(".")[2]
        outer = owner if _is_container(module) else module
        yield from _containers(child, outer, child_name, _join(pattern, step), is_container)


def _is_container(module: nn.Module) -> bool:
    """Return whether a module is a container by rule 1."""
    is_dict = isinstance(module, nn.ModuleDict) and not can_run(module)
    return is_dict or isinstance(module, (nn.ModuleList, nn.Sequential))


def _has_attributes(module: nn.Module) -> bool:
    """Return whether a module counts as a container by rule 6."""
    return _is_container(module) or sum(map(_is_parameterised, module.children())) > 1


def _stacks_of_pattern(containers: list[_Container]) -> Iterator[_LayerStack]:
    ranks: Counter[type] = Counter()  # class -> highest rank of its members
    repeated: set[type] = set()
    for container in containers:
        repeated |= {kind for kind, count in Counter(map(_kind, container.members)).items() if count > 1}
        for module in container.members:
            ranks[_kind(module)] = max(ranks[_kind(module)], _rank(module))
    highest = max((ranks[kind] for kind in repeated), default=-1)
    # A model of depth 1 may have its list beside embeddings, which are repeated, in a ModuleDict.
    repeated |= {kind for each in containers for kind in map(_kind, each.single) if ranks[kind] > highest}
    is_loop = containers[0].is_loop
    for rank in {ranks[kind] for kind in repeated}:
        kinds = {kind for kind in ranks if ranks[kind] == rank and (is_loop or kind in repeated)}
        held = [
            (module, container) for container in containers for module in container.members if _kind(module) in kinds
        ]
        members, is_routed = {module for module, _ in held}, any(container.is_routed for _, container in held)
        yield _LayerStack(members, rank, f".{containers[0].pattern}".rstrip(".").count("."), is_routed)


def _children(module: nn.Module, name: str) -> NamedModules:
    return {_join(name, slot): child for slot, child in module.named_children()}


def _members(container: nn.Module, name: str) -> NamedModules:
    """Return the members of a container by name, nested containers flattened (rule 1)."""
    members: NamedModules = {}
    for child_name, child in _children(container, name).items():
        members |= {child_name: child} if can_run(child) else _members(child, child_name)
    return members


def _single_members(container: nn.Module) -> Iterator[nn.Module]:
    """Yield the only parameterised member of a ModuleList, and of those nested in a container."""
    if isinstance(container, nn.ModuleList) and len(found := [*filter(_is_parameterised, container)]) == 1:
        yield from found
    for child in container.children() if _is_container(container) else ():
        if not can_run(child):
            yield from _single_members(child)


def can_run(module: nn.Module) -> bool:
    """Return whether a module has a forward method."""
    return type(module).forward is not nn.Module.forward or is_compile_wrapper(module)


def _is_parameterised(module: nn.Module) -> bool:
    return any(True for _ in module.parameters())


def _kind(module: nn.Module) -> type:
    """Return the class of a module before compilation and parametrization (spectral norm makes a class per module)."""
    inner: Any = module._orig_mod if is_compile_wrapper(module) else module
    return type_before_parametrizations(inner)


def _rank(module: nn.Module) -> int:
    """Return the rank by rule 3. _SEVERAL: several operations. 2: one with its wrapping. 1: one, bare. 0: vectors only."""
    operations = sum(any(p.ndim > 1 for p in part.parameters(recurse=False)) for part in module.modules())
    is_wrapped = any(True for _ in module.children())
    return _SEVERAL if operations > 1 else operations + (operations and is_wrapped)


# --- stages and experts: rules 4 and 5 -----------------------------------------------------------------------------


def _resolve_nesting(layers: dict[nn.Module, bool], stack: _LayerStack) -> None:
    """Add `stack` to the deeper `layers`; where its members contain some of them, keep one side (rules 4 and 5)."""
    held = {layer for member in stack.members for layer in submodules_of(member) if layer in layers}
    inner = {layer for layer in held if not layers[layer]}
    stages = {member for member in stack.members if inner & submodules_of(member)}
    inner_wins = 2 * _numel(inner) > _numel(stages)
    for layer in held - inner if inner_wins else held:
        del layers[layer]
    for member in stack.members - stages if inner_wins else stack.members:
        layers[member] = stack.is_routed


def submodules_of(module: nn.Module) -> set[nn.Module]:
    """Return all submodules of a module, without itself."""
    return set(module.modules()) - {module}


def _has_router(owner: nn.Module, container: nn.Module, num_members: int) -> bool:
    """Return whether `owner` has, outside the container, a matrix with one row or column per member."""
    beside = set(owner.parameters()) - set(container.parameters())
    return num_members > 1 and any(p.ndim == 2 and num_members in p.shape for p in beside)


def _numel(modules: Iterable[nn.Module]) -> int:
    # The set counts tied weights once.
    return sum(p.numel() for p in {p for module in modules for p in module.parameters()})


# --- messages ------------------------------------------------------------------------------------------------------


def _no_layers_message(model: nn.Module) -> str:
    if (empty := empty_stack_message(model)) is not None:
        return f"found no layers, and {empty} If it is not the list of layers, pass them as modules or dotted names."
    remedy = f"Pass the layers as modules or dotted names, for example layers=[{format_names(layer_candidates(model))}]"
    if not layer_candidates(model):
        remedy = "It has no submodules with parameters; with own ones, give nn.Sequential(model), layers=['0']"
    return (
        f"found no layers in {type(model).__name__}: it has no nn.ModuleList, nn.Sequential or nn.ModuleDict with two or "
        "more parameterised modules of one class, no ModuleList of one, and no attributes of one class with several "
        f"operations each. {remedy}."
    )


def empty_stack_message(model: nn.Module) -> str | None:
    """Return the message for an empty stack, with a way to train zero layers; None if no stack is empty."""
    names = (name for name, module in model.named_modules() if isinstance(module, nn.ModuleList) and not len(module))
    if (name := next(names, None)) is None:
        return None
    return (
        f"the ModuleList {name!r} of {type(model).__name__} is empty. To train a model of zero layers, make it with the layers "
        "that it is to have later, such as 12, and let all of them sit out: relay.step(batch, skip=range(12)), or as a "
        "schedule, here until step 800: ActiveLayers({0: 0, 800: 12}).step(relay, batch). A step equals that of the model "
        "without layers, and layers that sit out keep their initial values."
    )


def layer_candidates(model: nn.Module, count: int = 5) -> list[str]:
    """List up to `count` names of modules with a forward and parameters, side by side and as shallow as possible."""
    names = _parts_of(model, "")
    while len(names) == 1 and (inner := _parts_of(model.get_submodule(names[0]), names[0])):
        names = inner
    return names[:count]


def _parts_of(module: nn.Module, path: str) -> list[str]:
    """List the parts of a module; a container that cannot run counts as its members."""
    found: list[str] = []
    for part, child in module.named_children():
        name = _join(path, part)
        if _is_parameterised(child):
            found += [name] if can_run(child) else _parts_of(child, name)
    return found


def format_names(names: Iterable[str]) -> str:
    """Return quoted names, separated by commas, for a message."""
    return ", ".join(map(repr, names))


def _join(path: str, part: str) -> str:
    return f"{path}.{part}" if path else part
