"""Short descriptions of edits, for the loss chart, the queue and the journal.

The journal is saved as text and holds the `repr` of an edit, which is parsed here. Layers given by their keys are named by
number and key, with the number that they had when the edit was applied.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from l2l_core import Edit
from l2l_core.edits import InverseEdit, JournalEntry
from workbench.readings import LayerNumbers, full_name, number_layers, span_name
from workbench.session.snapshot_values import LayerRow

Fields = Mapping[str, Any]
_NO_NUMBERS: LayerNumbers = {}


def describe_edit(edit: Edit, numbers: LayerNumbers = _NO_NUMBERS) -> str:
    """Describe an edit, with layers as the user gave them: "+ before 5 · L005 (copy)", "− layers 2–4".

    Args:
        edit: an edit of the engine, or of the user.
        numbers: numbers of the layers just before the edit; a key without a number is shown alone.
    """
    if isinstance(edit, InverseEdit):
        return f"back from {_describe_printed(edit.what, numbers)}"
    try:
        return _describe(type(edit).__name__, vars(edit), numbers)
    except KeyError:  # a class of the user
        return repr(edit)


def describe_edits(edits: Sequence[Edit], what: str, layers: Sequence[LayerRow]) -> str:
    """Describe edits that are applied as one group, unless `what` is given; `layers` are those just before."""
    numbers = number_layers(layer.key for layer in layers)
    return what or "; ".join(describe_edit(edit, numbers) for edit in edits)


def describe_entry(entry: JournalEntry, journal: Sequence[JournalEntry]) -> str:
    """Describe a journal entry; the target of an undo or redo is found in the whole journal."""
    if entry.of < 0:
        return _describe_printed(entry.what, entry.places)
    target = next((other for other in journal if other.number == entry.of), None)
    return f"{entry.kind} {_describe_printed(target.what, target.places)}" if target is not None else entry.what


def describe_layers(where: Any, numbers: LayerNumbers = _NO_NUMBERS) -> str:
    """Name a layer or consecutive layers as the user did: "3", "3 · L003", "decoder 2–4", "all"."""
    match where:
        case str(stack), slice() | range() | int():
            return f"{stack} {describe_layers(where[1])}".strip()  # the name is empty if the model itself is the stack
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


# -- kinds of edits ----------------------------------------------------------------------------------------------------


def _describe(kind: str, fields: Fields, numbers: LayerNumbers) -> str:
    """Describe an edit from the name of its class and its fields.

    Raises:
        KeyError: an unknown class or a missing field.
    """

    def name(field: str) -> str:
        return describe_layers(fields[field], numbers)

    match kind:
        case "Insert":
            place = f"{'before' if isinstance(fields['at'], str) else 'at'} {name('at')}"
            if fields["module"] is not None:
                return f"+ {name('module')} {place}"
            like = f" like {name('like')}" if fields["like"] is not None else ""
            return f"+ {place}{like} ({fields['init']})"
        case "Duplicate":
            mode = "" if fields["mode"] == "middle" else f", {fields['mode']}"
            return f"2 × {_layer_phrase(fields['layers'], numbers)}{mode}"
        case "Drop":
            return f"− {_layer_phrase(fields['layers'], numbers)}"
        case "Swap":
            return f"{name('a')} ⇄ {name('b')}"
        case "Move":
            return f"{name('layer')} to the place of {name('to')}"
        case "Replace":
            return f"{_layer_phrase(fields['layer'], numbers)} becomes {name('module')}"
        case "Interpolate":
            return f"{name('layer')} ← {100 * fields['weight']:.3g} % {name('other')}"
        case "Freeze" | "Unfreeze" | "Delink":
            return f"{kind.lower()} {_layer_phrase(fields['layers'], numbers)}"
    raise KeyError(kind)


def _layer_phrase(where: Any, numbers: LayerNumbers) -> str:
    """Name layers, with the word "layer" before positions; keys and names need no such word."""
    words = describe_layers(where, numbers)
    if words == "all":
        return "all layers"
    if isinstance(where, int):
        return f"layer {words}"
    return f"layers {words}" if isinstance(where, slice | range) else words


# -- parsing the repr of edits -----------------------------------------------------------------------------------------


class _PrintedModule:
    """Stand-in for a module whose class name alone is in the text."""

    def __init__(self, name: str) -> None:
        self.name = name


def _describe_printed(printed: str, numbers: LayerNumbers) -> str:
    """Describe edits from their `repr`; return it unchanged if it cannot be parsed, as with some modules."""
    try:
        statements = ast.parse(printed).body
        return "; ".join(_describe_statement(statement, numbers) for statement in statements)
    except (SyntaxError, ValueError, KeyError):
        return printed


def _describe_statement(statement: ast.stmt, numbers: LayerNumbers) -> str:
    match statement:
        case ast.Expr(ast.Call(ast.Name("Inverse"), [], [ast.keyword("what", ast.Constant(str(what))), *_])):
            return f"back from {_describe_printed(what, numbers)}"
        case ast.Expr(ast.Call(ast.Name(name), [], keywords)):
            return _describe(name, {str(one.arg): _literal_value(one.value) for one in keywords}, numbers)
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
    return ast.literal_eval(node)  # never `eval`: a journal may be read from a file
