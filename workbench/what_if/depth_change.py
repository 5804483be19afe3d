"""The edits that a number of layers means: which layers would come or go, in words and as a line of code."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from l2l_core import Drop, Duplicate, Edit, Insert
from workbench.session import LayerRow


@dataclass(frozen=True)
class DepthEdit:
    """One way to another depth.

    Attributes:
        title: for a button.
        words: what it does, a sentence.
        code: the same for a cell.
        edits: carried out together.
    """

    title: str
    description: str
    code: str
    edits: Sequence[Edit]


def depth_edits(layers: Sequence[LayerRow], depth: int) -> tuple[DepthEdit, ...]:
    """List ways from these layers to `depth`: new ones come after the last, or the last ones go; none if it is the depth.

    Of several stacks the last one is edited.

    Raises:
        ValueError: the layers are in no stack, or the last stack has too few of them.
    """
    more = depth - len(layers)
    if not more:
        return ()
    names = list(dict.fromkeys(row.stack for row in layers if row.stack is not None))
    if not names:
        raise ValueError("these layers are in no ModuleList or Sequential, so no edit can add or drop any")
    size = sum(row.stack == names[-1] for row in layers)
    stack = _EditedStack(names[-1] if len(names) > 1 else None, size)
    if more > 0:
        return _insert(stack, more), _duplicate(stack, more)
    if size + more < 1:
        raise ValueError(
            f"{-more} layers fewer: {f'the last stack, {names[-1]},' if len(names) > 1 else 'the stack'} has {size} and one "
            "must stay; the panel of edits drops layers anywhere"
        )
    return (_drop(stack, -more),)


@dataclass(frozen=True)
class _EditedStack:
    """Where it happens; the name is needed only if there are several."""

    name: str | None
    size: int

    @property
    def description(self) -> str:
        return f" of {self.name}" if self.name is not None else ""

    def place_code(self, place: str) -> str:
        """A place in it as code."""
        return place if self.name is None else f"({self.name!r}, {place})"


def _insert(stack: _EditedStack, more: int) -> DepthEdit:
    # One place further each time: edits of a group see what those before them have done.
    where = range(stack.size, stack.size + more)
    one = f"Insert({stack.place_code(str(stack.size))})"
    code = one if more == 1 else f"*(Insert({stack.place_code('at')}) for at in range({where.start}, {where.stop}))"
    return DepthEdit(
        f"Insert {_count_layers(more)}",
        f"{_count_layers(more)} after the last one{stack.description}, which {'passes its' if more == 1 else 'pass their'} input on until "
        "something is learned: the model computes the same.",
        f"workbench.edit({code})",
        [Insert(at if stack.name is None else (stack.name, at)) for at in where],
    )


def _duplicate(stack: _EditedStack, more: int) -> DepthEdit:
    """The whole stack once more as long as that is not too much, then the last layers."""
    now, end, spans = stack.size, stack.size + more, []
    while end - now >= now:
        spans.append(slice(None))  # all layers that there are by then, so each of these doubles the stack
        now *= 2
    doublings = len(spans)
    if end > now:
        spans.append(slice(2 * now - end, now))
    code = [f"Duplicate({stack.place_code('slice(None)') if stack.name else ''})"] if doublings == 1 else []
    code += (
        [f"*[Duplicate({stack.place_code('slice(None)') if stack.name else ''})] * {doublings}"]
        if doublings > 1
        else []
    )
    code += [f'Duplicate({stack.place_code(f"slice({2 * now - end}, {now})")}, "top")'] if end > now else []
    what = (
        f"the last {_count_layers(more)}"
        if more <= stack.size
        else f"all layers, until there are {_count_layers(more)} more,"
    )
    return DepthEdit(
        f"Duplicate {_count_layers(more)}",
        f"Copies of {what} after the last one{stack.description}, with their optimizer state: the model computes something else.",
        f"workbench.edit({', '.join(code)})",
        [
            Duplicate(span if stack.name is None else (stack.name, span), "middle" if span == slice(None) else "top")
            for span in spans
        ],
    )


def _drop(stack: _EditedStack, fewer: int) -> DepthEdit:
    span = slice(stack.size - fewer, stack.size)
    last = "The last layer" if fewer == 1 else f"The last {fewer} layers"
    return DepthEdit(
        f"Drop {_count_layers(fewer)}",
        f"{last}{stack.description} {'leaves' if fewer == 1 else 'leave'} the stack; weights and optimizer state wait in memory for "
        "an undo.",
        f"workbench.edit(Drop({stack.place_code(f'slice({span.start}, {span.stop})')}))",
        [Drop(span if stack.name is None else (stack.name, span))],
    )


def _count_layers(number: int) -> str:
    return "1 layer" if number == 1 else f"{number:,} layers"
