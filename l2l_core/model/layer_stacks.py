"""Which stacks a model has, and which layer a person means by a position, a key or a name.

A *stack* is what an edit of the architecture works on: layers that follow one another in one container of the model.
Here nothing changes and nothing runs; `layer_replacement.py` puts other layers into a stack.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from torch import nn

__all__ = ["LayerResolver", "Stack", "find_stacks"]

LayerRef = int | str | tuple[str, int] | nn.Module
_SHOWN = 8  # so many names in a message


@dataclass(frozen=True)
class Stack:
    """Layers that follow one another in one container of the model.

    Attributes:
        name: dotted name of the container ("transformer.h"); "" if the model itself is the container.
        container: where the layers are. A Sequential may also hold an embedding and a head.
        layers: those of its members that relay, in order; one that stands in several places is there several times.
    """

    name: str
    container: nn.ModuleList | nn.Sequential
    layers: tuple[nn.Module, ...]

    def __len__(self) -> int:
        return len(self.layers)

    @property
    def title(self) -> str:
        """The name, for messages."""
        return self.name or type(self.container).__name__


def find_stacks(model: nn.Module, layers: Sequence[nn.Module]) -> tuple[Stack, ...]:
    """Find the stacks that `layers` form in `model`, in the order of the layers.

    A layer that is a plain attribute of its parent (``self.block1``) is in no stack. A layer in two containers belongs
    to the one that the model defines first.
    """
    wanted, held = set(layers), set()
    found: dict[nn.Module, Stack] = {}  # first layer -> its stack
    for name, module in model.named_modules():
        if not isinstance(module, nn.ModuleList | nn.Sequential):
            continue
        members = tuple(child for child in module if child in wanted and child not in held)
        if members:
            held.update(members)
            found[members[0]] = Stack(name, module, members)
    order = {layer: i for i, layer in enumerate(layers)}
    return tuple(sorted(found.values(), key=lambda stack: min(order[layer] for layer in stack.layers)))


class LayerResolver:
    """Finds the layer that a person means.

    A layer is named by its position (an int, negative from the end; only if there is one stack), by ``(stack name,
    position)``, by its permanent key ("L003"), by its dotted name ("transformer.h.3"), or is given itself.

    Args:
        stacks: the stacks of the model.
        keys: layer -> permanent key, of all layers, those in no stack too.
        names: layer -> dotted name.

    Every method raises ValueError for what does not exist or could mean several, with a list of what would be valid, and
    TypeError for a value of another kind.
    """

    def __init__(self, stacks: Sequence[Stack], keys: Mapping[nn.Module, str], names: Mapping[nn.Module, str]) -> None:
        self._stacks = tuple(stacks)
        self._keys, self._names = keys, names
        self._by_key = {key: layer for layer, key in keys.items()}
        self._by_name = {name: layer for layer, name in names.items() if layer in keys}
        self._ranges: dict[nn.Module, tuple[Stack, range]] = {}  # from the first one of a layer to the last
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
        """Return the stack of the layer at `where`, and its position there; the first one, if it is named and has several."""
        stack, places = self._range_of(where)
        return stack, places.start

    def _range_of(self, where: LayerRef) -> tuple[Stack, range]:
        """Return the stack of the layer at `where`, and its place there; if it is named, from its first to its last place."""
        if not isinstance(where, str | nn.Module):
            stack, position = self._split_position(where)
            at = _index(stack, position, len(stack))
            return stack, range(at, at + 1)
        layer = self.layer(where)
        if layer not in self._ranges:
            raise ValueError(
                f"layer {self._keys[layer]} ({self._names.get(layer, '')}) is an attribute of its own, in no container: "
                "nothing can be put beside it or taken away. Layers that change their number live in a ModuleList or Sequential"
            )
        return self._ranges[layer]

    def insertion_point(self, where: LayerRef) -> tuple[Stack, int]:
        """Return a stack and an index in it, in front of which something goes; the end of the stack is one, too.

        Negative positions count as in ``list.insert``: -1 is in front of the last layer.
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
        """Return a stack and the indices of layers that follow one another in it.

        A layer that stands in several places and is named spans from its first to its last one.

        ``span(2)`` is one layer, ``span(2, 4)``, ``span("L002", "L004")`` and ``span(("L002", "L004"))`` are three: both ends
        belong to it. A slice or range counts as in Python, so ``span(slice(2, 5))`` is the same three.
        """
        if isinstance(first, tuple) and len(first) == 2 and isinstance(first[1], str) and last is None:
            first, last = first
        name, part = first if isinstance(first, tuple) and len(first) == 2 else (None, first)
        if isinstance(part, slice | range):
            if last is not None:
                raise ValueError(f"a span is either {part!r} or a first and a last layer, not both")
            return self._slice_range(part, name)
        stack, begins = self._range_of(first)
        other, ends = (stack, begins) if last is None else self._range_of(last)
        begin, end = begins.start, ends.stop - 1
        if other is not stack:
            raise ValueError(
                f"{first!r} is in {stack.title} and {last!r} in {other.title}: a span lies in one stack; "
                f"there are {self._listed()}"
            )
        if end < begin:
            raise ValueError(f"the span from {first!r} to {last!r} is empty: position {end} comes before {begin}")
        return stack, range(begin, end + 1)

    # -- helpers -------------------------------------------------------------------------------------------------------

    def _named(self, name: str) -> nn.Module:
        for known in (self._by_key, self._by_name):
            if name in known:  # the layer itself may be false: a Sequential without members
                return known[name]
        stack = next((stack for stack in self._stacks if stack.name == name), None)
        if stack is not None:
            raise ValueError(f"{name!r} is a stack of {_count(stack)}, not a layer; say ({name!r}, 0) or a key")
        valid = self._by_name if "." in name else self._by_key
        raise ValueError(f"no layer {name!r}; {_list_names(valid)}")

    def _split_position(self, where: int | tuple[str, int]) -> tuple[Stack, int]:
        """Return the stack and the position, not yet checked, that `where` says."""
        if isinstance(where, tuple):
            if len(where) != 2 or not isinstance(where[0], str):
                raise TypeError(f"{where!r} names no layer; a tuple is (name of the stack, position)")
            return self._stack(where[0]), _integer(where[1])
        return self._only_stack(where), _integer(where)

    def _stack(self, name: str) -> Stack:
        for stack in self._stacks:
            if name == stack.name:
                return stack
        raise ValueError(f"no stack {name!r}; there are {self._listed()}")

    def _only_stack(self, where: object) -> Stack:
        if not isinstance(where, slice | range):
            _integer(where)
        if not self._stacks:
            raise ValueError(
                f"position {where} means nothing here: the layers are attributes of their own, in no container; "
                f"{_list_names(self._by_key)}"
            )
        if len(self._stacks) > 1:
            raise ValueError(
                f"{where} is ambiguous: there are stacks {self._listed()}; "
                f"say ({self._stacks[0].name!r}, {where}) or a key"
            )
        return self._stacks[0]

    def _slice_range(self, part: slice | range, name: str | None) -> tuple[Stack, range]:
        stack = self._only_stack(part) if name is None else self._stack(name)
        if isinstance(part, range):
            part = slice(part.start, part.stop, part.step)
        if part.step not in (None, 1):
            raise ValueError(f"a span has no gaps: a step of {part.step} does not work")
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


def _integer(value: object) -> int:
    if isinstance(value, bool):
        raise TypeError(f"{value!r} names no layer; give a position, a key, a dotted name or (stack name, position)")
    try:
        return operator.index(value)  # type: ignore[arg-type] - that is the question
    except TypeError:
        raise TypeError(
            f"{value!r} names no layer; give a position, a key, a dotted name or (stack name, position)"
        ) from None


def _index(stack: Stack, position: int, places: int) -> int:
    """Count `position` from the front; `places` is len(stack), or one more if the end is a place too."""
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
    """Say what there is, as a range if the names are numbered without gaps."""
    names = list(names)
    if not names:
        return "there is none"
    heads = {re.sub(r"\d+$", "", name) for name in names}
    numbers = [re.search(r"\d+$", name) for name in names]
    if len(names) > 2 and len(heads) == 1 and all(numbers):
        counted = [int(match.group()) for match in numbers if match]
        if counted == list(range(counted[0], counted[0] + len(counted))):
            return f"there are {names[0]} to {names[-1]}"
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return f"there {'are' if len(names) > 1 else 'is'} {', '.join(names[:_SHOWN])}{more}"
