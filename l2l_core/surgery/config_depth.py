"""The fields of a configuration that are a stack's depth, and lists with one entry per layer.

There is no list of model families. A *config* is an attribute of a module that has `to_dict` (transformers), is a dataclass,
or is a dict or plain object under a name like "config". The evidence is a field's value (the old depth), its name (it has
"layer", "block" or "depth") and its *role*: the other words of the name ("decoder" in `num_decoder_layers`) must occur in the
path to the stack. Nothing is changed here.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, is_dataclass
from functools import cache
from types import SimpleNamespace
from typing import Any

from torch import nn

_DEPTH_WORDS = {"layer", "block", "depth"}
_NEUTRAL_WORDS = {"num", "n", "number", "of", "count", "total", "hidden", "config", "cfg", "model"} | _DEPTH_WORDS
_CONFIG_NAMES = {"config", "cfg", "conf", "hparam", "arg"}
_PER_LAYER_WORDS = {"layer", "block", "type"}
_INDEX_WORDS = {"only", "idx", "id", "index", "indice", "indexe"}
# A list for another part of the model has one of these in its name, but the path to the stack does not.
_PART_WORDS = {"encoder", "decoder", "vision", "text", "audio", "speech", "image", "video", "mtp", "feature"}


# --- configs -------------------------------------------------------------------------------------------------------


def is_config(name: str, value: Any) -> bool:
    """Return whether the attribute `name` with this value is a configuration."""
    if value is None or isinstance(value, nn.Module | int | float | str | list | tuple | type):
        return False
    named = bool(name_words(name) & _CONFIG_NAMES)
    if hasattr(value, "to_dict") and hasattr(value, "__dict__"):
        return named and "generation" not in name
    if is_dataclass(value):
        return hasattr(value, "__dict__") and (named or name == "params")
    return named and (isinstance(value, dict) or (hasattr(value, "__dict__") and not callable(value)))


def stored_fields(config: Any) -> dict[str, Any]:
    """Return the stored fields of a config by name; writing to them skips validation and aliases."""
    return config if isinstance(config, dict) else vars(config)


def stored_name(config: Any, name: str) -> str:
    """Return the name under which a config of transformers stores `name` (GPT-2: num_hidden_layers is n_layer)."""
    names = getattr(config, "attribute_map", None)
    return names.get(name, name) if isinstance(names, Mapping) else name


def nested_configs(config: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the config and those inside it, with dotted prefix ("", "text_config.")."""
    yield prefix, config
    for name, value in list(stored_fields(config).items()):
        # At most three levels deep, because a config may hold itself.
        if isinstance(name, str) and not name.startswith("_") and prefix.count(".") < 3:
            plain = isinstance(value, dict | SimpleNamespace) and isinstance(config, dict | SimpleNamespace)
            if plain or is_config(name, value) or (hasattr(value, "to_dict") and not isinstance(value, type)):
                yield from nested_configs(value, f"{prefix}{name}.")


# --- the depth -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class StackLocation:
    """Names and numbers that identify a stack in a config."""

    words: frozenset[str]  # of the path to the container and of the class that owns it
    depth: int  # number of layers
    stage: int | None = None  # position among the stages, if the stack is one of several in a list
    stages: int = 0  # number of stages


@dataclass(frozen=True)
class DepthField:
    """A number that is the depth of a stack: field `name` of `config`, or element `index` of that field."""

    config: Any
    name: str  # as stored
    label: str  # dotted name, from the config that a module holds
    index: int | None
    role: frozenset[str]

    def value(self, depth: int) -> Any:
        """Return the field's value for a depth: a number, or the whole list with one element changed."""
        if self.index is None:
            return depth
        old = stored_fields(self.config)[self.name]
        return type(old)(depth if i == self.index else value for i, value in enumerate(old))


def find_depth_candidates(config: Any, location: StackLocation) -> list[DepthField]:
    """Find all fields of `config`, and of configs inside it, that may be the depth of the stack at `location`."""
    found = []
    for prefix, inner in nested_configs(config):
        for name, value in stored_fields(inner).items():
            if not isinstance(name, str) or name.startswith("_") or not name_words(name) & _DEPTH_WORDS:
                continue
            role, depths = name_words(prefix + name) - _NEUTRAL_WORDS, [value]
            if location.stage is not None:
                depths = value if isinstance(value, list | tuple) and len(value) == location.stages else [None]
            if role <= location.words and all(map(is_int, depths)) and depths[location.stage or 0] == location.depth:
                found.append(DepthField(inner, name, prefix + name, location.stage, role))
    return found


def most_specific(found: Sequence[DepthField]) -> list[DepthField]:
    """Return the fields with the most specific role; of several, `num_hidden_layers` if it is among them."""
    most = max((len(field.role) for field in found), default=0)
    left = [field for field in found if len(field.role) == most]
    standard = [field for field in left if field.name == stored_name(field.config, "num_hidden_layers")]
    return standard if len(left) > 1 and len(standard) == 1 else left


def is_depth_name(name: str, location: StackLocation) -> bool:
    """Return whether an attribute of a module around the stack may be its depth (`num_layers`)."""
    return bool(name_words(name) & _DEPTH_WORDS) and name_words(name) - _NEUTRAL_WORDS <= location.words


# --- per layer -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class PerLayerField:
    """A field with an entry for every layer, and the conversion of entries to the field's value."""

    config: Any
    name: str
    values: tuple[Any, ...]  # one per layer
    to_value: Callable[[Sequence[Any]], Any]

    @property
    def entries(self) -> tuple[Hashable, ...]:
        """The values in a form that can be compared."""
        return to_hashable(self.values)


def find_per_layer_fields(holder: Any, location: StackLocation) -> list[PerLayerField]:
    """Find the plain lists of a config with one entry per layer, positions or a pattern."""
    found = (_read_per_layer_field(holder, name, value, location) for name, value in stored_fields(holder).items())
    return [each for each in found if each and not any(isinstance(value, nn.Module) for value in each.values)]


def _read_per_layer_field(config: Any, name: str, value: Any, location: StackLocation) -> PerLayerField | None:
    """Read `value` as a per-layer list of the stack at `location`; return None if it is not one."""
    if not isinstance(name, str) or name.startswith("_") or not isinstance(value, list | tuple):
        return None
    parts, kind = name_words(name), type(value)
    if not parts & (_PER_LAYER_WORDS | _INDEX_WORDS) or (parts & _PART_WORDS) - location.words:
        return None
    pattern = _expand_pattern(value)
    if pattern is not None and len(pattern) == location.depth:
        return PerLayerField(config, name, tuple(pattern), lambda new: kind([[list(new), 1]]))
    is_indices = all(is_int(i) and 0 <= i < location.depth for i in value) and list(value) == sorted(set(value))
    # As many ascending numbers as layers are one entry per layer, unless the name has a word for indices.
    if is_indices and (parts & _INDEX_WORDS or (value and len(value) != location.depth)):
        member = tuple(i in value for i in range(location.depth))
        return PerLayerField(config, name, member, lambda new: kind(i for i, is_in in enumerate(new) if is_in))
    if len(value) == location.depth and parts & _PER_LAYER_WORDS:
        return PerLayerField(config, name, tuple(value), kind)
    return None


def _expand_pattern(value: Sequence[Any]) -> list[Any] | None:
    """Expand a pattern: [[["global", "local"], 2]] is global, local, global, local; None if it is not one."""
    for each in value:
        if not (
            isinstance(each, list | tuple) and len(each) == 2 and isinstance(each[0], list | tuple) and is_int(each[1])
        ):
            return None
    return [name for names, times in value for _ in range(times) for name in names] if value else None


def to_hashable(values: Sequence[Any]) -> tuple[Hashable, ...]:
    """Return the values with those that are not hashable, such as lists, replaced by their `repr`."""
    return tuple(value if isinstance(value, Hashable) else repr(value) for value in values)


# --- words ---------------------------------------------------------------------------------------------------------


@cache
def name_words(name: str) -> frozenset[str]:
    """Split a name into its words, in the singular: {"num", "decoder", "layer"} for `num_decoder_layers`."""
    parts = re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+", name)
    return frozenset(part.lower().removesuffix("s") for part in parts)


def is_int(value: Any) -> bool:
    """Return whether `value` is an integer; a bool is not."""
    return isinstance(value, int) and not isinstance(value, bool)
