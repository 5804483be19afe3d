"""What goes with a layer to its new position (entries of per-layer lists), and what the position gives it (`layer_idx`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any
from weakref import WeakKeyDictionary

from torch import nn

from l2l_core.model import Stack
from l2l_core.surgery.assignments import Assignments
from l2l_core.surgery.config_depth import PerLayerField
from l2l_core.surgery.layer_features import attributes_at, describe_layer

# What a layer's entries were when it left, by name of the list: it may come back.
_removed_entries: WeakKeyDictionary[nn.Module, dict[str, Any]] = WeakKeyDictionary()


def move_entries(
    lists: list[PerLayerField], stack: Stack, new: tuple[nn.Module, ...], like: Mapping[nn.Module, nn.Module]
) -> list[list[Any]]:
    """Give the entries of the new order, one list for each of `lists`.

    Raises:
        ValueError: `like` names no layer of the stack, or a new layer does not show what its entry is.
    """
    at = {layer: i for i, layer in enumerate(stack.layers)}
    for layer, model_of_it in like.items():
        if model_of_it not in at and model_of_it not in _removed_entries:
            raise ValueError(
                f"like= says that a {type(layer).__name__} is like a {type(model_of_it).__name__} that is no layer of "
                f"{stack.title}"
            )
    return [[_entry(each, stack, at, layer, i, like) for i, layer in enumerate(new)] for each in lists]


def _entry(
    listed: PerLayerField,
    stack: Stack,
    at: Mapping[nn.Module, int],
    layer: nn.Module,
    position: int,
    like: Mapping[nn.Module, nn.Module],
) -> Any:
    for known in (layer, like.get(layer)):
        if stack.layers[position : position + 1] == (known,):  # one that stands in several places has an entry for each
            return listed.values[position]
        if known in at:
            return listed.values[at[known]]
        if known is not None and listed.name in _removed_entries.get(known, {}):
            return _removed_entries[known][listed.name]
    features = describe_layer(layer).features
    alike = [i for i, old in enumerate(stack.layers) if describe_layer(old).features is features]
    for candidates in (range(len(listed.entries)), alike):
        if candidates and len({listed.entries[i] for i in candidates}) == 1:
            return listed.values[candidates[0]]
    raise ValueError(
        f"{listed.name} says what every layer of {stack.title} is ({', '.join(map(str, dict.fromkeys(listed.values)))}), and "
        f"the new {type(layer).__name__} at position {position} does not show it; say which layer it is like: like={{new: old}}"
    )


def save_removed_entries(stack: Stack, new: tuple[nn.Module, ...], lists: list[PerLayerField]) -> None:
    """Keep the entries of layers that leave."""
    staying = set(new)
    for i, layer in enumerate(stack.layers):
        if lists and layer not in staying:
            _removed_entries[layer] = {each.name: each.values[i] for each in lists}


def removed_entries(layer: nn.Module) -> dict[str, Any]:
    """Give what a layer's entries were when it left its stack, by name of the list."""
    return dict(_removed_entries.get(layer, {}))


def restore_removed_entries(layer: nn.Module, entries: Mapping[str, Any]) -> None:
    """Say what the entries of a layer were that left in another process."""
    if entries:
        _removed_entries[layer] = dict(entries)


def _positions(stack: Stack) -> dict[tuple[str, str], int]:
    """Find each (submodule, attribute) that is the position in all layers that have it, and what is added there."""
    offsets: dict[tuple[str, str], set[int]] = {}
    firsts = _first_positions(stack.layers)
    for layer, i in firsts.items():
        for path, name in describe_layer(layer).positions:
            value = attributes_at(layer, path).get(name)
            # Another offset in one layer, or no number, and the place says something else than a position
            offsets.setdefault((path, name), set()).add(value - i if isinstance(value, int) else -1)
    single = len(firsts) == 1  # then any number would do: take only what counts from 0 or 1
    return {
        place: min(offset)
        for place, offset in offsets.items()
        if len(offset) == 1 and (min(offset) in (0, 1) if single else min(offset) >= 0)
    }


def renumber(assignments: Assignments, stack: Stack, new: tuple[nn.Module, ...]) -> None:
    """Let layers say the positions where they will stand, counted as the stack has counted so far."""
    known = _positions(stack)
    names = {name: offset for (_, name), offset in known.items()}
    for layer, i in _first_positions(new).items():
        for path, name in describe_layer(layer).positions:
            offset = known.get((path, name), names.get(name))
            if offset is not None:
                assignments.set(attributes_at(layer, path), name, i + offset)


def _first_positions(layers: Sequence[nn.Module]) -> dict[nn.Module, int]:
    """Find the position of every layer, the first one of those that stand in several places."""
    places: dict[nn.Module, int] = {}
    for i, layer in enumerate(layers):
        places.setdefault(layer, i)
    return places
