"""Edits in a few words, as they stand beside the loss, in the queue and in the journal.

The journal keeps an edit as Python prints it, since it is saved as text; here that is read again.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any

from torch import nn

from l2l_core import Edit
from l2l_core.edits import Entry, Inverse

Fields = Mapping[str, Any]


def edit_words(edit: Edit) -> str:
    """An edit in words, with layers as the person gave them: "+ before L005 like L004 (copy)", "− layers 2–4"."""
    if isinstance(edit, Inverse):
        return f"back from {_read(edit.what)}"
    name = type(edit).__name__
    if name not in _SAY or not is_dataclass(edit):
        return repr(edit)
    return _SAY[name]({field.name: getattr(edit, field.name) for field in fields(edit)})


def entry_words(entry: Entry, journal: Sequence[Entry]) -> str:
    """A line of the journal in words; what was undone or redone is looked up in the whole journal."""
    if entry.of < 0:
        return _read(entry.what)
    of = next((other for other in journal if other.number == entry.of), None)
    return f"{entry.kind} {_read(of.what)}" if of is not None else entry.what


def place_words(where: Any) -> str:
    """A layer, or layers that follow one another, as the person named them: "3", "L003", "decoder 2–4", "all"."""
    match where:
        case str(stack), slice() | range() | int():
            return f"{stack} {place_words(where[1])}".strip()  # a model that is its own stack has no name
        case str(first), str(last):
            return f"{first}–{last}"
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


def _insert(of: Fields) -> str:
    at = of["at"]
    before = f"before {at}" if isinstance(at, str) else f"at {place_words(at)}"
    if of["module"] is not None:
        return f"+ {place_words(of['module'])} {before}"
    like = f" like {place_words(of['like'])}" if of["like"] is not None else ""
    return f"+ {before}{like} ({of['init']})"


def _duplicate(of: Fields) -> str:
    how = "" if of["mode"] == "middle" else f", {of['mode']}"
    return f"2 × {_layers(of['layers'])}{how}"


def _replace(of: Fields) -> str:
    return f"{_layers(of['layer'])} becomes {place_words(of['module'])}"


def _interpolate(of: Fields) -> str:
    return f"{place_words(of['layer'])} ← {100 * of['weight']:.3g} % {place_words(of['other'])}"


def _layers(where: Any) -> str:
    """Positions need the word "layer" beside them, keys and names do not."""
    words = place_words(where)
    if words == "all":
        return "all layers"
    if isinstance(where, int):
        return f"layer {words}"
    return f"layers {words}" if isinstance(where, slice | range) else words


_SAY: dict[str, Callable[[Fields], str]] = {
    "Insert": _insert,
    "Duplicate": _duplicate,
    "Drop": lambda of: f"− {_layers(of['layers'])}",
    "Swap": lambda of: f"{place_words(of['a'])} ⇄ {place_words(of['b'])}",
    "Move": lambda of: f"{place_words(of['layer'])} to the place of {place_words(of['to'])}",
    "Replace": _replace,
    "Interpolate": _interpolate,
    "Freeze": lambda of: f"freeze {_layers(of['layers'])}",
    "Unfreeze": lambda of: f"unfreeze {_layers(of['layers'])}",
}


# -- reading what Python printed ---------------------------------------------------------------------------------------


class _Module:
    """A module of which only the printed form is left."""

    def __init__(self, name: str) -> None:
        self.name = name


def _read(printed: str) -> str:
    """Printed edits in words; as they are, if they cannot be read (a module may print itself in any way)."""
    try:
        statements = ast.parse(printed).body
        return "; ".join(_say(statement) for statement in statements)
    except (SyntaxError, ValueError, KeyError):
        return printed


def _say(statement: ast.stmt) -> str:
    match statement:
        case ast.Expr(ast.Call(ast.Name("Inverse"), [], [ast.keyword("what", ast.Constant(str(what))), *_])):
            return f"back from {_read(what)}"
        case ast.Expr(ast.Call(ast.Name(name), [], given)):
            return _SAY[name]({str(one.arg): _value(one.value) for one in given})
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
    return ast.literal_eval(node)
