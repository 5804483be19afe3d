"""Edits of one layer and nothing else, and the line of code that makes an edit."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, Field, fields
from typing import Any

import numpy

from l2l_core import Drop, Duplicate, Edit, Freeze, Insert, Move, Unfreeze
from workbench.session.snapshot_values import LayerRow


def edits_for_layer(row: LayerRow, layers: Sequence[LayerRow]) -> Mapping[str, Edit]:
    """List the edits that a layer allows, by the words for them; none of a layer that is in no stack.

    Args:
        row: one of `layers`.
        layers: all of them, in order.
    """
    if row.stack is None:
        return {}
    keys = [other.key for other in layers if other.stack == row.stack]
    after = keys.index(row.key) + 1
    # Behind the last layer there is none to name by its key, so that place has a number.
    behind: Any = keys[after] if after < len(keys) else (row.stack, after)
    # Slices, which are empty at either end of the stack.
    moves = {"Move earlier": keys[after - 2 : after - 1], "Move later": keys[after : after + 1]}
    return {
        "Drop": Drop(row.key),
        "Duplicate": Duplicate(row.key),
        "Unfreeze" if row.frozen else "Freeze": Unfreeze(row.key) if row.frozen else Freeze(row.key),
        "Insert before": Insert(row.key, like=row.key),
        "Insert after": Insert(behind, like=row.key),
        **{words: Move(row.key, to[0]) for words, to in moves.items() if to},
    }


def edit_code(edit: Any) -> str:
    """Write an edit, or another dataclass, as Python does, without fields that have their defaults: ``Drop(layers='L006')``."""
    given = [(one, getattr(edit, one.name)) for one in fields(edit)]
    words = [f"{one.name}={literal(value)}" for one, value in given if value != _default_value(one)]
    return f"{type(edit).__name__}({', '.join(words)})"


def literal(value: Any) -> str:
    """Write a plain value so that Python can read it: numbers of NumPy as Python's own, and inf and nan as ``float('inf')``."""
    match value:
        case numpy.generic():
            return literal(value.item())
        case list():
            return f"[{', '.join(map(literal, value))}]"
        case tuple():
            return f"({', '.join(map(literal, value))}{',' * (len(value) == 1)})"
        case slice():
            return f"slice({literal(value.start)}, {literal(value.stop)}, {literal(value.step)})"
        case float() if not math.isfinite(value):
            return f"float({str(value)!r})"
        case _:
            return repr(value)


def _default_value(one: Field[Any]) -> Any:
    return one.default_factory() if one.default_factory is not MISSING else one.default
