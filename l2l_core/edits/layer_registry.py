"""The current layers, keys, names and stacks of a model; `editor.py` updates it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from torch import nn

from l2l_core.eps.blocks import Block, Unit
from l2l_core.model import LayerRef, LayerResolver, Stack, find_stacks
from l2l_core.surgery import depth_numbers, numbers_around, ties_of


@dataclass(frozen=True)
class ModelStructure:
    """The parts of a model's structure that edits change."""

    layers: dict[str, str]  # key -> dotted name
    containers: dict[str, str]  # first name of each stack -> its dotted name
    stacks: dict[str, list[str]]  # first name -> keys of the layers in order
    sizes: dict[str, int]  # first name -> number of members of the container
    ties: list[list[str]]  # names of each tensor with several
    loops: dict[str, dict[str, int]] = field(default_factory=dict)  # see `LayerRegistry.loops`


class LayerRegistry:
    """The layers of one relay and their stacks.

    Invariant: `stacks` equals the contents of the containers, and `layers` has these layers and those in no container.
    """

    def __init__(self, model: nn.Module, shell: Unit, layers: Sequence[Unit]) -> None:
        self.model, self.shell = model, shell
        self.layers = list(layers)
        self.stacks = find_stacks(model, [unit.module for unit in layers])
        self._units = {unit.module: unit for unit in layers}  # with detached ones
        # First names by container; edits of a stack may rename others in the same Sequential.
        self.first_names: dict[nn.Module, str] = {stack.container: stack.name for stack in self.stacks}
        self.origin = {unit.key: unit.key for unit in layers}  # key -> key of the original layer from which it was made
        self.key_count = len(layers)  # number of keys given out or skipped
        # Numbers that edits have set for the loops of a stack, by its first name and their dotted names
        self.loops: dict[str, dict[str, int]] = {}
        self.first_structure = self.structure  # before any edit
        self._first_numbers = {stack.name: numbers_around(model, stack) for stack in self.stacks}
        self._first_depths = {stack.name: len(stack) for stack in self.stacks}
        self.runs = Counter[str]()  # by key, how often the last step ran a layer

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
        stacks = {self.first_name(stack): stack for stack in self.stacks}
        return ModelStructure(
            {unit.key: unit.name for unit in self.layers},
            {name: stack.name for name, stack in stacks.items()},
            {name: [unit.key for unit in self.units_of(stack)] for name, stack in stacks.items()},
            {name: len(stack.container._modules) for name, stack in stacks.items()},
            ties_of(self.model),
            dict(self.loops),
        )

    def structures_to_save(self, order: Sequence[Unit]) -> tuple[ModelStructure, ModelStructure]:
        """Return the structure before any edit and the present one, with numbers of loops that were set by hand.

        Those are numbers that have changed since the relay was made, and that equal how often layers run in `order`, the order
        of the last step.
        """
        first, now = dict(self.first_structure.loops), dict(self.loops)
        for stack in self.stacks:
            name, held, runs = (
                self.first_name(stack),
                numbers_around(self.model, stack),
                order.count(self.units_of(stack)[0]),
            )
            before = self._first_numbers.get(name, {}) | first.get(name, {})
            depths = self._first_depths.get(name), len(stack)
            by_hand = {
                number
                for number, value in before.items()
                if held.get(number) == runs != value
                and max(runs, value) > 1
                # The depth itself follows the layers. With one layer left, it is the number of runs.
                and not (depths == (value, runs) and number in depth_numbers(self.model, stack))
            }
            if found := {number: held[number] for number in [*before] if number in {*by_hand, *now.get(name, {})}}:
                now[name], first[name] = found, {number: before[number] for number in found}
        return replace(self.first_structure, loops=first), replace(self.structure, loops=now)

    def numbers_of_depth_or_loops(self, stack: Stack) -> set[str]:
        """Return numbers with the name and value of the depth that may be numbers of loops: layers run as often."""
        depth, known = len(stack), self.loops.get(self.first_name(stack), {})
        if not {self.runs[unit.key] for unit in self.units_of(stack)} <= {0, depth}:
            return set()
        held = numbers_around(self.model, stack)
        return {number for number in depth_numbers(self.model, stack) - known.keys() if held[number] == depth}

    def add_loops(self, name: str, numbers: Mapping[str, int]) -> None:
        """Record that numbers, with these values, are numbers of loops of the stack with this first name."""
        if numbers:
            first = self.first_structure.loops
            first[name] = {**numbers, **first.get(name, {})}
            self.loops = {**self.loops, name: {**self.loops.get(name, {}), **numbers}}

    def numbers_not_of_depth(self, stack: Stack) -> dict[str, int]:
        """Return numbers with the name of a depth that are none, such as numbers of loops."""
        name = self.first_name(stack)
        first, depth, loops = self._first_numbers.get(name, {}), self._first_depths.get(name), self.loops.get(name, {})
        named, runs = (
            depth_numbers(self.model, stack),
            {self.runs[unit.key] for unit in self.units_of(stack)} - {0},
        )
        return {
            number: value
            for number, value in numbers_around(self.model, stack).items()
            # Other than the depth, it may also be that of a model from which layers were taken by hand: then they run once.
            if number in loops or (number in named and first.get(number, depth) != depth and runs <= {value})
        }

    # -- stacks --------------------------------------------------------------------------------------------------------

    def first_name(self, stack: Stack) -> str:
        """Return a stack's first name."""
        return self.first_names[stack.container]

    def find_stack(self, name: str) -> Stack:
        """Return the current stack with that first name; raise ValueError if there is none."""
        for stack in self.stacks:
            if self.first_name(stack) == name:
                return stack
        raise ValueError(
            f"there is no stack {name!r}; there are {', '.join(map(repr, self.first_names.values())) or 'none'}"
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
        """Return the layers at several places; raise ValueError or TypeError if a place is in no stack."""
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
        self.first_names = {stack.container: names.get(stack.name, stack.name) for stack in self.stacks}

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
        """Update order and names of the layers of the stack `name`, whose container holds `after` now.

        Other members of a Sequential move with its depth: an embedding, a head, or the containers of other stacks.

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
        moves = any(child not in self._units for child in stack.container._modules.values())
        if moves:  # lists all modules of the model, so only if names may differ
            names = {module: name for name, module in self.model.named_modules()}
            self.stacks = tuple(replace(each, name=names[each.container]) for each in self.stacks)
            for unit in self.layers:
                unit.rename(names[unit.module])
        else:
            for child, module in stack.container.named_children():
                self._units[module].rename(f"{stack.name}.{child}" if stack.name else child)
        return moves
