"""What a save has to say of edits, and how a model gets the stacks back that it was saved with."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from typing import Any

from torch import nn
from torch.optim import Optimizer

from l2l_core.editor import Editor
from l2l_core.journal import Entry, History
from l2l_core.layers import resolve_layers
from l2l_core.likeness import kind_of
from l2l_core.rearrange import rearrange
from l2l_core.stacks import find_stacks


@dataclass(frozen=True)
class Edited:
    """The stacks of an edited relay.

    Attributes:
        stacks: keys of the layers in order, by stack.
        original: dotted names of the layers before any edit, by key.
        origin: by key, the original layer that it goes back to.
        made: keys given out so far, or passed over.
        journal: what was edited.
        kinds: checksum of what tells a layer apart, by key; see `likeness.Anatomy`.
        sizes: number of members of the container, by stack.
        stats: what the last step told of the shell and of each layer, by key.
    """

    stacks: dict[str, list[str]] = field(default_factory=dict)
    original: dict[str, str] = field(default_factory=dict)
    origin: dict[str, str] = field(default_factory=dict)
    made: int = 0
    journal: tuple[Entry, ...] = ()
    kinds: dict[str, str] = field(default_factory=dict)
    sizes: dict[str, int] = field(default_factory=dict)
    stats: dict[str, dict[str, float]] = field(default_factory=dict)

    @staticmethod
    def from_(editor: Editor, history: History) -> Edited:
        """Of a relay as it is now."""
        stacks = {stack.name: [unit.key for unit in editor.units_of(stack)] for stack in editor.stacks}
        kinds = {unit.key: kind_of(unit.module) for unit in editor.layers}
        sizes = {stack.name: len(stack.container._modules) for stack in editor.stacks}
        stats = {unit.key: dict(unit.stats) for unit in (editor.shell, *editor.layers)}
        return Edited(stacks, editor.original, editor.origin, editor.made, history.journal, kinds, sizes, stats)

    @staticmethod
    def of(plain: Mapping[str, Any]) -> Edited:
        """From what `to_plain` gave; empty for a save that knows nothing of edits."""
        return Edited(**{**plain, "journal": tuple(Entry(**row) for row in plain.get("journal", ()))})

    def to_plain(self) -> dict[str, Any]:
        """As plain data."""
        return {**asdict(self), "journal": [asdict(entry) for entry in self.journal]}

    def fit(
        self,
        model: nn.Module,
        optimizer: object,
        manifest: Mapping[str, Any],
        modules: Mapping[str, nn.Module],
        back: ExitStack,
    ) -> dict[str, nn.Module]:
        """Give the model the stacks and the frozen parameters that were saved, and a ready optimizer its parameters.

        Args:
            model, optimizer: the caller's.
            manifest: of the save.
            modules: layers by key that are unlike all of the model's.
            back: gets what puts everything back as it was.

        Returns:
            Layers by key that are not in the model now.

        Raises:
            ValueError: it is neither like the saved model nor like the one before the edits.
        """
        spare = dict(modules)
        if not self.journal:
            return spare
        if not self._is_like(model, dict(manifest["units"][1:])):
            found = resolve_layers(model, list(self.original.values()))
            by_key = dict(zip(self.original, found.values(), strict=True))
            for stack in find_stacks(model, list(found.values())):
                wanted = self.stacks[stack.name]
                made = {
                    key: spare.pop(key) if key in spare else copy.deepcopy(by_key[self.origin[key]])
                    for key in wanted
                    if key not in by_key
                }
                like = {module: by_key[self.origin[key]] for key, module in made.items()}
                layers = [made[key] if key in made else by_key[key] for key in wanted]
                back.callback(rearrange(model, stack, layers, like=like, trust=True))  # it has been so before
                spare |= {key: by_key[key] for key in set(by_key) - set(wanted) if by_key[key] in set(stack.layers)}
        trained = set(manifest["trainable"])
        for name, param in model.named_parameters():
            back.callback(param.requires_grad_, param.requires_grad)
            param.requires_grad_(name in trained)
        if isinstance(optimizer, Optimizer) and len(optimizer.param_groups) == len(manifest["groups"]):
            _regroup(optimizer, dict(model.named_parameters()), manifest["groups"], back)
        return spare

    def restore_into(self, editor: Editor, history: History) -> None:
        """Let a relay over that model go on with the same keys and the same journal."""
        if self.stacks:
            editor.made, editor.original, editor.origin = self.made, dict(self.original), dict(self.origin)
            history.continue_from(self.journal, (), ())
        for unit in (editor.shell, *editor.layers):
            unit.stats.update(self.stats.get(unit.key, {}))

    def _is_like(self, model: nn.Module, names: Mapping[str, str]) -> bool:
        """Whether the model has the saved stacks already; `names` are those of the layers by key."""
        modules = dict(model.named_modules())
        if any(name not in modules or len(modules[name]._modules) != size for name, size in self.sizes.items()):
            return False
        return all(name in modules and kind_of(modules[name]) == self.kinds[key] for key, name in names.items())


def _regroup(
    optimizer: Optimizer, params: Mapping[str, nn.Parameter], groups: Sequence[Sequence[str]], back: ExitStack
) -> None:
    """Let the groups of an optimizer that was made for another stack hold the parameters that they held when saved."""
    for group, names in zip(optimizer.param_groups, groups, strict=True):
        back.callback(group.__setitem__, "params", group["params"])
        group["params"] = [params[name] for name in names if name in params]
