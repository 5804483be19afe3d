"""Order of parameters in an optimizer's groups, learned from the user's groups and kept by edits.

An optimizer identifies parameters only by their place in its groups. Its state fits another optimizer only if both have the same
parameters in the same places: after an edit, the order must be that of the user's function over the edited model. That function
is unknown; its result before any edit is known.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from l2l_core.model import Stack

ParamGroup = Sequence[nn.Parameter]


class ParameterIndex:
    """Places of parameters in a model: rank in `parameters()`, name, stack and position in the stack."""

    def __init__(self, model: nn.Module, stacks: Sequence[Stack]) -> None:
        self.names = {param: name for name, param in model.named_parameters()}
        self.rank = {param: index for index, param in enumerate(self.names)}
        self.stack: dict[nn.Parameter, nn.Module] = {}
        self.position: dict[nn.Parameter, int] = {}
        for stack in stacks:
            for position, layer in enumerate(stack.layers):
                for param in layer.parameters():
                    self.stack.setdefault(param, stack.container)  # first occurrence, as in `parameters()`
                    self.position.setdefault(param, position)


@dataclass
class _LearnedOrder:
    """Order of one group.

    Attributes:
        fits: names of the rules that it follows; a small group follows several by chance.
        rule: name of the chosen rule; "pattern" if none fits.
        pattern: parameters outside of stacks, and containers of stacks, by first occurrence.
        downwards: containers whose layers are in descending order.
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
        """Keep the places of parameters outside of stacks; put a stack's layers at the place of its first parameter."""
        parts: dict[Any, list[nn.Parameter]] = {}
        for param in _by_rank(group, index):
            parts.setdefault(index.stack.get(param, param), []).append(param)
        for stack in self.downwards & parts.keys():
            parts[stack].sort(key=lambda param: -index.position[param])  # stable within a layer
        return [param for token in dict.fromkeys([*self.pattern, *parts]) for param in parts.get(token, ())]


class GroupOrder:
    """Order of an optimizer's groups, learned before the model is edited."""

    def __init__(self, groups: Sequence[ParamGroup], index: ParameterIndex) -> None:
        self._learned = [_LearnedOrder.of(group, index) for group in groups]
        for rule in _RULES:  # prefer one rule for all groups: one function made them
            if all(rule in learned.fits for learned in self._learned):
                for learned in self._learned:
                    learned.rule = rule
                return

    def sort(self, groups: Sequence[ParamGroup], index: ParameterIndex) -> list[list[nn.Parameter]]:
        """Sort the groups; groups added later are unchanged."""
        sorted_groups = [each.sort(group, index) for each, group in zip(self._learned, groups, strict=False)]
        return sorted_groups + [list(group) for group in groups[len(sorted_groups) :]]

    def to_plain(self, names: Mapping[nn.Module, str]) -> list[Any]:
        """Return the rules as plain data; `names` are those of the stacks' containers."""
        return [[each.rule, sorted(names[stack] for stack in each.downwards)] for each in self._learned]

    def load_plain(self, plain: Sequence[Any], names: Mapping[nn.Module, str]) -> None:
        """Load the rules of a save: a model with one layer does not show a direction."""
        if len(plain) != len(self._learned):
            return
        for learned, (rule, downwards) in zip(self._learned, plain, strict=True):
            learned.downwards |= {stack for stack, name in names.items() if name in downwards}
            if rule in (*learned.fits, "pattern"):
                learned.rule = rule


def _is_same(a: ParamGroup, b: ParamGroup) -> bool:
    return all(x is y for x, y in zip(a, b, strict=True))  # == of parameters is elementwise


def _by_rank(group: ParamGroup, index: ParameterIndex) -> list[nn.Parameter]:
    """Sort as ``model.parameters()`` does, others last."""
    return sorted(group, key=lambda param: index.rank.get(param, len(index.rank)))


_RULES: dict[str, Callable[[ParamGroup, ParameterIndex], list[nn.Parameter]]] = {
    "model": _by_rank,
    "backwards": lambda group, index: _by_rank(group, index)[::-1],
    # As ``sorted(names)`` does, layer 10 before layer 2; "~" sorts after every name
    "names": lambda group, index: sorted(group, key=lambda param: index.names.get(param, "~")),
}
