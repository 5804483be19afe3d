"""The current layers, keys, names and stacks of a model; `editor.py` updates it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from torch import nn

from l2l_core.eps.blocks import Block, Unit
from l2l_core.model import LayerRef, LayerResolver, Stack, find_stacks
from l2l_core.surgery import ties_of


@dataclass(frozen=True)
class ModelStructure:
    """The parts of a model's structure that edits change."""

    layers: dict[str, str]  # key -> dotted name
    containers: dict[str, str]  # first name of each stack -> its dotted name
    stacks: dict[str, list[str]]  # first name -> keys of the layers in order
    sizes: dict[str, int]  # first name -> number of members of the container
    ties: list[list[str]]  # names of each tensor with several


class LayerRegistry:
    """The layers of one relay and their stacks.

    Invariant: `stacks` equals the contents of the containers, and `layers` has these layers and those in no container.

    Args:
        model: the user's model.
        shell: the rest of the model.
        layers: the relay's layers in order.

    Attributes:
        layers, stacks: the current ones.
        first_structure: structure of the model before any edit.
        origin: key -> key of the original layer from which it was made.
        key_count: number of keys given out or skipped.
    """

    def __init__(self, model: nn.Module, shell: Unit, layers: Sequence[Unit]) -> None:
        self.model, self.shell = model, shell
        self.layers = list(layers)
        self.stacks = find_stacks(model, [unit.module for unit in layers])
        self._units = {unit.module: unit for unit in layers}  # with detached ones
        self._names: dict[nn.Module, str] = {
            stack.container: stack.name for stack in self.stacks
        }  # never changed by edits
        self.origin = {unit.key: unit.key for unit in layers}
        self.key_count = len(layers)
        self.first_structure = self.structure

    @property
    def units(self) -> tuple[Unit, ...]:
        """The shell and the layers."""
        return (self.shell, *self.layers)

    @property
    def blocks(self) -> tuple[Block, ...]:
        """The blocks of shell and layers, each once."""
        return tuple(dict.fromkeys(block for unit in self.units for block in unit.blocks))

    @property
    def structure(self) -> ModelStructure:
        """The current structure."""
        return ModelStructure(
            {unit.key: unit.name for unit in self.layers},
            {self.first_name(stack): stack.name for stack in self.stacks},
            {self.first_name(stack): [unit.key for unit in self.units_of(stack)] for stack in self.stacks},
            {self.first_name(stack): len(stack.container._modules) for stack in self.stacks},
            ties_of(self.model),
        )

    # -- stacks --------------------------------------------------------------------------------------------------------

    def first_name(self, stack: Stack) -> str:
        """Return a stack's first name; edits of a stack may rename others in the same Sequential."""
        return self._names[stack.container]

    @property
    def first_names(self) -> Mapping[nn.Module, str]:
        """The first names of all stacks, by container."""
        return self._names

    def find_stack(self, name: str) -> Stack:
        """Return the current stack with that first name; raise ValueError if there is none."""
        for stack in self.stacks:
            if self.first_name(stack) == name:
                return stack
        raise ValueError(
            f"there is no stack {name!r}; there are {', '.join(map(repr, self._names.values())) or 'none'}"
        )

    def units_of(self, stack: Stack) -> tuple[Unit, ...]:
        """List the layers of a stack in order; a layer in several places is listed several times."""
        return tuple(self._units[module] for module in stack.layers)

    # -- lookup --------------------------------------------------------------------------------------------------------

    @property
    def resolver(self) -> LayerResolver:
        """Lookup of the current layers."""
        keys = {unit.module: unit.key for unit in self.layers}
        return LayerResolver(self.stacks, keys, {unit.module: unit.name for unit in self.layers})

    def unit_at(self, where: LayerRef) -> Unit:
        """Return the layer at `where`, in a stack or in none; raise as `LayerResolver.layer` does."""
        return self._units[self.resolver.layer(where)]

    def units_at(self, places: Iterable[LayerRef]) -> set[Unit]:
        """Return the layers at several places, which must be in stacks.

        Raises:
            ValueError, TypeError: a place is no layer of a stack.
        """
        if isinstance(places, str | nn.Module) or not isinstance(places, Iterable):
            raise TypeError(f"{places!r} is not a collection of layers: pass a list, as [{places!r}]")
        refs = list(places)
        if not refs:  # every step calls this, and a resolver for a thousand layers takes a while
            return set()
        found = map(self.resolver.position_of, refs)
        return {self._units[stack.layers[i]] for stack, i in found}

    # -- changes -------------------------------------------------------------------------------------------------------

    def set_first_structure(self, first: ModelStructure, containers: Mapping[str, str]) -> None:
        """Set the structure before the edits of a save; `containers` maps first names to the stacks' current names."""
        self.first_structure = first
        names = {now: name for name, now in containers.items()}
        self._names = {stack.container: names.get(stack.name, stack.name) for stack in self.stacks}

    def new_key(self) -> str:
        """Return a key that no layer has or had."""
        while (key := f"L{self.key_count:03d}") in self.origin:
            self.key_count += 1
        self.key_count += 1
        return key

    def snapshot_keys(self) -> Callable[[], None]:
        """Return a function that makes the keys given out since available again; their layers must be removed."""
        count, origin = self.key_count, dict(self.origin)

        def restore() -> None:
            self.key_count, self.origin = count, origin

        return restore

    def add(self, unit: Unit) -> None:
        """Add a detached layer."""
        self._units[unit.module] = unit

    def remove(self, unit: Unit) -> None:
        """Remove a detached layer; its key stays taken."""
        del self._units[unit.module]

    def update_stack(self, name: str, after: Sequence[Unit]) -> bool:
        """Update order and names of the layers of a stack, whose container holds `after` now.

        Args:
            name: first name of the stack.
            after: the new layers.

        Returns:
            Whether modules that are no layers may have other names, too.
        """
        stack = self.find_stack(name)
        old = set(self.units_of(stack))
        first = next(i for i, unit in enumerate(self.layers) if unit in old)
        others = (unit for unit in self.layers[first:] if unit not in old)
        self.layers = list(dict.fromkeys([*self.layers[:first], *after, *others]))
        now = replace(stack, layers=tuple(unit.module for unit in after))
        self.stacks = tuple(now if each is stack else each for each in self.stacks)
        return self._rename(now, set(after))

    def _rename(self, stack: Stack, units: set[Unit]) -> bool:
        """Update the layers' names, in all stacks if other members of a Sequential have moved.

        Such members are an embedding, a head, or the containers of other stacks, which move with its depth.
        """
        moves = any(child not in self._units for child in stack.container._modules.values())
        if moves:  # lists all modules of the model, so only if names may differ
            names = {module: name for name, module in self.model.named_modules()}
            self.stacks = tuple(replace(each, name=names[each.container]) for each in self.stacks)
            for unit in self.layers:
                unit.rename(names[unit.module])
        else:
            for child, module in stack.container.named_children():
                if (unit := self._units.get(module)) in units:
                    unit.rename(f"{stack.name}.{child}" if stack.name else child)
        return moves
