"""Which layers stand where in the model now, what they are called, and which one a person means.

Nothing is moved here: `editor.py` moves layers, and tells the line-up.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from torch import nn

from l2l_core.eps.blocks import Block, Unit
from l2l_core.model import LayerRef, LayerResolver, Stack, find_stacks
from l2l_core.surgery import ties_of


@dataclass(frozen=True)
class ModelStructure:
    """Says how a model is built, as far as edits change it.

    Attributes:
        layers: dotted names by key.
        containers: dotted names of the stacks, by the name that each had first.
        stacks: keys of the layers in order, by stack.
        sizes: number of members of the container, by stack.
        ties: names that stand for one tensor, see `ties_of`.
    """

    layers: dict[str, str]
    containers: dict[str, str]
    stacks: dict[str, list[str]]
    sizes: dict[str, int]
    ties: list[list[str]]


class LayerRegistry:
    """Knows the layers of one relay and the stacks that they stand in.

    Invariant: `stacks` holds what the containers hold, in their order, and `layers` all of it and what is in no stack.

    Args:
        model: the user's.
        shell: the rest of the model.
        layers: the relay's, in order.

    Attributes:
        layers, stacks: as they are now.
        first: the model as it was before any edit.
        origin: by key, the original layer that it goes back to.
        made: keys given out so far, or passed over.
    """

    def __init__(self, model: nn.Module, shell: Unit, layers: Sequence[Unit]) -> None:
        self.model, self.shell = model, shell
        self.layers = list(layers)
        self.stacks = find_stacks(model, [unit.module for unit in layers])
        self._units = {unit.module: unit for unit in layers}  # parked ones too
        self._names = {stack.container: stack.name for stack in self.stacks}  # for good
        self.origin = {unit.key: unit.key for unit in layers}
        self.key_count = len(layers)
        self.first_structure = self.structure

    @property
    def units(self) -> tuple[Unit, ...]:
        """The shell and the layers."""
        return (self.shell, *self.layers)

    @property
    def blocks(self) -> tuple[Block, ...]:
        """What they consist of, each block once."""
        return tuple(dict.fromkeys(block for unit in self.units for block in unit.blocks))

    @property
    def structure(self) -> ModelStructure:
        """How the model is built now."""
        return ModelStructure(
            {unit.key: unit.name for unit in self.layers},
            {self.first_name(stack): stack.name for stack in self.stacks},
            {self.first_name(stack): [unit.key for unit in self.units_of(stack)] for stack in self.stacks},
            {self.first_name(stack): len(stack.container._modules) for stack in self.stacks},
            ties_of(self.model),
        )

    # -- stacks --------------------------------------------------------------------------------------------------------

    def first_name(self, stack: Stack) -> str:
        """Give a stack's first name: where several are in one Sequential, an edit of one may rename the others."""
        return self._names[stack.container]

    @property
    def first_names(self) -> Mapping[nn.Module, str]:
        """The first names of all stacks, by container."""
        return self._names

    def find_stack(self, name: str) -> Stack:
        """Find the stack of that first name, as it is now.

        Raises:
            ValueError: there is none.
        """
        for stack in self.stacks:
            if self.first_name(stack) == name:
                return stack
        raise ValueError(
            f"there is no stack {name!r}; there are {', '.join(map(repr, self._names.values())) or 'none'}"
        )

    def units_of(self, stack: Stack) -> tuple[Unit, ...]:
        """List the layers of a stack, in order; one that stands in several places is there several times."""
        return tuple(self._units[module] for module in stack.layers)

    # -- what a person means -------------------------------------------------------------------------------------------

    @property
    def resolver(self) -> LayerResolver:
        """Finds the layer that a person means, as things are now."""
        keys = {unit.module: unit.key for unit in self.layers}
        return LayerResolver(self.stacks, keys, {unit.module: unit.name for unit in self.layers})

    def unit_at(self, where: LayerRef) -> Unit:
        """Find the layer that a person means, in a stack or in none; raises what `Resolver.layer` does."""
        return self._units[self.resolver.layer(where)]

    def units_at(self, places: Iterable[LayerRef]) -> set[Unit]:
        """Find the layers of stacks that a person means by several places.

        Raises:
            ValueError, TypeError: one of them is no layer of a stack.
        """
        if isinstance(places, str | nn.Module) or not isinstance(places, Iterable):
            raise TypeError(f"{places!r} is one layer, or none: give a collection of layers, as [{places!r}]")
        wanted = list(places)
        if not wanted:  # every step asks, and a resolver for a thousand layers takes a while
            return set()
        found = map(self.resolver.position_of, wanted)
        return {self._units[stack.layers[i]] for stack, i in found}

    # -- what has changed ----------------------------------------------------------------------------------------------

    def set_first_structure(self, first: ModelStructure, containers: Mapping[str, str]) -> None:
        """Say that the model was `first` before the edits of a save; `containers` are its stacks' names here."""
        self.first_structure = first
        names = {now: name for name, now in containers.items()}
        self._names = {stack.container: names.get(stack.name, stack.name) for stack in self.stacks}

    def new_key(self) -> str:
        """Give out a key that no layer has or had; the caller may have given out some of this form."""
        while (key := f"L{self.key_count:03d}") in self.origin:
            self.key_count += 1
        self.key_count += 1
        return key

    def snapshot_keys(self) -> Callable[[], None]:
        """Keep which keys are given out; the result takes back those that were since, whose layers must be forgotten."""
        made, origin = self.key_count, dict(self.origin)

        def put_back() -> None:
            self.key_count, self.origin = made, origin

        return put_back

    def add(self, unit: Unit) -> None:
        """Take note of another layer, which may come to stand in a stack."""
        self._units[unit.module] = unit

    def remove(self, unit: Unit) -> None:
        """Forget a layer that is gone for good. Its key stays taken."""
        del self._units[unit.module]

    def update_stack(self, name: str, after: Sequence[Unit]) -> bool:
        """Follow the container of a stack, which holds the layers `after` now: their order and names are taken over.

        Args:
            name: that the stack had first.

        Returns:
            Whether modules that are no layers may have other names, too.
        """
        stack = self.find_stack(name)
        gone = set(self.units_of(stack))  # `stack` is of the past: its layers are those of before
        first = next(i for i, unit in enumerate(self.layers) if unit in gone)
        behind = (unit for unit in self.layers[first:] if unit not in gone)
        self.layers = list(dict.fromkeys([*self.layers[:first], *after, *behind]))
        now = replace(stack, layers=tuple(unit.module for unit in after))
        self.stacks = tuple(now if old is stack else old for old in self.stacks)
        return self._rename(now, set(after))

    def _rename(self, stack: Stack, units: set[Unit]) -> bool:
        """Let layers have their present names, in all stacks if the members of a Sequential that are no layers have moved.

        Such a one may hold an embedding and a head, or the containers of other stacks, which move with its depth.
        """
        moves = any(child not in self._units for child in stack.container._modules.values())
        if moves:  # a walk over the whole model, so only where it may find other names
            names = {module: name for name, module in self.model.named_modules()}
            self.stacks = tuple(replace(each, name=names[each.container]) for each in self.stacks)
            for unit in self.layers:
                unit.rename(names[unit.module])
        else:
            for child, module in stack.container.named_children():
                if (unit := self._units.get(module)) in units:
                    unit.rename(f"{stack.name}.{child}" if stack.name else child)
        return moves
