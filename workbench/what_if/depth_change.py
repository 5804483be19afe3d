"""Edits that change the depth of a model, with a description and a line of code for each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from l2l_core import Drop, Duplicate, Edit, Insert
from workbench.session import LayerRow


@dataclass(frozen=True)
class DepthEdit:
    """A group of edits that leads to another depth.

    Attributes:
        title: label of a button.
        description: one sentence about the effect.
        code: the edits as a line of code for a notebook cell.
        edits: the edits, to be applied as a group.
    """

    title: str
    description: str
    code: str
    edits: Sequence[Edit]


def depth_edits(layers: Sequence[LayerRow], depth: int) -> tuple[DepthEdit, ...]:
    """Return the edits that add layers after the last one, or drop the last ones, until there are `depth`.

    If the model has several stacks, the last one is edited. Returns () if the model has that depth already.

    Raises:
        ValueError: the layers are in no stack, or the last stack has too few of them.
    """
    more = depth - len(layers)
    if not more:
        return ()
    names = list(dict.fromkeys(row.stack for row in layers if row.stack is not None))
    if not names:
        raise ValueError("the layers are in no ModuleList or Sequential, so no edit can add or drop any")
    size = sum(row.stack == names[-1] for row in layers)
    stack = _EditedStack(names[-1] if len(names) > 1 else None, size)
    if more > 0:
        return _insert(stack, more), _duplicate(stack, more)
    if size + more < 1:
        raise ValueError(
            f"{-more} layers fewer: {f'the last stack, {names[-1]},' if len(names) > 1 else 'the stack'} has {size} and one "
            "must stay; use the edits panel to drop layers of other stacks"
        )
    return (_drop(stack, -more),)


@dataclass(frozen=True)
class _EditedStack:
    """The stack to edit; its name is None if the model has only one."""

    name: str | None
    size: int

    @property
    def description(self) -> str:
        return f" of {self.name}" if self.name is not None else ""

    def place_code(self, place: str) -> str:
        """Return a position in the stack as code."""
        return place if self.name is None else f"({self.name!r}, {place})"


def _insert(stack: _EditedStack, more: int) -> DepthEdit:
    # Each position is one further, because an edit of a group sees the stack as left by the edits before it.
    where = range(stack.size, stack.size + more)
    one = f"Insert({stack.place_code(str(stack.size))})"
    code = one if more == 1 else f"*(Insert({stack.place_code('at')}) for at in range({where.start}, {where.stop}))"
    return DepthEdit(
        f"Insert {_count_layers(more)}",
        f"{_count_layers(more)} after the last one{stack.description}, initially with output equal to input: "
        "the model computes the same.",
        f"workbench.edit({code})",
        [Insert(at if stack.name is None else (stack.name, at)) for at in where],
    )


def _duplicate(stack: _EditedStack, more: int) -> DepthEdit:
    """Double the stack as often as possible, then duplicate the last layers."""
    size, end, spans = stack.size, stack.size + more, []
    while end - size >= size:
        spans.append(slice(None))  # all layers that exist by then
        size *= 2
    doublings, code = len(spans), []
    if doublings:
        whole = f"Duplicate({stack.place_code('slice(None)') if stack.name else ''})"
        code.append(whole if doublings == 1 else f"*[{whole}] * {doublings}")
    if end > size:
        spans.append(slice(2 * size - end, size))
        code.append(f'Duplicate({stack.place_code(f"slice({2 * size - end}, {size})")}, "top")')
    copied = (
        f"the last {_count_layers(more)}"
        if more <= stack.size
        else f"all layers, until there are {_count_layers(more)} more,"
    )
    return DepthEdit(
        f"Duplicate {_count_layers(more)}",
        f"Copies of {copied} after the last one{stack.description}, with their optimizer state: "
        "the model computes something else.",
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
        f"{last}{stack.description} {'leaves' if fewer == 1 else 'leave'} the stack; "
        "weights and optimizer state stay in memory for undo.",
        f"workbench.edit(Drop({stack.place_code(f'slice({span.start}, {span.stop})')}))",
        [Drop(span if stack.name is None else (stack.name, span))],
    )


def _count_layers(number: int) -> str:
    return "1 layer" if number == 1 else f"{number:,} layers"
