"""Move entries of per-layer lists with their layers, and renumber position attributes such as `layer_idx`."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any
from weakref import WeakKeyDictionary

from torch import nn

from l2l_core.model import Stack
from l2l_core.surgery.config_depth import PerLayerField
from l2l_core.surgery.layer_features import attributes_at, describe_layer
from l2l_core.surgery.stack_context import Assignment

# Entries of removed layers by name of the list, in case a layer is inserted again.
_removed_entries: WeakKeyDictionary[nn.Module, dict[str, Any]] = WeakKeyDictionary()


def move_entries(
    lists: list[PerLayerField], stack: Stack, new: tuple[nn.Module, ...], like: Mapping[nn.Module, nn.Module]
) -> list[list[Any]]:
    """Return the entries in the new order, one list for each of `lists`; raise ValueError if one is unknown."""
    positions = {layer: i for i, layer in enumerate(stack.layers)}
    for layer, example in like.items():
        if example not in positions and example not in _removed_entries:
            raise ValueError(
                f"like= maps a {type(layer).__name__} to a {type(example).__name__} that is not a layer of {stack.title}; "
                "pass a layer of the stack"
            )

    def entry(listed: PerLayerField, layer: nn.Module, i: int) -> Any:
        for source in (layer, like.get(layer)):
            if source in positions:
                # A layer in several places has an entry for each.
                return listed.values[i if stack.layers[i : i + 1] == (source,) else positions[source]]
            if source is not None and listed.name in _removed_entries.get(source, {}):
                return _removed_entries[source][listed.name]
        return _entry_of_others(listed, stack, layer, i)

    return [[entry(listed, layer, i) for i, layer in enumerate(new)] for listed in lists]


def _entry_of_others(listed: PerLayerField, stack: Stack, layer: nn.Module, position: int) -> Any:
    """Return the entry that all layers of the stack have, or all that have the features of `layer`."""
    features = describe_layer(layer).features
    alike = [i for i, old in enumerate(stack.layers) if describe_layer(old).features is features]
    for candidates in (range(len(listed.values)), alike):
        if len({listed.entries[i] for i in candidates}) == 1:
            return listed.values[candidates[0]]
    raise ValueError(
        f"{listed.name} has an entry for every layer of {stack.title} ({', '.join(map(str, dict.fromkeys(listed.values)))}), "
        f"and that of the new {type(layer).__name__} at position {position} cannot be determined; pass a layer with the same "
        "entry: like={new: old}"
    )


def save_removed_entries(stack: Stack, new: tuple[nn.Module, ...], lists: list[PerLayerField]) -> None:
    """Save the entries of layers that are not in `new`."""
    staying = set(new)
    for i, layer in enumerate(stack.layers):
        if lists and layer not in staying:
            _removed_entries[layer] = {each.name: each.values[i] for each in lists}


def removed_entries(layer: nn.Module) -> dict[str, Any]:
    """Return the entries of a removed layer by name of the list."""
    return dict(_removed_entries.get(layer, {}))


def restore_removed_entries(layer: nn.Module, entries: Mapping[str, Any]) -> None:
    """Set the entries of a layer that was removed in another process."""
    if entries:
        _removed_entries[layer] = dict(entries)


def _position_offsets(stack: Stack) -> dict[tuple[str, str], int]:
    """Return the offset of each (submodule, attribute) that equals position + offset in all layers that have it."""
    offsets: dict[tuple[str, str], set[int]] = {}
    firsts = _first_positions(stack.layers)
    for layer, i in firsts.items():
        for path, name in describe_layer(layer).positions:
            value = attributes_at(layer, path).get(name)
            # With different offsets or without a number the attribute is not a position.
            offsets.setdefault((path, name), set()).add(value - i if isinstance(value, int) else -1)
    # With one layer every number would match: accept only those that count from 0 or 1.
    most = 1 if len(firsts) == 1 else math.inf
    return {place: min(offset) for place, offset in offsets.items() if len(offset) == 1 and 0 <= min(offset) <= most}


def position_assignments(stack: Stack, new: tuple[nn.Module, ...]) -> Iterator[Assignment]:
    """Assign the new positions to the position attributes of layers, with the offsets of the old ones."""
    offsets = _position_offsets(stack)
    names = {name: offset for (_, name), offset in offsets.items()}
    for layer, i in _first_positions(new).items():
        for path, name in describe_layer(layer).positions:
            offset = offsets.get((path, name), names.get(name))
            if offset is not None:
                yield attributes_at(layer, path), name, i + offset


def _first_positions(layers: Sequence[nn.Module]) -> dict[nn.Module, int]:
    """Return the first position of every layer."""
    first: dict[nn.Module, int] = {}
    for i, layer in enumerate(layers):
        first.setdefault(layer, i)
    return first
