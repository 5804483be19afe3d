"""Short descriptions of edits in words, before they are applied and afterwards.

The journal is saved as text and holds the `repr` of an edit, which is parsed here. Layers given by their keys are named by
number and key, with the number that they had when the edit was applied.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from torch import nn

from l2l_core import Edit
from l2l_core.edits import InverseEdit, JournalEntry
from workbench.readings import LayerNumbers, full_name, number_layers, short_name
from workbench.session.snapshot_values import LayerRow

Fields = Mapping[str, Any]
_NO_NUMBERS: LayerNumbers = {}


class _Telling(NamedTuple):
    """Context of an edit: numbers and count of layers just before, whether it was applied, names of loops."""

    numbers: LayerNumbers = _NO_NUMBERS
    count: int | None = None
    is_done: bool = False
    loops: Sequence[str] = ()


def describe_edit(edit: Edit, numbers: LayerNumbers = _NO_NUMBERS, count: int | None = None) -> str:
    """Describe an edit to be made, with layers as the user gave them: "drop layers 2 to 4".

    Args:
        edit: an edit of the engine, or of the user.
        numbers: numbers of the layers just before the edit; a key without a number is shown alone.
        count: number of layers just before the edit, if known.
    """
    return _describe_edit(edit, _Telling(numbers, count))


def describe_edits(edits: Sequence[Edit], what: str, layers: Sequence[LayerRow], is_done: bool = False) -> str:
    """Describe edits that are applied as one group, unless `what` is given; `layers` are those just before."""
    numbers = number_layers(layer.key for layer in layers)
    telling = _Telling(numbers, len(numbers) if len(edits) == 1 else None, is_done)
    return what or "; ".join(_describe_edit(edit, telling) for edit in edits)


def _describe_edit(edit: Edit, telling: _Telling) -> str:
    if isinstance(edit, InverseEdit):
        return f"back from {_describe_printed(edit.what, telling)}"
    try:
        return _describe(type(edit).__name__, vars(edit), telling)
    except KeyError:  # a class of the user
        return repr(edit)


def describe_entry(entry: JournalEntry, journal: Sequence[JournalEntry]) -> str:
    """Describe what a journal entry did; the target of an undo or redo is found in the whole journal."""
    if entry.of < 0:
        return _describe_printed(entry.what, _telling_of(entry))
    target = next((other for other in journal if other.number == entry.of), None)
    if target is None:
        return entry.what
    return f"{'undid' if entry.kind == 'undo' else 'redid'}: {_describe_printed(target.what, _telling_of(target))}"


def _telling_of(entry: JournalEntry) -> _Telling:
    """Return the numbers of an entry, and the count before it if it is a single insertion."""
    is_insertion = entry.what.startswith("Insert(") and "; " not in entry.what
    return _Telling(entry.places, entry.layers - 1 if is_insertion else None, is_done=True, loops=[*entry.loops])


def describe_fork(name: str) -> str:
    """Describe the change that began a branch."""
    return f"forked {name}"


def describe_layers(where: Any, numbers: LayerNumbers = _NO_NUMBERS) -> str:
    """Name a layer or consecutive layers as the user did: "3", "3 · L003", "decoder 2 to 4", "all"."""
    match where:
        case str(stack), slice() | range() | int():
            return f"{stack} {describe_layers(where[1])}".strip()  # the name is empty if the model itself is the stack
        case str(first), str(last):
            return f"{short_name(first, numbers)} to {short_name(last, numbers)}"
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
    last = "the last" if stop is None else str(stop - 1) if stop > 0 else f"{-stop} before the last"
    return str(first or 0) if last == str(first or 0) else f"{first or 0} to {last}"


# -- kinds of edits ----------------------------------------------------------------------------------------------------


_VERBS: Mapping[str, tuple[str, str]] = {  # to do, and done
    "Insert": ("insert", "inserted"),
    "Duplicate": ("duplicate", "duplicated"),
    "Drop": ("drop", "dropped"),
    "Swap": ("swap", "swapped"),
    "Move": ("move", "moved"),
    "Replace": ("replace", "replaced"),
    "Interpolate": ("mix", "mixed"),
    "Freeze": ("freeze", "froze"),
    "Unfreeze": ("unfreeze", "unfroze"),
    "Delink": ("delink", "delinked"),
    "Loops": ("loop", "looped"),
    "Unroll": ("unroll", "unrolled"),
}


def _describe(kind: str, fields: Fields, telling: _Telling) -> str:
    """Describe an edit from the name of its class and its fields.

    Raises:
        KeyError: an unknown class or a missing field.
    """
    return f"{_VERBS[kind][telling.is_done]} {_describe_object(kind, fields, telling)}"


def _describe_object(kind: str, fields: Fields, telling: _Telling) -> str:
    def name(field: str) -> str:
        return describe_layers(fields[field], telling.numbers)

    match kind:
        case "Insert":
            place = _describe_place(fields["at"], telling)
            if fields["module"] is not None:
                return f"{name('module')} {place}"
            like = f" like {name('like')}" if fields["like"] is not None else ""
            return f"{place}{like} ({fields['init']})"
        case "Duplicate":
            mode = "" if fields["mode"] == "middle" else f", {fields['mode']}"
            return f"{_layer_phrase(fields['layers'], telling.numbers)}{mode}"
        case "Swap":
            return f"{name('a')} and {name('b')}"
        case "Move":
            return f"{name('layer')} to the place of {name('to')}"
        case "Replace":
            return f"{_layer_phrase(fields['layer'], telling.numbers)} by {name('module')}"
        case "Loops":
            number = ", ".join(telling.loops) or fields["attribute"]
            return f"{fields['stack'] or 'the stack'} {fields['count']} times{f' ({number})' if number else ''}"
        case "Unroll":
            return f"the loops of {fields['stack'] or 'the stack'} into layers"
        case "Interpolate":
            return f"{100 * fields['weight']:.3g} % of {name('other')} into {name('layer')}"
        case _:
            return _layer_phrase(fields["layers"], telling.numbers)


def _describe_place(where: Any, telling: _Telling) -> str:
    """Return the place of a new layer; a position after all layers is that of the last one."""
    position = where[1] if isinstance(where, tuple) else where
    if position == telling.count:
        return "after the last layer"
    return f"{'before' if isinstance(where, str) else 'at'} {describe_layers(where, telling.numbers)}"


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


def _describe_printed(printed: str, telling: _Telling) -> str:
    """Describe edits from their `repr`; return it unchanged if it cannot be parsed, as with some modules."""
    try:
        statements = ast.parse(printed).body
        return "; ".join(_describe_statement(statement, telling) for statement in statements)
    except (SyntaxError, ValueError, KeyError):
        return printed


def _describe_statement(statement: ast.stmt, telling: _Telling) -> str:
    match statement:
        case ast.Expr(ast.Call(ast.Name("Inverse"), [], [ast.keyword("what", ast.Constant(str(what))), *_])):
            return f"back from {_describe_printed(what, telling)}"
        case ast.Expr(ast.Call(ast.Name(name), [], keywords)):
            return _describe(name, {str(one.arg): _literal_value(one.value) for one in keywords}, telling)
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
