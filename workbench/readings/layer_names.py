"""Display names of layers: the number and the permanent key.

The number is the current position of the layer from 0, as in `Insert(at=6)` for a model with one stack. Edits change it; the
key stays.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

LayerNumbers = Mapping[str, int]  # by key

_SHELL = "shell"  # among the layer names of a trace


def number_layers(keys: Iterable[str]) -> LayerNumbers:
    """Return the number of each layer by key; the shell among `keys` has no number."""
    return {key: i for i, key in enumerate(key for key in keys if key != _SHELL)}


def short_name(key: str, numbers: LayerNumbers) -> str:
    """Return the number of a layer, "6"; the key if it has none, as the shell or a dropped layer."""
    return str(numbers[key]) if key in numbers else key


def full_name(key: str, numbers: LayerNumbers) -> str:
    """Return number and key, "6 · L006"; only the key if it has no number."""
    return f"{numbers[key]} · {key}" if key in numbers else key
