"""Evidence about the positions of layers, and the refusals of edits that rest on it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from torch import nn

from l2l_core.model import Stack
from l2l_core.surgery import (
    CodeBetweenLayers,
    DepthRead,
    different_arguments,
    lists_that_follow,
    possible_depth_reads,
)

_BOTH_READINGS = (
    "If that belongs to the layer, make it its member (in its __init__: self.scale = nn.Parameter(torch.ones(()))) and "
    "use it in the layer's forward: it then moves with the layer. If it belongs to the position, force=True leaves it there"
)


class UsedOutputs(NamedTuple):
    """Some layers of a stack, of whose outputs the model's own code uses more than the next layer gets."""

    layers: Mapping[str, nn.Module]  # by dotted name
    all_layers: Sequence[nn.Module]  # of the stack
    in_order: bool  # whether it uses each in another way


class ObservedPositions:
    """Things of one model that depend on the positions of layers, by first name of the stack.

    Attributes:
        reads: things that the model reads by position, by their names; of the stacks that were observed.
        code_between: arguments that the model's own code gives to layers that return equal outputs, as last observed.
        used_behind: positions whose outputs the model's own code uses behind the last layer, each in another way, as last
            observed.
        some_used: layers before the last whose outputs are used behind it or by other stacks, unless those of all are, as last
            observed.
        failure: error of the last forward; None if it succeeded.
    """

    def __init__(self) -> None:
        self.reads: dict[str, dict[str, DepthRead]] = {}
        self.code_between: Mapping[str, CodeBetweenLayers] = {}
        self.used_behind: Mapping[str, Sequence[int]] = {}
        self.some_used: Mapping[str, UsedOutputs] = {}
        self.failure: Exception | None = None

    def check_move(self, model: nn.Module, stack: Stack, name: str) -> None:
        """Refuse to change positions of layers of a stack; raise ValueError with the things that depend on them."""
        following = lists_that_follow(model, stack)
        if name not in self.reads:  # before the first step, without an example of a batch
            if unknown := [each for each in possible_depth_reads(model, stack) if each not in following]:
                raise ValueError(self._unobserved_message(stack, unknown))
        elif left := [read for key, read in self.reads[name].items() if key not in following]:
            cause = "These would stay where they are, so that layers would get the entries of others, or none"
            raise ValueError(_reads_message(stack, left, cause))
        elif (code := self.code_between.get(name)) and code.odd_position is not None:
            raise ValueError(
                f"the model's own code changes the hidden state in another way before layer {code.odd_position} of {stack.title} "
                f"than before an earlier one: with a number of that position, or a formula of it. {_BOTH_READINGS}"
            )

        elif used := self.used_behind.get(name):
            shown = f"{', '.join(map(str, used[:3]))}{', ...' if len(used) > 3 else ''}"
            raise ValueError(
                f"behind the last layer, the model's own code uses the outputs of layers {shown} of {stack.title}, each in "
                "another way: with a weight or a head of that position, or a formula of it. Layers would get those of others, or "
                "none. If they belong to the layers, make them members (in its __init__: self.weight = "
                "nn.Parameter(torch.ones(()))), and return from the layer's forward what is added up: return h, self.weight * h. "
                "If they belong to the positions, force=True leaves them there; for further layers give the model further ones "
                "before the relay is made"
            )

    def check_shorter_list(self, model: nn.Module, stack: Stack, name: str) -> None:
        """Refuse to take skipped layers, whose output is not like their input, out of their list."""
        following, code = lists_that_follow(model, stack), self.code_between.get(name)
        if left := [read for key, read in self.reads.get(name, {}).items() if key not in following]:
            cause = (
                "A layer that is skipped cannot keep its place, because its output is not like its input: without it, later "
                "layers would get the entries of their neighbours"
            )
            raise ValueError(_reads_message(stack, left, cause))
        self.check_move(model, stack, name)
        if code and not code.has_equal_arguments and not following:
            raise ValueError(
                f"the model's own code gives other arguments to each layer of {stack.title}, and a layer that is skipped cannot "
                "keep its place, because its output is not like its input: later layers would get those of their neighbours. "
                f"{_BOTH_READINGS}"
            )

    def check_arguments(self, now: Mapping[str, CodeBetweenLayers], names: Mapping[nn.Module, str]) -> None:
        """Refuse edits, tried by now, if a layer is given other arguments by the model's own code than before.

        Args:
            now: `code_between` with the edits.
            names: dotted names of the layers.

        Raises:
            ValueError: names the layer and the arguments.
        """
        for stack, before in self.code_between.items():
            for layer, given in before.arguments.items():
                if stack not in now or layer not in now[stack].arguments:
                    continue
                if changed := different_arguments(given, now[stack].arguments[layer]):
                    raise ValueError(
                        f"layer {names[layer]} would be given another argument {', '.join(changed)} than before, because the "
                        f"model's own code makes it from the layer's position or from the depth. {_BOTH_READINGS}"
                    )

    def check_used(self, now: Mapping[str, Sequence[nn.Module]], stacks: Mapping[str, Stack]) -> None:
        """Refuse edits, tried by now, with which the model's own code uses outputs of other layers.

        Layers that the edits remove or make do not count: of the others, those that were used must still be.

        Args:
            now: by first name of the stack, the layers before the last whose outputs it uses with the edits, in order.
            stacks: the stacks with the edits.
        """
        for stack, before in self.some_used.items():
            used = [layer for layer in before.layers.values() if layer in stacks[stack].layers]
            used_now = [layer for layer in now[stack] if layer in before.all_layers]
            if used != used_now if before.in_order else {*used} != {*used_now}:
                raise ValueError(
                    f"beside that of the last layer, the model's own code uses the output of {', '.join(before.layers)}, and "
                    "with these edits it would not be that of the same layers, since it is found by its position. If that use "
                    "belongs to the layer, let the layer's forward return what is used, too. If it belongs to the position, "
                    "force=True leaves it there"
                )

    def _unobserved_message(self, stack: Stack, names: Sequence[str]) -> str:
        failed = (
            ""
            if self.failure is None
            else f" (on rows of the last batch it failed: {type(self.failure).__name__}: {self.failure})"
        )
        return (
            f"{', '.join(names)} may be read by the position of the {len(stack)} layers of {stack.title}, and would not follow "
            f"them. A forward shows whether that is so{failed}: make a step first, or give an example of a batch "
            "(relay.expect(batch)); force=True leaves them as they are"
        )


def _reads_message(stack: Stack, reads: Sequence[DepthRead], cause: str) -> str:
    """Return the message for things beside a stack that would not follow its layers."""
    unrelated = " or the entries have nothing to do with each other: give one of them another name (self.last_norm), or"
    remedy = unrelated if any(read.has_one_place_between for read in reads) else ","
    return (
        f"the model reads by the position of the layers of {stack.title}: {'; '.join(map(str, reads))}. {cause}. Give each layer "
        "its own entry as a member (in its __init__: self.scale = nn.Parameter(torch.ones(()))), and use it in the layer's "
        f"forward: it then moves with the layer. If entries belong to the positions{remedy} force=True leaves them there; for "
        "further layers give them further entries before the relay is made"
    )
