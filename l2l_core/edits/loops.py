"""Edits and a schedule for looped stacks, which the model's forward runs several times.

The number of loops is found by observation (`surgery/loop_numbers.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from l2l_core.edits.commands import SetLoopsCommand
from l2l_core.edits.edit import Edit, LayerMakingEdit, RunCommand, inherit_state, restack_command
from l2l_core.edits.editor import Editor
from l2l_core.edits.optimizer_state import Policy
from l2l_core.edits.schedules import (
    PerStep,
    SchedulableRelay,
    Schedule,
    check_int,
    check_step_values,
    stack_of,
    value_at,
)
from l2l_core.eps.blocks import Unit
from l2l_core.model import Stack, deep_copy
from l2l_core.surgery import RecordedCalls, different_arguments, find_loop_numbers, record_calls


@dataclass(frozen=True)
class Loops(Edit):
    """Change how often the model's forward runs a stack.

    The number is an attribute of a module around the stack, or a field of its configuration, that the forward reads. It is found
    by forwards on rows of the last batch: numbers equal to the present count are changed one at a time, and calls are counted.
    Weights and optimizer state do not change. Gradients are sums over the loops, so they change with their number.

    Args:
        count: the number of loops.
        stack: dotted name of the container, if there are several.
        attribute: dotted name of the number, as ``"n_loops"`` or ``"config.n_loops"``, if it cannot be found.

    Example:
        >>> from l2l_core import Loops
        >>> with Relay(Looped(), device="cpu", loss=nn.CrossEntropyLoss()) as looped:
        ...     example = looped.expect(batch)
        ...     inverse = looped.apply(Loops(3))
        ...     looped.loops
        {'layers': 3}
    """

    count: int
    stack: str | None = None
    attribute: str | None = None
    moves_layers = False

    def __post_init__(self) -> None:
        check_int("the number of loops", self.count, 1)

    def execute(self, editor: Editor, run: RunCommand) -> None:
        stack, call = _stack_and_call(self, editor, self.stack)
        _, names = find_loop_numbers(editor.registry.model, stack, call, self.count, self.attribute)
        run(SetLoopsCommand(editor.registry.first_name(stack), dict.fromkeys(names, self.count)))


@dataclass(frozen=True)
class Unroll(LayerMakingEdit):
    """Replace the loops of a stack by layers: k layers that run n times become n times k.

    The layers of every further loop are copies. The model computes the same, or the edit is refused: all layer calls on rows of
    the last batch are compared to the bit. `Delink` is the counterpart for one layer in several places.

    Args:
        stack, attribute: as in `Loops`.
        optimizer: new state of all layers, as in `Delink`. Gradients of n loops were added up, so 1/n is their size from now on.
        warmup: updates over which the learning rate of the copies rises to that of their group.

    Example:
        >>> from l2l_core import Unroll
        >>> with Relay(Looped(), device="cpu", loss=nn.CrossEntropyLoss()) as looped:
        ...     example = looped.expect(batch)
        ...     inverse = looped.apply(Unroll())
        ...     [layer.key for layer in looped.stack]  # two layers, run twice
        ['L000', 'L001', 'L002', 'L003']
    """

    stack: str | None = None
    attribute: str | None = None
    optimizer: Policy = "copy"
    warmup: int = 0
    preserves_function = True

    def execute(self, editor: Editor, run: RunCommand) -> None:
        stack, call = _stack_and_call(self, editor, self.stack)
        model, name = editor.registry.model, editor.registry.first_name(stack)
        loops, names = find_loop_numbers(model, stack, call, 1, self.attribute)
        if loops == 1:
            raise ValueError(
                f"Unroll: the forward runs the layers of {stack.title} once, so there is no loop to replace"
            )
        copies = "".join(f"Duplicate(slice(0, {len(stack)}), 'top'), " for _ in range(loops - 1))
        editor.store.storage.require_all_in_memory(
            "Unroll compares the model before and after, and this",
            f"apply({copies}Loops(1)) makes such layers without it",
        )
        units, before = editor.registry.units_of(stack), record_calls(model, call, stack)
        after, like = list(units), dict[Unit, Unit]()
        with editor.load_layers(units):
            for unit in units * (loops - 1):
                # Not `copy_module`, which unfreezes the copy of a frozen layer.
                after.append(self.make_layer(editor, deep_copy(unit.module), unit))
                like[after[-1]] = unit
        run(SetLoopsCommand(name, dict.fromkeys(names, loops)))  # known as loops, they do not follow the depth
        run(restack_command(editor, stack, after, like))
        run(SetLoopsCommand(name, dict.fromkeys(names, 1)))
        _check_equal(before, record_calls(model, call, editor.registry.find_stack(name)), names)
        for unit in units if self.optimizer != "copy" else ():
            inherit_state(unit, unit.params, self.optimizer, editor, run)


def _stack_and_call(edit: Edit, editor: Editor, name: str | None) -> tuple[Stack, Callable[[], Any]]:
    where = slice(None) if name is None else (name, slice(None))
    call = editor.layer_factory.run_model
    if call is None:
        raise ValueError(
            f"{edit!r}: how often layers run is observed in a forward: make a step first, or give an example of a batch "
            "(relay.expect(batch))"
        )
    return editor.registry.resolver.span(where)[0], call


def _check_equal(before: RecordedCalls, after: RecordedCalls, names: Sequence[str]) -> None:
    """Refuse an unrolled stack whose calls, or whose loss, differ from those of the loops."""
    ran, now = len(before.layers), len(after.layers)
    what = f"runs {now} layers in place of {ran}" if now != ran else ""
    for i, pair in enumerate(zip(before.arguments, after.arguments, strict=False)):
        if not what and (unlike := different_arguments(*pair)):
            what = f"gives layer {i} another argument {', '.join(unlike)} than the loops did"
    if not what and not torch.equal(before.output, after.output):
        what = f"computes the loss {float(after.output):.9g} in place of {float(before.output):.9g}"
    if what:
        raise ValueError(
            f"Unroll: with {', '.join(names)} = 1 and a layer for every layer call, the model {what}. Its own code does "
            "something once per loop, or with the number of loops, which layers alone would not do. Put that into a layer's "
            "forward, or use Duplicate and Loops(1), which do not keep the function"
        )


@dataclass(frozen=True)
class Looping(Schedule):
    """Change the number of loops of a stack with the step.

    Args:
        loops: number of loops: an integer, a mapping from the first step of each value, as ``{0: 2, 100: 3, 200: 4}``, or a
            function of the number of finished steps.
        stack, attribute: as in `Loops`.

    Example:
        >>> from l2l_core import Looping
        >>> schedule = Looping({0: 2, 1: 3})  # three loops from step 1 on
        >>> with Relay(Looped(), device="cpu", loss=nn.CrossEntropyLoss()) as looped:
        ...     results = [schedule.step(looped, batch) for _ in range(2)]
        ...     looped.loops
        {'layers': 3}
    """

    loops: PerStep
    stack: str | None = None
    attribute: str | None = None

    def __post_init__(self) -> None:
        check_step_values("loops", self.loops, least=1)

    def edits(self, relay: SchedulableRelay) -> Sequence[Edit]:
        stack_of(relay, self.stack)
        count = value_at("loops", self.loops, relay.steps, least=1)
        name = next(iter(relay.stacks)) if self.stack is None else self.stack
        if count is None or relay.loops.get(name) == count:
            return ()
        return [Loops(count, self.stack, self.attribute)]
