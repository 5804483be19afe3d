"""Edit that gives layers with shared weights separate weights: the second stage of Pseudo-to-Real.

In the first stage a stack has one layer in many places, or many layers with tied parameters. Then it is delinked, and every
place continues training from the shared weights. Source: M6-10T (Lin et al., arXiv 2110.03888).
"""

from __future__ import annotations

from dataclasses import dataclass, field

from l2l_core.edits.edit import LayerMakingEdit, RunCommand, Span, inherit_state, restack_command
from l2l_core.edits.editor import Editor
from l2l_core.edits.optimizer_state import Policy
from l2l_core.eps.blocks import Unit
from l2l_core.model import deep_copy


@dataclass(frozen=True)
class Delink(LayerMakingEdit):
    """Give every place of a stack separate weights.

    The first layer that uses shared weights keeps them, or a user of them outside of `layers`; every further place gets a copy
    of the layer. The model computes the same. Weights that are not shared do not change.

    Args:
        layers: the places, default the whole stack. A layer in several places that is given by key or as a module means all
            from its first to its last place.
        optimizer: new state of all places. "copy": the state of the shared weights. A number scales that (first moments by it,
            second moments by its square): gradients of n places were added up, so 1/n is their size from now on. "fresh":
            every place starts without state.
        warmup: updates over which the learning rate of the copies rises to that of their group.

    Example:
        >>> from l2l_core import Delink
        >>> block = Block()
        >>> shared = nn.Sequential(block, block, block)
        >>> with Relay(shared, device="cpu", loss=nn.MSELoss(), layers=[block]) as relay:
        ...     inverse = relay.apply(Delink())
        >>> len({id(layer) for layer in shared})
        3
    """

    layers: Span = field(default_factory=lambda: slice(None))
    optimizer: Policy = "copy"
    warmup: int = 0
    preserves_function = True
    moves_layers = False

    def execute(self, editor: Editor, run: RunCommand) -> None:
        stack, span = editor.registry.resolver.span(self.layers)
        before = editor.registry.units_of(stack)
        outside = {*editor.registry.units}.difference(before) | {u for i, u in enumerate(before) if i not in span}
        outside_params = {param for unit in outside for param in unit.params}
        taken, keepers, after, like = set(outside_params), list[Unit](), list(before), dict[Unit, Unit]()
        for i in span:
            if taken.isdisjoint(before[i].params):
                keepers.append(before[i])
                taken.update(before[i].params)
            else:
                # Not `copy_module`, which unfreezes the copy of a frozen layer.
                with editor.load_layers([before[i]]):
                    after[i] = self.make_layer(editor, deep_copy(before[i].module), before[i])
                like[after[i]] = before[i]
        if not like:
            raise ValueError(
                f"Delink({self.layers!r}): no layer there shares weights with another one. A layer that the model's forward runs "
                "several times is in one place and cannot be delinked: use Unroll(); else pass layers that share weights"
            )
        shared = {param for old in like.values() for param in old.params} - outside_params
        run(restack_command(editor, stack, after, like))
        for unit in keepers if self.optimizer != "copy" else ():
            inherit_state(unit, [param for param in unit.params if param in shared], self.optimizer, editor, run)
