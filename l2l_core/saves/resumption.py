"""From a relay over the caller's model to the stacks of a save: the way there is made of the edits' own means.

A relay is made over the model as it is given. Then layers that edits brought in are parked, empty, and one restacking per
stack puts the saved layers in place; those that are not among them are parked by it. So shared weights, names and groups
come about as they did in the relay that was saved. Nothing here writes a value.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import count

from torch import nn
from torch.optim import Optimizer

from l2l_core.edits import Editor
from l2l_core.eps.blocks import Unit, shared_key
from l2l_core.eps.optimizers import GroupOrder, ParameterIndex
from l2l_core.model import deep_copy, find_stacks
from l2l_core.saves.codec import PlainPart, parts_of_kind
from l2l_core.saves.compatibility import compare_layers
from l2l_core.saves.edited_stacks import EditedStacks
from l2l_core.saves.relay_state import named_params
from l2l_core.saves.saved_relay import SavedRelay
from l2l_core.surgery import layer_fingerprint, replace_layers

SHARED = shared_key("")  # what keys of blocks that several units use begin with


@dataclass
class Resumption:
    """Takes one save over.

    Args:
        saved: the save.
        edited: what it says of edits.
        parts: what it says of the past, see `history_parts.py`.
        modules: the caller's, by key, for layers that are like none of the model's.
    """

    saved: SavedRelay
    edited: EditedStacks
    parts: Mapping[str, PlainPart]
    modules: Mapping[str, nn.Module]

    def __post_init__(self) -> None:
        self._parked = {part["key"]: part for part in parts_of_kind("parked", self.parts).values()}
        self._order: GroupOrder | None = None  # of an optimizer that was made without the holder
        self._kinds = {**self.edited.kinds, **{key: part["kind"] for key, part in self._parked.items()}}
        self._holder = next(key for i in count() if (key := f"holder-{i}") not in self._kinds)

    def prepare(self, model: nn.Module, optimizer: object, rollback: ExitStack) -> dict[str, nn.Module | str]:
        """Find the layers for a relay over a model that is as it was before the edits, or as it is in the save.

        In the second case layers that share weights with others may be gone. For as long as the relay is being made a holder
        of those weights is among the layers, so that they become blocks of their own, as they are in the save.

        Args:
            model, optimizer: the caller's.
            back: gets what puts everything back as it was.

        Raises:
            ValueError: the model is neither.
        """
        self.built = self.edited.match_model(model, self.saved.layers, self._kinds, self.saved.path)
        layers: dict[str, nn.Module | str] = dict(self.built.layers)
        shared = [key.removeprefix(SHARED) for key in self.saved.manifest["versions"] if key.startswith(SHARED)]
        if not shared or layers == self.edited.first.layers:
            return layers
        stacks = find_stacks(model, [model.get_submodule(name) for name in self.built.layers.values()])
        if isinstance(optimizer, Optimizer):
            groups = [group["params"] for group in optimizer.param_groups]
            self._order = GroupOrder(groups, ParameterIndex(model, stacks))  # it was made for the model as it is
        holder = _SharedWeightHolder([model.get_parameter(name) for name in shared])
        rollback.callback(
            replace_layers(
                model, stacks[0], (*stacks[0].layers, holder), like={holder: stacks[0].layers[0]}, force=True
            )
        )
        return layers | {self._holder: holder}

    def restack(self, editor: Editor, rollback: ExitStack) -> None:
        """Let a relay over those layers have the saved stacks, parameters trained and groups of the optimizer.

        Raises:
            ValueError: a layer is like none that is there.
        """
        if self._order is not None:
            editor.group_order = self._order
        edited, lineup = self.edited, editor.registry
        units = {unit.key: unit for unit in lineup.layers}
        here = [[unit.key, unit.name] for unit in lineup.layers if unit.key != self._holder]
        # In messages layers are counted as in the manifest, where the shell comes first.
        compare_layers(self.saved.path, [["", ""], *self.built.layers.items()], [["", ""], *here])
        # Before anything is looked up: stacks go by the names that they had first
        lineup.set_first_structure(edited.first, self.built.containers)
        editor.group_order.load_plain(edited.orders, lineup.first_names)
        lineup.key_count, lineup.origin = max(edited.made, lineup.key_count), {**lineup.origin, **edited.origin}
        for name, keys in edited.stacks.items():
            before = lineup.units_of(lineup.find_stack(name))
            for key in keys:
                if key not in units:
                    units[key] = self._make_unit(editor, key, units)
            like = {units[key]: origin for key in keys if (origin := units.get(edited.origin[key])) in before}
            if (after := tuple(units[key] for key in keys)) != before:
                new = {unit: origin for unit, origin in like.items() if unit not in before}
                # Trusted: it stood so in the relay that was saved
                rollback.callback(editor.restack(name, before, after, new, force=True))
        if edited.stacks:  # restacking lets the layers of a stack follow one another; they may have stood apart
            lineup.layers = [units[key] for key in self.saved.layers if key in units]
        if edited.is_edited:
            self._set_trained(editor)
            self._regroup(editor)

    def _make_unit(self, editor: Editor, key: str, units: Mapping[str, Unit]) -> Unit:
        origin = self.edited.origin[key]
        nearest = {origin: units[origin]} if origin in units else {}
        module = self.find_module(key, self._kinds[key], {k: unit.module for k, unit in {**nearest, **units}.items()})
        if module is None:
            raise ValueError(self.missing_message(key, "layer"))
        return editor.layer_factory.make_empty(key, module)

    def find_module(self, key: str, kind: str, candidates: Mapping[str, nn.Module]) -> nn.Module | None:
        """Find a module of a kind for a layer: the caller's own, or a copy of one `there`; None if there is none.

        Raises:
            ValueError: the caller's own is of another kind.
        """
        if key in self.modules:
            if layer_fingerprint(self.modules[key]) != kind:
                raise ValueError(
                    f"modules={{{key!r}: ...}}: this {type(self.modules[key]).__name__} is of another kind than the layer that "
                    f"was saved (other parts, shapes or settings): build it as it was when an edit brought it in"
                )
            return self.modules[key]
        like = [
            module
            for other, module in candidates.items()
            if (self._kinds.get(other) or layer_fingerprint(module)) == kind
        ]
        like += [module for module in self.modules.values() if layer_fingerprint(module) == kind]
        return deep_copy(like[0]) if like else None

    def missing_message(self, key: str, kind: str) -> str:
        """Say why a layer is not there, and what would help."""
        return (
            f"layer {key}, a {kind} like none in the model, is not there: a save has no code. Load with such a module: "
            f"modules={{{key!r}: ...}}"
        )

    def _set_trained(self, editor: Editor) -> None:
        trained = set(self.saved.manifest["trainable"])
        for block in editor.registry.blocks:
            editor.set_block_trained(block, [name in trained for name in block.names])

    def _regroup(self, editor: Editor) -> None:
        """Let groups hold what they hold in the save, which may be other than what the optimizer was made with."""
        groups, params = self.saved.manifest["groups"], named_params(editor.registry.units)
        if len(groups) == len(editor.store.masters.groups) and all(
            name in params for names in groups for name in names
        ):
            editor.store.masters.assign_groups([[params[name] for name in names] for names in groups])


class _SharedWeightHolder(nn.Module):
    """Holds parameters, and never runs."""

    def __init__(self, params: Sequence[nn.Parameter]) -> None:
        super().__init__()
        self.held = nn.ParameterList(params)

    def forward(self) -> None:
        raise AssertionError("a holder is gone before any step")


def register_restore(model: nn.Module, optimizer: object, rollback: ExitStack) -> None:
    """Let `back` put back which parameters are trained, and what a ready optimizer holds."""
    for param in model.parameters():
        rollback.callback(param.requires_grad_, param.requires_grad)
    if isinstance(optimizer, Optimizer):
        rollback.callback(
            optimizer.state.update, dict(optimizer.state)
        )  # called after the next one: cleared, then filled
        rollback.callback(optimizer.state.clear)
        for group in optimizer.param_groups:
            rollback.callback(group.update, {name: group[name] for name in ("params", "param_names") if name in group})
