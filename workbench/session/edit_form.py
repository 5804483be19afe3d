"""Form for edits, without widgets: fields of each kind, the edit that the answers define, and a preview.

Layers are identified by their keys, which are the same after edits that run earlier.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from l2l_core import Delink, Drop, Duplicate, Edit, Freeze, Insert, Interpolate, Loops, Move, Swap, Unfreeze, Unroll
from l2l_core.trace import format_bytes
from workbench.readings import LayerNumbers, format_prefixed, full_name
from workbench.session.edit_text import describe_layers
from workbench.session.snapshot_values import LayerRow, StepFlop

END = ""  # in place of a key: after the last layer
PREVIOUS = ""  # in place of a key: the layer before the new one

Answers = Mapping[str, Any]  # field -> value

FORM_FIELDS: Mapping[str, tuple[str, ...]] = {
    "Insert": ("at", "like", "init", "optimizer", "factor", "warmup"),
    "Duplicate": ("first", "last", "mode", "optimizer", "factor", "warmup"),
    "Drop": ("first", "last", "park"),
    "Swap": ("layer", "other"),
    "Move": ("layer", "to"),
    "Interpolate": ("layer", "other", "weight"),
    "Freeze": ("first", "last"),
    "Unfreeze": ("first", "last"),
    "Delink": ("first", "last", "optimizer", "factor", "warmup"),
    "Loops": ("count",),
    "Unroll": ("optimizer", "factor", "warmup"),
    "Replace": (),
}
NEEDS_CODE = "Replace takes a module, so it takes code: workbench.edit(Replace({key!r}, YourLayer())) in a cell."


def make_edit(kind: str, answers: Answers, stack: Sequence[LayerRow]) -> Edit:
    """Make the edit that the answers define.

    Args:
        kind: one of `FORM_FIELDS`.
        answers: values of the fields of that kind, such as keys of layers, `END` and `PREVIOUS`.
        stack: the layers of one stack, in order.

    Raises:
        ValueError: `kind` is "Replace", which needs code, or the edit refuses an answer.
    """
    if kind == "Replace":
        raise ValueError(NEEDS_CODE.format(key=stack[-1].key))
    return _EDIT_MAKERS[kind](answers, stack)


def _insert(answers: Answers, stack: Sequence[LayerRow]) -> Edit:
    at = answers["at"] if answers["at"] != END else (stack[0].stack or "", len(stack))
    # PREVIOUS is empty, and `Insert` takes None for it.
    return Insert(
        at,
        like=answers["like"] or None,
        init=answers["init"],
        optimizer=_optimizer_policy(answers),
        warmup=answers["warmup"],
    )


def _span(answers: Answers) -> str | tuple[str, str]:
    return answers["first"] if answers["first"] == answers["last"] else (answers["first"], answers["last"])


def _optimizer_policy(answers: Answers) -> Any:
    return answers["factor"] if answers["optimizer"] == "scaled" else answers["optimizer"]


_EDIT_MAKERS: Mapping[str, Callable[[Answers, Sequence[LayerRow]], Edit]] = {
    "Insert": _insert,
    "Duplicate": lambda of, _: Duplicate(_span(of), of["mode"], _optimizer_policy(of), of["warmup"]),
    "Drop": lambda of, _: Drop(_span(of), None if of["park"] == "free" else of["park"]),
    "Swap": lambda of, _: Swap(of["layer"], of["other"]),
    "Move": lambda of, _: Move(of["layer"], of["to"]),
    "Interpolate": lambda of, _: Interpolate(of["layer"], of["other"], of["weight"]),
    "Freeze": lambda of, _: Freeze(_span(of)),
    "Unfreeze": lambda of, _: Unfreeze(_span(of)),
    "Delink": lambda of, _: Delink(_span(of), _optimizer_policy(of), of["warmup"]),
    "Loops": lambda of, stack: Loops(of["count"], stack[0].stack),
    "Unroll": lambda of, stack: Unroll(stack[0].stack, optimizer=_optimizer_policy(of), warmup=of["warmup"]),
}


# -- preview -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class EditPreview:
    """Effect of an edit before it is applied.

    Attributes:
        effect: the effect, as a sentence.
        keeps_function: True if the model computes the same function afterwards.
        optimizer: effect on the optimizer state.
        layers, params, nbytes: change of the numbers of layers and weights, and of the weights' bytes; None if it depends
            on shared weights or on loops, which the rows of layers do not show.
        flop: operations of a step before and after; None if they are not known.
        flop_unknown: why not, in words; empty for edits that keep the number of layer calls.
    """

    effect: str
    keeps_function: bool
    optimizer: str
    layers: int | None
    params: int | None
    nbytes: int | None
    flop: tuple[int, int] | None = None
    flop_unknown: str = ""

    def facts(self, layers: Sequence[LayerRow]) -> tuple[str, ...]:
        """Return short descriptions of the changes; `layers` are all current layers."""
        nbytes = sum(row.nbytes for row in layers)
        same = "computes the same" if self.keeps_function else "computes something else"
        params = sum(row.num_params for row in layers)
        sizes: tuple[str, ...] = (f"{len(layers)} layers", f"{params:,} weights", format_bytes(nbytes))
        if self.layers is None or self.params is None or self.nbytes is None:
            sizes = ("a layer for every place",)
        elif self.layers:
            sizes = (
                f"{len(layers)} → {len(layers) + self.layers} layers",
                f"{params:,} → {params + self.params:,} weights",
                f"{format_bytes(nbytes)} → {format_bytes(nbytes + self.nbytes)}",
            )
        if self.flop is not None:
            before, after = (f"{format_prefixed(flop)}FLOP" for flop in self.flop)
            sizes += (f"{before} → {after} per step" if before != after else f"{before} per step",)
        elif self.flop_unknown:
            sizes += (f"FLOP not known: {self.flop_unknown}",)
        return (same, *sizes, f"optimizer state {self.optimizer}")


def preview_edit(
    edit: Edit, stack: Sequence[LayerRow], numbers: LayerNumbers, flop: StepFlop | None = None
) -> EditPreview:
    """Preview an edit from `make_edit` on the current stack.

    Args:
        edit: the edit.
        stack: the layers of its stack.
        numbers: numbers of all layers.
        flop: operations of the last step; None if they were not counted.
    """
    effect = _describe_effect(edit, stack, numbers)
    flops, unknown = _flop_change(edit, stack, flop)
    if isinstance(edit, Delink | Unroll):
        return EditPreview(effect, edit.preserves_function, edit.optimizer_policy, None, None, None, flops, unknown)
    sign, rows = _layer_delta(edit, stack)
    return EditPreview(
        effect,
        edit.preserves_function,
        edit.optimizer_policy,
        sign * len(rows),
        sign * sum(row.num_params for row in rows),
        sign * sum(row.nbytes for row in rows),
        flops,
        unknown,
    )


def _flop_change(edit: Edit, stack: Sequence[LayerRow], flop: StepFlop | None) -> tuple[tuple[int, int] | None, str]:
    """Return the operations of a step before and after an edit of the number of layer calls, or why none."""
    if not isinstance(edit, Insert | Duplicate | Drop | Loops | Unroll):
        return None, ""
    if flop is None:
        return None, "none counted since the last edit, or they depend on values"
    if {row.key for row in stack} - flop.layers.keys():
        return None, "none counted since the last edit"
    if isinstance(edit, Unroll):
        return (flop.total, flop.total), ""
    layers = {row.key: flop.layers[row.key] for row in stack}
    # All operations of a layer are then the same at every position, and in every loop.
    if not all(layer.receives_gradient for layer in layers.values()):
        return None, "the first layer's input gets no gradient, and another one may become the first"
    if isinstance(edit, Loops):
        now = {layer.calls for layer in layers.values()}
        if len(now) > 1 or not isinstance(edit.count, int):
            return None, "the layers do not run equally often"
        if not all(layer.loops_are_all for layer in layers.values()):
            return None, "the model's own code makes products in every loop, or may do so"
        once = sum(layer.flop for layer in layers.values()) // max(1, *now)
        return (flop.total, flop.total + (edit.count - max(now)) * once), ""
    if not all(layer.depth_is_all for layer in layers.values()):
        return None, "the model's own code makes products for every layer, or may do so"
    sign, rows = _layer_delta(edit, stack)
    if sign > 0 and any(row.frozen for row in rows):
        return None, "the copy of a frozen layer is trained, and costs more"
    return (flop.total, flop.total + sign * sum(layers[row.key].flop for row in rows)), ""


def _layer_delta(edit: Edit, stack: Sequence[LayerRow]) -> tuple[int, Sequence[LayerRow]]:
    """Return 1 and the originals of the added layers, or -1 and the removed layers."""
    if isinstance(edit, Insert):
        return 1, [_template_of(edit, stack)]
    if isinstance(edit, Duplicate | Drop):
        return (1 if isinstance(edit, Duplicate) else -1), _rows_of(edit.layers, stack)
    return 1, ()


def _template_of(edit: Insert, stack: Sequence[LayerRow]) -> LayerRow:
    """Return the layer that serves as template of an inserted one."""
    keys = [row.key for row in stack]
    if edit.like is not None:
        return stack[keys.index(str(edit.like))]
    at = keys.index(edit.at) if isinstance(edit.at, str) else len(stack)
    return stack[max(0, at - 1)]


def _rows_of(span: Any, stack: Sequence[LayerRow]) -> Sequence[LayerRow]:
    keys = [row.key for row in stack]
    first, last = span if isinstance(span, tuple) else (span, span)
    return stack[keys.index(first) : keys.index(last) + 1]


def _describe_effect(edit: Edit, stack: Sequence[LayerRow], numbers: LayerNumbers) -> str:
    def name(where: Any) -> str:
        return describe_layers(where, numbers)

    match edit:
        case Insert(at, _, _, init):
            where = f"in front of {name(at)}" if isinstance(at, str) else "after the last one"
            like = full_name(_template_of(edit, stack).key, numbers)
            return f"A new layer {where}, made like {like}: {_INIT_TEXT[init].format(like=like)}."
        case Duplicate(layers, mode):
            if not isinstance(layers, tuple):
                return f"A copy of {name(layers)}, {_MODE_TEXT['top'] if mode == 'top' else 'after it'}."
            return f"Copies of {name(layers)}, {_MODE_TEXT[mode]}."
        case Drop(layers, park):
            return f"{name(layers)} {'leave' if isinstance(layers, tuple) else 'leaves'} the stack; {_KEEP_TEXT[park]}."
        case Swap(a, b):
            return f"{name(a)} and {name(b)} change places."
        case Move(layer, to):
            return f"{name(layer)} moves to the place of {name(to)}."
        case Interpolate(layer, other, weight):
            return (
                f"{name(layer)} moves {100 * weight:.3g} % of the way towards {name(other)}, with its optimizer state."
            )
        case Freeze(layers):
            return f"{name(layers)} {'are' if isinstance(layers, tuple) else 'is'} no longer trained."
        case Unfreeze(layers):
            return f"{name(layers)} {'are' if isinstance(layers, tuple) else 'is'} trained again."
        case Loops(count, looped):
            return f"The model's forward runs the layers of {looped or 'the stack'} {count} times, one after another."
        case Unroll():
            return "Every further loop gets separate layers with copies of the weights, and the loop runs once."
        case Delink(layers):
            return f"Where {name(layers)} shares weights, every place gets a separate layer with a copy of them."
    raise AssertionError(f"the form has no {type(edit).__name__}")


_INIT_TEXT = {
    "identity": "its output is its input until it is trained",
    "copy": "it starts with a copy of the weights of {like}",
    "fresh": "it is initialised as in a new model",
    "interpolate": "it starts as the mean of the layers on both sides",
}
_MODE_TEXT = {
    "middle": "after them as a whole",
    "top": "after the last layer of the stack",
    "interleaved": "each after its original",
}
_KEEP_TEXT = {
    "memory": "weights and optimizer state wait in memory for an undo",
    "disk": "weights and optimizer state wait on disk for an undo",
    None: "the bytes are freed, and neither this edit nor those before can be undone",
}
