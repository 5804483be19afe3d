"""How a layer is called, in every picture, table, form and journal: its number, and its permanent key beside it.

The number is the layer's position among the layers of that moment, from 0: what `Insert(at=6)` means by 6 where all layers are
in one stack. It moves when layers before it come or go. The key stays with the layer through all edits.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

LayerNumbers = Mapping[str, int]  # by key

_SHELL = "shell"  # of the model; traces name it among the layers


def number_layers(keys: Iterable[str]) -> LayerNumbers:
    """Number layers by key.

    Args:
        keys: of all layers in order, as the names of a trace have them; the shell among them has no number.
    """
    return {key: i for i, key in enumerate(key for key in keys if key != _SHELL)}


def short_name(key: str, numbers: LayerNumbers) -> str:
    """Give the number alone, "6", where there is little room; the key of what has none, as the shell or a layer that is gone."""
    return str(numbers[key]) if key in numbers else key


def full_name(key: str, numbers: LayerNumbers) -> str:
    """Give number and key, "6 · L006"; the key alone of what has no number."""
    return f"{numbers[key]} · {key}" if key in numbers else key


def span_name(first: str, last: str, numbers: LayerNumbers) -> str:
    """Name layers that follow one another, "2–4 · L002–L009"; keys alone if one of both has no number."""
    keys = f"{first}–{last}"
    return f"{numbers[first]}–{numbers[last]} · {keys}" if {first, last} <= numbers.keys() else keys
