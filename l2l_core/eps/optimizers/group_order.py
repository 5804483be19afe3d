"""Order in which the user's function puts parameters into an optimizer's groups; edits keep to it.

A plain optimizer tells parameters apart by their place in its groups and by nothing else. So its state fits another one only
if both have the same parameters in the same places: after an edit, a relay's optimizer must be in the order that the same
function would give over the edited model. The function is unknown; what it did to the model before any edit is not.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from l2l_core.model import Stack

ParamGroup = Sequence[nn.Parameter]


class ParameterIndex:
    """Places of parameters in a model: rank in `parameters()`, name, stack and position there.

    Args:
        model: as it is now.
        stacks: of the model, as they are now.
    """

    def __init__(self, model: nn.Module, stacks: Sequence[Stack]) -> None:
        self.names = {param: name for name, param in model.named_parameters()}
        self.rank = {param: index for index, param in enumerate(self.names)}
        self.stack: dict[nn.Parameter, nn.Module] = {}
        self.position: dict[nn.Parameter, int] = {}
        for stack in stacks:
            for position, layer in enumerate(stack.layers):
                for param in layer.parameters():
                    self.stack.setdefault(param, stack.container)  # the first place counts, as in `parameters()`
                    self.position.setdefault(param, position)


@dataclass
class _LearnedOrder:
    """Order of one group.

    Attributes:
        fits: names of the rules that it follows; a small group follows several by chance.
        rule: name of the rule taken; "pattern" for none of them.
        pattern: parameters that are in no stack, and containers of stacks, in the order in which they come first.
        downwards: containers whose layers come from the last to the first.
    """

    fits: list[str]
    rule: str
    pattern: list[Any]
    downwards: set[nn.Module]

    @staticmethod
    def of(group: ParamGroup, index: ParameterIndex) -> _LearnedOrder:
        fits = [name for name, rule in _RULES.items() if _is_same(rule(group, index), group)]
        pattern = list(dict.fromkeys(index.stack.get(param, param) for param in group))
        positions: dict[nn.Module, list[int]] = {}
        for param in group:
            if param in index.stack:
                positions.setdefault(index.stack[param], []).append(index.position[param])
        downwards = {stack for stack, found in positions.items() if found[0] > found[-1]}
        return _LearnedOrder(fits, (*fits, "pattern")[0], pattern, downwards)

    def sort(self, group: ParamGroup, index: ParameterIndex) -> list[nn.Parameter]:
        return _RULES[self.rule](group, index) if self.rule in _RULES else self._by_pattern(group, index)

    def _by_pattern(self, group: ParamGroup, index: ParameterIndex) -> list[nn.Parameter]:
        """Keep the place of what is in no stack; put layers of a stack side by side where its first parameter was."""
        parts: dict[Any, list[nn.Parameter]] = {}
        for param in _by_rank(group, index):
            parts.setdefault(index.stack.get(param, param), []).append(param)
        for stack in self.downwards & parts.keys():
            parts[stack].sort(key=lambda param: -index.position[param])  # stable: a layer's own stay in order
        return [param for token in dict.fromkeys([*self.pattern, *parts]) for param in parts.get(token, ())]


class GroupOrder:
    """Keeps the order of an optimizer's groups, learned from groups over a model before it is edited.

    Args:
        groups: the model's parameters in every group.
        places: of that model.
    """

    def __init__(self, groups: Sequence[ParamGroup], index: ParameterIndex) -> None:
        self._learned = [_LearnedOrder.of(group, index) for group in groups]
        for rule in _RULES:  # one for all groups, where there is one: one function has made them
            if all(rule in learned.fits for learned in self._learned):
                for learned in self._learned:
                    learned.rule = rule
                return

    def sort(self, groups: Sequence[ParamGroup], index: ParameterIndex) -> list[list[nn.Parameter]]:
        """Sort the groups; one that has been added since is left as it is."""
        known = [each.sort(group, index) for each, group in zip(self._learned, groups, strict=False)]
        return known + [list(group) for group in groups[len(known) :]]

    def to_plain(self, names: Mapping[nn.Module, str]) -> list[Any]:
        """Return the rules as plain data; `names` are those of the stacks' containers."""
        return [[each.rule, sorted(names[stack] for stack in each.downwards)] for each in self._learned]

    def load_plain(self, plain: Sequence[Any], names: Mapping[nn.Module, str]) -> None:
        """Take over the rules in a save of the same optimizer: a model of one layer does not show their direction."""
        if len(plain) != len(self._learned):
            return
        for learned, (rule, downwards) in zip(self._learned, plain, strict=True):
            learned.downwards |= {stack for stack, name in names.items() if name in downwards}
            if rule in (*learned.fits, "pattern"):
                learned.rule = rule


def _is_same(a: ParamGroup, b: ParamGroup) -> bool:
    return all(x is y for x, y in zip(a, b, strict=True))  # == of parameters is elementwise


def _by_rank(group: ParamGroup, index: ParameterIndex) -> list[nn.Parameter]:
    """Sort as ``model.parameters()`` does; at the end, what is not in the model."""
    return sorted(group, key=lambda param: index.rank.get(param, len(index.rank)))


def _by_rank_reversed(group: ParamGroup, index: ParameterIndex) -> list[nn.Parameter]:
    return _by_rank(group, index)[::-1]


def _by_name(group: ParamGroup, index: ParameterIndex) -> list[nn.Parameter]:
    """Sort as ``sorted(names)`` does: layer 10 comes before layer 2."""
    return sorted(group, key=lambda param: index.names.get(param, "~"))  # "~" sorts behind every name


_RULES: dict[str, Callable[[ParamGroup, ParameterIndex], list[nn.Parameter]]] = {
    "model": _by_rank,
    "backwards": _by_rank_reversed,
    "names": _by_name,
}
