"""Layers that share weights become layers of their own: the second stage of Pseudo-to-Real.

In the first stage a stack trains as if it were deep, and holds one layer: one module in many places, or many modules whose
parameters are tied. Then it is delinked, and every place goes on from what they have learned together.
Source: M6-10T (Lin et al., arXiv 2110.03888).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import nn

from l2l_core.edits.commands import RewriteCommand
from l2l_core.edits.edit import Edit, RunCommand, Span, restack_command
from l2l_core.edits.editor import Editor
from l2l_core.edits.optimizer_state import (
    ParameterSnapshot,
    Policy,
    check_policy,
    describe_policy,
    make_inherit,
    states_of,
)
from l2l_core.eps.blocks import Unit
from l2l_core.model import deep_copy


@dataclass(frozen=True)
class Delink(Edit):
    """Give every place of a stack weights of its own, where layers share them with others.

    The weights stay with the first layer that uses them, or with what uses them outside of `layers`; each further place gets a
    layer of its own, a copy. So the model computes the same. Weights that nobody shares are left alone.

    Args:
        layers: the places, default the whole stack. A layer that stands in several and is named by its key or itself means
            all from its first to its last one.
        optimizer: what becomes of the state of the shared weights. "copy": every place goes on with it. A number scales the
            copies (first moments by it, second moments by its square): gradients of n places were added up, so 1/n is the
            size of what each gets from now on. "fresh": every place starts anew. What the first place keeps is treated alike.
        warmup: updates over which the learning rate of the copies rises to that of their group.
    """

    layers: Span = field(default_factory=lambda: slice(None))
    optimizer: Policy = "copy"
    warmup: int = 0

    def __post_init__(self) -> None:
        check_policy(self.optimizer, self.warmup)

    @property
    def preserves_function(self) -> bool:
        return True

    @property
    def optimizer_policy(self) -> str:
        return describe_policy(self.optimizer, self.warmup)

    def execute(self, editor: Editor, run: RunCommand) -> None:
        stack, span = editor.registry.resolver.span(self.layers)
        before = editor.registry.units_of(stack)
        outside = [unit for unit in editor.registry.units if unit not in before]
        outside += [unit for i, unit in enumerate(before) if i not in span]
        taken = {param for unit in outside for param in unit.params}
        elsewhere, keepers, after, like = set(taken), list[Unit](), list(before), dict[Unit, Unit]()
        for i in span:
            if taken.isdisjoint(before[i].params):
                keepers.append(before[i])
                taken.update(before[i].params)
            else:
                # Not `copy_of`, which lets a frozen layer learn: these were in training as they are
                with editor.load_layers([before[i]]):
                    after[i] = editor.layer_factory.make(
                        deep_copy(before[i].module), before[i], make_inherit(self.optimizer), self.warmup
                    )
                like[after[i]] = before[i]
        if not like:
            raise ValueError(
                f"Delink({self.layers!r}): no layer there shares weights with another one, so there is nothing to delink. One "
                "that the model's own code runs several times stands in one place, and stays one layer"
            )
        shared = {param for old in like.values() for param in old.params} - elsewhere
        run(restack_command(editor, stack, after, like))
        for unit in keepers if self.optimizer != "copy" else ():
            self._inherit_state(unit, [param for param in unit.params if param in shared], editor, run)

    def _inherit_state(self, unit: Unit, params: Sequence[nn.Parameter], editor: Editor, run: RunCommand) -> None:
        """Let the optimizer know of parameters that stayed what it knows of their copies."""
        with editor.load_layers([unit]):
            states = states_of(unit, editor.store)
            kept = {param: make_inherit(self.optimizer)(states[param]) for param in params if param in states}
            values = {param: ParameterSnapshot(param.detach().clone(), state) for param, state in kept.items()}
        if values:
            run(RewriteCommand(unit, values))
