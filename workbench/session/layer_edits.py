"""Edits of one layer, edits that make a variant of the model, and the Python code of an edit."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, Field, fields
from typing import Any

import numpy

from l2l_core import Drop, Duplicate, Edit, Freeze, Insert, Move, StepPlan, Unfreeze
from l2l_core.plan import schedule_name
from workbench.readings import full_name, number_layers
from workbench.session.snapshot_values import LayerRow

_FEW = 3  # layers that are dropped together, of a stack with at least twice as many


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


def race_variants(layers: Sequence[LayerRow]) -> Mapping[str, Sequence[Edit]]:
    """Return the edits of each variant to race against by its label; empty if the layers are in no stack.

    The edits are of the longest stack. Layers with the least influence are those of the last step.
    """
    names = [row.stack for row in layers if row.stack is not None]
    if not names:
        return {}
    rows = [row for row in layers if row.stack == max(names, key=names.count)]
    variants: dict[str, Sequence[Edit]] = {}
    if len(rows) > 1:
        variants |= _drops(rows, [row.key for row in layers])
    whole: Any = (rows[0].key, rows[-1].key) if len(rows) > 1 else rows[0].key
    variants["insert a layer at the end"] = [Insert((rows[0].stack or "", len(rows)))]
    variants["double the stack, copies in between"] = [Duplicate(whole, "interleaved")]
    return variants


def _drops(rows: Sequence[LayerRow], keys: Sequence[str]) -> Mapping[str, Sequence[Edit]]:
    numbers = number_layers(keys)
    drops: dict[str, Sequence[Edit]] = {}
    measured = [row for row in rows if row.influence is not None]
    least = sorted(measured, key=lambda row: row.influence or 0.0)
    if len(measured) == len(rows):
        drops[f"drop the layer of least influence, {full_name(least[0].key, numbers)}"] = [Drop(least[0].key)]
        if len(rows) >= 2 * _FEW:
            drops[f"drop the {_FEW} layers of least influence"] = [Drop(row.key) for row in least[:_FEW]]
    drops[f"drop the last layer, {full_name(rows[-1].key, numbers)}"] = [Drop(rows[-1].key)]
    if len(rows) > 3:
        drops["drop every second layer"] = [Drop(row.key) for row in rows[1::2]]
    return drops


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
