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
from l2l_core.edits import Entry, Inverse
from workbench.readings import Numbers, full_name, number_layers, span_name
from workbench.session.values import LayerRow

Fields = Mapping[str, Any]
_NONE: Numbers = {}


def edit_words(edit: Edit, numbers: Numbers = _NONE) -> str:
    """Say an edit in words, with layers as the person gave them: "+ before 5 · L005 (copy)", "− layers 2–4".

    Args:
        edit: one of the engine's, or of one's own.
        numbers: of the layers just before it; a key that is not among them stands alone.
    """
    if isinstance(edit, Inverse):
        return f"back from {_read(edit.what, numbers)}"
    name = type(edit).__name__
    if name not in _SAY or not is_dataclass(edit):
        return repr(edit)
    return _SAY[name]({field.name: getattr(edit, field.name) for field in fields(edit)}, numbers)


def group_words(edits: Sequence[Edit], what: str, layers: Sequence[LayerRow]) -> str:
    """Say edits that are carried out together as `edit_words` does, unless `what` says it; `layers` are those just before."""
    numbers = number_layers(layer.key for layer in layers)
    return what or "; ".join(edit_words(edit, numbers) for edit in edits)


def entry_words(entry: Entry, journal: Sequence[Entry]) -> str:
    """Say a line of the journal in words; what was undone or redone is looked up in the whole journal."""
    if entry.of < 0:
        return _read(entry.what, entry.places)
    of = next((other for other in journal if other.number == entry.of), None)
    return f"{entry.kind} {_read(of.what, of.places)}" if of is not None else entry.what


def place_words(where: Any, numbers: Numbers = _NONE) -> str:
    """Name a layer, or layers that follow one another, as the person did: "3", "3 · L003", "decoder 2–4", "all"."""
    match where:
        case str(stack), slice() | range() | int():
            return f"{stack} {place_words(where[1])}".strip()  # a model that is its own stack has no name
        case str(first), str(last):
            return span_name(first, last, numbers)
        case str(key):
            return full_name(key, numbers)
        case slice() | range():
            return _range_words(where)
        case nn.Module() | _Module():
            return type(where).__name__ if isinstance(where, nn.Module) else where.name
    return str(where)


def _range_words(part: slice | range) -> str:
    first, stop = part.start, part.stop
    if first in (None, 0) and stop is None:
        return "all"
    last = "end" if stop is None else str(stop - 1) if stop > 0 else f"end{stop}"
    return str(first or 0) if last == str(first or 0) else f"{first or 0}–{last}"


# -- each kind ---------------------------------------------------------------------------------------------------------


def _insert(of: Fields, numbers: Numbers) -> str:
    at = of["at"]
    before = f"{'before' if isinstance(at, str) else 'at'} {place_words(at, numbers)}"
    if of["module"] is not None:
        return f"+ {place_words(of['module'])} {before}"
    like = f" like {place_words(of['like'], numbers)}" if of["like"] is not None else ""
    return f"+ {before}{like} ({of['init']})"


def _duplicate(of: Fields, numbers: Numbers) -> str:
    how = "" if of["mode"] == "middle" else f", {of['mode']}"
    return f"2 × {_layers(of['layers'], numbers)}{how}"


def _replace(of: Fields, numbers: Numbers) -> str:
    return f"{_layers(of['layer'], numbers)} becomes {place_words(of['module'])}"


def _interpolate(of: Fields, numbers: Numbers) -> str:
    layer, other = (place_words(of[name], numbers) for name in ("layer", "other"))
    return f"{layer} ← {100 * of['weight']:.3g} % {other}"


def _swap(of: Fields, numbers: Numbers) -> str:
    return f"{place_words(of['a'], numbers)} ⇄ {place_words(of['b'], numbers)}"


def _move(of: Fields, numbers: Numbers) -> str:
    return f"{place_words(of['layer'], numbers)} to the place of {place_words(of['to'], numbers)}"


def _layers(where: Any, numbers: Numbers) -> str:
    """Positions need the word "layer" beside them, keys and names do not."""
    words = place_words(where, numbers)
    if words == "all":
        return "all layers"
    if isinstance(where, int):
        return f"layer {words}"
    return f"layers {words}" if isinstance(where, slice | range) else words


_SAY: dict[str, Callable[[Fields, Numbers], str]] = {
    "Insert": _insert,
    "Duplicate": _duplicate,
    "Drop": lambda of, numbers: f"− {_layers(of['layers'], numbers)}",
    "Swap": _swap,
    "Move": _move,
    "Replace": _replace,
    "Interpolate": _interpolate,
    "Freeze": lambda of, numbers: f"freeze {_layers(of['layers'], numbers)}",
    "Unfreeze": lambda of, numbers: f"unfreeze {_layers(of['layers'], numbers)}",
    "Delink": lambda of, numbers: f"delink {_layers(of['layers'], numbers)}",
}


# -- reading what Python printed ---------------------------------------------------------------------------------------


class _Module:
    """A module of which only the printed form is left."""

    def __init__(self, name: str) -> None:
        self.name = name


def _read(printed: str, numbers: Numbers) -> str:
    """Printed edits in words; as they are, if they cannot be read (a module may print itself in any way)."""
    try:
        statements = ast.parse(printed).body
        return "; ".join(_say(statement, numbers) for statement in statements)
    except (SyntaxError, ValueError, KeyError):
        return printed


def _say(statement: ast.stmt, numbers: Numbers) -> str:
    match statement:
        case ast.Expr(ast.Call(ast.Name("Inverse"), [], [ast.keyword("what", ast.Constant(str(what))), *_])):
            return f"back from {_read(what, numbers)}"
        case ast.Expr(ast.Call(ast.Name(name), [], given)):
            return _SAY[name]({str(one.arg): _value(one.value) for one in given}, numbers)
    raise ValueError("no edit")


def _value(node: ast.expr) -> Any:
    match node:
        case ast.Call(ast.Name("slice"), bounds):
            return slice(*map(_value, bounds))
        case ast.Call(ast.Name("range"), bounds):
            return range(*map(_value, bounds))
        case ast.Call(ast.Name(name)):
            return _Module(name)
        case ast.Tuple(parts):
            return tuple(map(_value, parts))
    return ast.literal_eval(node)  # never `eval`: a journal may come out of a file
