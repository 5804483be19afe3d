"""Edits in a few words, as they stand beside the loss, in the queue and in the journal.

The journal keeps an edit as Python prints it, since it is saved as text; here that is read again. Layers that are named by
their keys are called as everywhere, by number and key: the number that they had when the edit was carried out.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any

from torch import nn

from l2l_core import Edit
from l2l_core.edits import InverseEdit, JournalEntry
from workbench.readings import LayerNumbers, full_name, number_layers, span_name
from workbench.session.snapshot_values import LayerRow

Fields = Mapping[str, Any]
_NO_NUMBERS: LayerNumbers = {}


def describe_edit(edit: Edit, numbers: LayerNumbers = _NO_NUMBERS) -> str:
    """Say an edit in words, with layers as the person gave them: "+ before 5 · L005 (copy)", "− layers 2–4".

    Args:
        edit: one of the engine's, or of one's own.
        numbers: of the layers just before it; a key that is not among them stands alone.
    """
    if isinstance(edit, InverseEdit):
        return f"back from {_describe_printed(edit.what, numbers)}"
    name = type(edit).__name__
    if name not in _DESCRIBERS or not is_dataclass(edit):
        return repr(edit)
    return _DESCRIBERS[name]({field.name: getattr(edit, field.name) for field in fields(edit)}, numbers)


def describe_edits(edits: Sequence[Edit], what: str, layers: Sequence[LayerRow]) -> str:
    """Say edits that are carried out together as `edit_words` does, unless `what` says it; `layers` are those just before."""
    numbers = number_layers(layer.key for layer in layers)
    return what or "; ".join(describe_edit(edit, numbers) for edit in edits)


def describe_entry(entry: JournalEntry, journal: Sequence[JournalEntry]) -> str:
    """Say a line of the journal in words; what was undone or redone is looked up in the whole journal."""
    if entry.of < 0:
        return _describe_printed(entry.what, entry.places)
    of = next((other for other in journal if other.number == entry.of), None)
    return f"{entry.kind} {_describe_printed(of.what, of.places)}" if of is not None else entry.what


def describe_layers(where: Any, numbers: LayerNumbers = _NO_NUMBERS) -> str:
    """Name a layer, or layers that follow one another, as the person did: "3", "3 · L003", "decoder 2–4", "all"."""
    match where:
        case str(stack), slice() | range() | int():
            return f"{stack} {describe_layers(where[1])}".strip()  # a model that is its own stack has no name
        case str(first), str(last):
            return span_name(first, last, numbers)
        case str(key):
            return full_name(key, numbers)
        case slice() | range():
            return _describe_range(where)
        case nn.Module() | _PrintedModule():
            return type(where).__name__ if isinstance(where, nn.Module) else where.name
    return str(where)


def _describe_range(part: slice | range) -> str:
    first, stop = part.start, part.stop
    if first in (None, 0) and stop is None:
        return "all"
    last = "end" if stop is None else str(stop - 1) if stop > 0 else f"end{stop}"
    return str(first or 0) if last == str(first or 0) else f"{first or 0}–{last}"


# -- each kind ---------------------------------------------------------------------------------------------------------


def _describe_insert(fields: Fields, numbers: LayerNumbers) -> str:
    at = fields["at"]
    before = f"{'before' if isinstance(at, str) else 'at'} {describe_layers(at, numbers)}"
    if fields["module"] is not None:
        return f"+ {describe_layers(fields['module'])} {before}"
    like = f" like {describe_layers(fields['like'], numbers)}" if fields["like"] is not None else ""
    return f"+ {before}{like} ({fields['init']})"


def _describe_duplicate(fields: Fields, numbers: LayerNumbers) -> str:
    how = "" if fields["mode"] == "middle" else f", {fields['mode']}"
    return f"2 × {_layer_phrase(fields['layers'], numbers)}{how}"


def _describe_replace(fields: Fields, numbers: LayerNumbers) -> str:
    return f"{_layer_phrase(fields['layer'], numbers)} becomes {describe_layers(fields['module'])}"


def _describe_interpolate(fields: Fields, numbers: LayerNumbers) -> str:
    layer, other = (describe_layers(fields[name], numbers) for name in ("layer", "other"))
    return f"{layer} ← {100 * fields['weight']:.3g} % {other}"


def _describe_swap(fields: Fields, numbers: LayerNumbers) -> str:
    return f"{describe_layers(fields['a'], numbers)} ⇄ {describe_layers(fields['b'], numbers)}"


def _describe_move(fields: Fields, numbers: LayerNumbers) -> str:
    return f"{describe_layers(fields['layer'], numbers)} to the place of {describe_layers(fields['to'], numbers)}"


def _layer_phrase(where: Any, numbers: LayerNumbers) -> str:
    """Positions need the word "layer" beside them, keys and names do not."""
    words = describe_layers(where, numbers)
    if words == "all":
        return "all layers"
    if isinstance(where, int):
        return f"layer {words}"
    return f"layers {words}" if isinstance(where, slice | range) else words


_DESCRIBERS: dict[str, Callable[[Fields, LayerNumbers], str]] = {
    "Insert": _describe_insert,
    "Duplicate": _describe_duplicate,
    "Drop": lambda of, numbers: f"− {_layer_phrase(of['layers'], numbers)}",
    "Swap": _describe_swap,
    "Move": _describe_move,
    "Replace": _describe_replace,
    "Interpolate": _describe_interpolate,
    "Freeze": lambda of, numbers: f"freeze {_layer_phrase(of['layers'], numbers)}",
    "Unfreeze": lambda of, numbers: f"unfreeze {_layer_phrase(of['layers'], numbers)}",
    "Delink": lambda of, numbers: f"delink {_layer_phrase(of['layers'], numbers)}",
}


# -- reading what Python printed ---------------------------------------------------------------------------------------


class _PrintedModule:
    """A module of which only the printed form is left."""

    def __init__(self, name: str) -> None:
        self.name = name


def _describe_printed(printed: str, numbers: LayerNumbers) -> str:
    """Printed edits in words; as they are, if they cannot be read (a module may print itself in any way)."""
    try:
        statements = ast.parse(printed).body
        return "; ".join(_describe_statement(statement, numbers) for statement in statements)
    except (SyntaxError, ValueError, KeyError):
        return printed


def _describe_statement(statement: ast.stmt, numbers: LayerNumbers) -> str:
    match statement:
        case ast.Expr(ast.Call(ast.Name("Inverse"), [], [ast.keyword("what", ast.Constant(str(what))), *_])):
            return f"back from {_describe_printed(what, numbers)}"
        case ast.Expr(ast.Call(ast.Name(name), [], given)):
            return _DESCRIBERS[name]({str(one.arg): _literal_value(one.value) for one in given}, numbers)
    raise ValueError("no edit")


def _literal_value(node: ast.expr) -> Any:
    match node:
        case ast.Call(ast.Name("slice"), bounds):
            return slice(*map(_literal_value, bounds))
        case ast.Call(ast.Name("range"), bounds):
            return range(*map(_literal_value, bounds))
        case ast.Call(ast.Name(name)):
            return _PrintedModule(name)
        case ast.Tuple(parts):
            return tuple(map(_literal_value, parts))
    return ast.literal_eval(node)  # never `eval`: a journal may come out of a file
