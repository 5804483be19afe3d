"""Edits that apply to one layer, and the Python code of an edit."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, Field, fields
from typing import Any

import numpy

from l2l_core import Drop, Duplicate, Edit, Freeze, Insert, Move, StepPlan, Unfreeze
from l2l_core.plan import schedule_name
from workbench.session.snapshot_values import LayerRow


def edits_for_layer(row: LayerRow, layers: Sequence[LayerRow]) -> Mapping[str, Edit]:
    """Return the possible edits of a layer by label; empty for a layer that is in no stack.

    Args:
        row: one of `layers`.
        layers: all layers, in order.
    """
    if row.stack is None:
        return {}
    keys = [other.key for other in layers if other.stack == row.stack]
    after = keys.index(row.key) + 1
    # The place after the last layer has no key, so it is given by stack and index.
    next_place: Any = keys[after] if after < len(keys) else (row.stack, after)
    # Slices, since they are empty at either end of the stack.
    moves = {"Move earlier": keys[after - 2 : after - 1], "Move later": keys[after : after + 1]}
    return {
        "Drop": Drop(row.key),
        "Duplicate": Duplicate(row.key),
        "Unfreeze" if row.frozen else "Freeze": Unfreeze(row.key) if row.frozen else Freeze(row.key),
        "Insert before": Insert(row.key, like=row.key),
        "Insert after": Insert(next_place, like=row.key),
        **{label: Move(row.key, to[0]) for label, to in moves.items() if to},
    }


def edit_code(edit: Any) -> str:
    """Return the code of an edit or another dataclass, without fields at their defaults: ``Drop(layers='L006')``."""
    values = [(field, getattr(edit, field.name)) for field in fields(edit)]
    arguments = [f"{field.name}={literal(value)}" for field, value in values if value != _default_value(field)]
    return f"{type(edit).__name__}({', '.join(arguments)})"


def literal(value: Any) -> str:
    """Return the code of a plain value: NumPy scalars as Python numbers, inf and nan as ``float('inf')``."""
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
        case StepPlan():
            return repr(str(value))
        case _ if callable(value):
            return schedule_name(value)
        case _:
            return repr(value)


def _default_value(field: Field[Any]) -> Any:
    return field.default_factory() if field.default_factory is not MISSING else field.default
