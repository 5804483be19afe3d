"""Stacks of a model, and lookup of layers by position, key or name.

A *stack* is a sequence of layers in one container of the model; edits work on stacks (`layer_replacement.py`).
"""

from __future__ import annotations

import operator
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from torch import nn

LayerRef = int | str | tuple[str, int] | nn.Module
_MAX_NAMES_SHOWN = 8  # in a message


@dataclass(frozen=True)
class Stack:
    """A sequence of layers in one container of the model."""

    name: str  # dotted name of the container ("transformer.h"); "" if the model itself is the container
    container: nn.ModuleList | nn.Sequential  # a Sequential may also hold an embedding and a head
    layers: tuple[nn.Module, ...]  # in order; a layer in several places is listed several times

    def __len__(self) -> int:
        return len(self.layers)

    @property
    def title(self) -> str:
        """The name for messages."""
        return self.name or type(self.container).__name__


def find_stacks(model: nn.Module, layers: Sequence[nn.Module]) -> tuple[Stack, ...]:
    """Find the stacks that `layers` form in `model`, in the order of the layers.

    A layer that is a plain attribute of its parent (``self.block1``) is in no stack. A layer in two containers belongs
    to the one that the model defines first.
    """
    all_layers, held = set(layers), set()
    found: dict[nn.Module, Stack] = {}  # first layer -> its stack
    for name, module in model.named_modules():
        if not isinstance(module, nn.ModuleList | nn.Sequential):
            continue
        members = tuple(child for child in module if child in all_layers and child not in held)
        if members:
            held.update(members)
            found[members[0]] = Stack(name, module, members)
    order = {layer: i for i, layer in enumerate(layers)}
    return tuple(sorted(found.values(), key=lambda stack: min(order[layer] for layer in stack.layers)))


class LayerResolver:
    """Lookup of layers by position, key, name or module.

    A layer is given by its position (an int, negative from the end; only if there is one stack), by ``(stack name,
    position)``, by its permanent key ("L003"), by its dotted name ("transformer.h.3"), or as the module.

    `keys` maps layers, also those in no stack, to permanent keys; `names` maps layers to dotted names.

    Every method raises ValueError for a reference to no layer or to several, with a list of valid ones, and TypeError
    for a value of another type.
    """

    def __init__(self, stacks: Sequence[Stack], keys: Mapping[nn.Module, str], names: Mapping[nn.Module, str]) -> None:
        self._stacks: Sequence[Stack] = tuple(stacks)
        self._keys, self._names = keys, names
        self._by_key = {key: layer for layer, key in keys.items()}
        self._by_name = {name: layer for layer, name in names.items() if layer in keys}
        self._ranges: dict[nn.Module, tuple[Stack, range]] = {}  # from the first place of a layer to the last
        for stack in self._stacks:
            for i, layer in enumerate(stack.layers):
                first = self._ranges[layer][1].start if layer in self._ranges else i
                self._ranges[layer] = stack, range(first, i + 1)

    def layer(self, where: LayerRef) -> nn.Module:
        """Return the layer at `where`."""
        if isinstance(where, str):
            return self._named(where)
        if isinstance(where, nn.Module):
            if where not in self._keys:
                raise ValueError(
                    f"this {type(where).__name__} is not a layer of the model; {_list_names(self._by_key)}. "
                    "A copy of a layer is another module: pass the layer itself or its key"
                )
            return where
        stack, position = self._split_position(where)
        return stack.layers[_index(stack, position, len(stack))]

    def position_of(self, where: LayerRef) -> tuple[Stack, int]:
        """Return the stack of the layer at `where` and its position, the first one if it has several."""
        stack, places = self._range_of(where)
        return stack, places.start

    def _range_of(self, where: object) -> tuple[Stack, range]:
        """Return the stack of the layer at `where`, and its place or places."""
        if not isinstance(where, str | nn.Module):
            stack, position = self._split_position(where)
            index = _index(stack, position, len(stack))
            return stack, range(index, index + 1)
        layer = self.layer(where)
        if layer not in self._ranges:
            raise ValueError(
                f"layer {self._keys[layer]} ({self._names.get(layer, '')}) is an attribute of a module, in no container: "
                "nothing can be put beside it or taken away. Keep layers in a ModuleList or Sequential to change their number"
            )
        return self._ranges[layer]

    def insertion_point(self, where: LayerRef) -> tuple[Stack, int]:
        """Return a stack and the index of the layer before which to insert; ``len(stack)`` is valid, too.

        Negative positions count as in ``list.insert``: -1 inserts before the last layer.
        """
        if isinstance(where, str | nn.Module):
            return self.position_of(where)
        stack, position = self._split_position(where)
        return stack, position if position == len(stack) else _index(stack, position, len(stack) + 1)

    def span(
        self,
        first: LayerRef | slice | range | tuple[str, slice | range] | tuple[str, str],
        last: LayerRef | None = None,
    ) -> tuple[Stack, range]:
        """Return a stack and the indices of consecutive layers in it.

        ``span(2)`` is one layer; ``span(2, 4)``, ``span("L002", "L004")`` and ``span(("L002", "L004"))`` are three: both
        ends are included. A slice or range counts as in Python, so ``span(slice(2, 5))`` is the same three. A layer that
        is given by name and is in several places spans from the first to the last.
        """
        name, part = None, first  # part: the first layer, or a slice of the stack `name`
        if isinstance(first, tuple) and len(first) == 2:
            if isinstance(first[1], str) and last is None:
                part, last = cast("tuple[str, str]", first)
            elif isinstance(first[1], slice | range):
                name, part = cast("tuple[str, slice | range]", first)
        if isinstance(part, slice | range):
            if last is not None:
                raise ValueError(f"a span is either {part!r} or a first and a last layer, not both")
            return self._slice_range(part, name)
        stack, begins = self._range_of(part)
        other, ends = (stack, begins) if last is None else self._range_of(last)
        begin, end = begins.start, ends.stop - 1
        if other is not stack:
            raise ValueError(
                f"{part!r} is in {stack.title} and {last!r} in {other.title}: a span lies in one stack; "
                f"there are {self._listed()}"
            )
        if end < begin:
            raise ValueError(f"the span from {part!r} to {last!r} is empty: position {end} is before {begin}")
        return stack, range(begin, end + 1)

    # -- helpers -------------------------------------------------------------------------------------------------------

    def _named(self, name: str) -> nn.Module:
        for layers in (self._by_key, self._by_name):
            if name in layers:  # not `get`: a Sequential without members is false
                return layers[name]
        stack = next((stack for stack in self._stacks if stack.name == name), None)
        if stack is not None:
            raise ValueError(f"{name!r} is a stack of {_count(stack)}, not a layer; pass ({name!r}, 0) or a key")
        valid = self._by_name if "." in name else self._by_key
        raise ValueError(f"no layer {name!r}; {_list_names(valid)}")

    def _split_position(self, where: object) -> tuple[Stack, int]:
        """Return the stack and the position in `where`; the position is not checked."""
        if isinstance(where, tuple):
            if len(where) != 2 or not isinstance(where[0], str):
                raise TypeError(f"{where!r} names no layer; a tuple is (name of the stack, position)")
            return self._stack(where[0]), _integer(where[1])
        position = _integer(where)
        return self._only_stack(where), position

    def _stack(self, name: str) -> Stack:
        for stack in self._stacks:
            if name == stack.name:
                return stack
        raise ValueError(f"no stack {name!r}; there are {self._listed()}")

    def _only_stack(self, where: object) -> Stack:
        if not self._stacks:
            raise ValueError(
                f"position {where} does not name a layer: the layers are attributes of modules, in no container; "
                f"{_list_names(self._by_key)}"
            )
        if len(self._stacks) > 1:
            raise ValueError(
                f"{where} is ambiguous: there are stacks {self._listed()}; "
                f"pass ({self._stacks[0].name!r}, {where}) or a key"
            )
        return self._stacks[0]

    def _slice_range(self, part: slice | range, name: str | None) -> tuple[Stack, range]:
        stack = self._only_stack(part) if name is None else self._stack(name)
        if isinstance(part, range):
            part = slice(part.start, part.stop, part.step)
        if part.step not in (None, 1):
            raise ValueError(f"step {part.step} does not work: a span has no gaps; leave the step out")
        for bound in (part.start, part.stop):
            if bound is not None and not -len(stack) <= _integer(bound) <= len(stack):
                raise ValueError(_out_of_range(stack, bound, len(stack) + 1))
        indices = range(len(stack))[part]
        if not indices:
            raise ValueError(f"the span {part.start} to {part.stop} of {stack.title} is empty; it has {_count(stack)}")
        return stack, indices

    def _listed(self) -> str:
        names = [f"{stack.title} ({_count(stack)})" for stack in self._stacks]
        return " and ".join(filter(None, [", ".join(names[:-1]), names[-1]])) if names else "none"


def _integer(value: Any) -> int:
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        if isinstance(
            key := getattr(value, "key", None), str
        ):  # one of `relay.stack`, whose repr has all of its weights
            raise TypeError(f"a {type(value).__name__} names no layer; pass its key, {key!r}")
        raise TypeError(f"{value!r} names no layer; pass a position, a key, a dotted name or (stack name, position)")
    return operator.index(value)


def _index(stack: Stack, position: int, places: int) -> int:
    """Return `position` counted from the front; valid below `places`: len(stack), or one more to include the end."""
    size = len(stack)
    if not -size <= position < places:
        raise ValueError(_out_of_range(stack, position, places))
    return position + size if position < 0 else position


def _out_of_range(stack: Stack, position: int, places: int) -> str:
    after = f" ({len(stack)} is after the last)" if places > len(stack) else ""
    return f"position {position} is out of range: {stack.title} has {_count(stack)}, 0 to {places - 1}{after}"


def _count(stack: Stack) -> str:
    return f"{len(stack)} layer{'s' if len(stack) != 1 else ''}"


def _list_names(names: Iterable[str]) -> str:
    """Return "there are ..." with the names, as a range if they are numbered without gaps."""
    names = list(names)
    if not names:
        return "there is none"
    heads = {re.sub(r"\d+$", "", name) for name in names}
    numbers = [re.search(r"\d+$", name) for name in names]
    if len(names) > 2 and len(heads) == 1 and all(numbers):
        counted = [int(match.group()) for match in numbers if match]
        if counted == list(range(counted[0], counted[0] + len(counted))):
            return f"there are {names[0]} to {names[-1]}"
    more = f" and {len(names) - _MAX_NAMES_SHOWN} more" if len(names) > _MAX_NAMES_SHOWN else ""
    return f"there {'are' if len(names) > 1 else 'is'} {', '.join(names[:_MAX_NAMES_SHOWN])}{more}"
