"""Reconstruction of the saved stacks in a relay over the caller's model, by means of edits.

A relay is made over the model as given. Layers that edits had inserted are then added as empty detached layers, and one edit per
stack puts the saved layers in place and detaches the others. Shared weights, names and optimizer groups thus arise as they did
in the relay that was saved. No values are written here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import count
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from l2l_core.edits import Editor
from l2l_core.eps.blocks import Unit, shared_key
from l2l_core.eps.optimizers import GroupOrder, ParameterIndex, members_of
from l2l_core.model import deep_copy, find_stacks
from l2l_core.saves.codec import PlainPart, parts_of_kind
from l2l_core.saves.edited_stacks import EditedStacks
from l2l_core.saves.relay_state import named_params
from l2l_core.saves.saved_relay import SavedRelay, compare_layers, describe_differences
from l2l_core.surgery import layer_fingerprint, numbers_around, replace_layers

SHARED = shared_key("")  # prefix of the keys of shared blocks


@dataclass
class Resumption:
    """Reconstruction of the stacks of one save."""

    saved: SavedRelay
    edited: EditedStacks
    parts: Mapping[str, PlainPart]
    modules: Mapping[str, nn.Module]

    def __post_init__(self) -> None:
        self._order: GroupOrder | None = None  # of an optimizer that was made before the holder
        detached = {part["key"]: part["kind"] for part in parts_of_kind("parked", self.parts).values()}
        self._kinds = {**self.edited.kinds, **detached}
        self._holder = next(key for i in count() if (key := f"holder-{i}") not in self._kinds)

    def prepare(self, model: nn.Module, optimizer: object, rollback: ExitStack) -> dict[str, nn.Module | str]:
        """Return the layers for a relay over a model that is as before the edits, or as in the save.

        In the second case layers that share weights with others may be missing. While the relay is made, a holder of those
        weights is one of the layers, so that they become separate blocks as in the save; `rollback` receives
        a callback that restores the model.

        Raises:
            ValueError: the model has neither form.
        """
        self.built = self.edited.match_model(model, self.saved.layers, self._kinds, self.saved.path)
        layers: dict[str, nn.Module | str] = dict(self.built.layers)
        shared = [key.removeprefix(SHARED) for key in self.saved.manifest["versions"] if key.startswith(SHARED)]
        if not shared or layers == self.edited.first.layers:
            return layers
        stacks = find_stacks(model, [model.get_submodule(name) for name in self.built.layers.values()])
        if isinstance(optimizer, Optimizer):
            groups = [group["params"] for group in optimizer.param_groups]
            self._order = GroupOrder(groups, ParameterIndex(model, stacks))  # of the model without the holder
        holder = _SharedWeightHolder([model.get_parameter(name) for name in shared])
        new, like = (*stacks[0].layers, holder), dict[nn.Module, nn.Module]({holder: stacks[0].layers[0]})
        rollback.callback(replace_layers(model, stacks[0], new, like=like, force=True))
        return layers | {self._holder: holder}

    def match(self, editor: Editor) -> None:
        """Check that a new relay has the model of the save before any edit; alternative to `prepare`.

        Raises:
            ValueError: it has another model.
        """
        self.edited.match_model(editor.registry.model, self.saved.layers, self._kinds, self.saved.path)
        self.built = self.edited.first
        here = {unit.key: unit.name for unit in editor.registry.layers}
        if unlike := describe_differences("save", self.built.layers, here):
            raise ValueError(
                f"{self.saved.path} was saved with other layers ({unlike}). Build model, optimizer and relay as they were before "
                "the edits of the save, which are made again"
            )

    def restack(self, editor: Editor, rollback: ExitStack) -> None:
        """Restore stacks, `requires_grad` and optimizer groups in a relay over the layers from `prepare`.

        Raises:
            ValueError: a layer cannot be built.
        """
        if self._order is not None:
            editor.group_order = self._order
        edited, registry = self.edited, editor.registry
        units = {unit.key: unit for unit in registry.layers}
        here = [[unit.key, unit.name] for unit in registry.layers if unit.key != self._holder]
        # With an entry for the shell, so that messages count layers as the manifest does
        compare_layers(self.saved.path, [["", ""], *self.built.layers.items()], [["", ""], *here])
        # Before any look-up, which is by the first names of the stacks
        registry.set_first_structure(edited.first, self.built.containers)
        editor.group_order.load_plain(edited.orders, registry.first_names)
        registry.key_count, registry.origin = max(edited.made, registry.key_count), {**registry.origin, **edited.origin}
        # Before the stacks, whose depth such a number does not follow
        for name, numbers in edited.now.loops.items():
            self._restore_loops(editor, name, numbers, rollback)
        for name, keys in edited.stacks.items():
            before = registry.units_of(registry.find_stack(name))
            for key in keys:
                if key not in units:
                    units[key] = self._make_unit(editor, key, units)
            like = {units[key]: origin for key in keys if (origin := units.get(edited.origin[key])) in before}
            if (after := tuple(units[key] for key in keys)) != before:
                new = {unit: origin for unit, origin in like.items() if unit not in before}
                # `force`: the stack was valid in the relay that was saved
                rollback.callback(editor.restack(name, before, after, new, force=True))
        if edited.stacks:  # `restack` makes the layers of a stack adjacent in the registry, in the save they may not be
            registry.layers = [units[key] for key in self.saved.layers if key in units]
        if edited.is_edited:
            self._set_trained(editor)
            self._regroup(editor)

    def _restore_loops(self, editor: Editor, name: str, numbers: Mapping[str, int], rollback: ExitStack) -> None:
        """Set numbers of loops; refuse a model that has others than before the edits or in the save."""
        held, first = (
            numbers_around(editor.registry.model, editor.registry.find_stack(name)),
            self.edited.first.loops[name],
        )
        for number, value in numbers.items():
            if held.get(number) not in (value, first[number]):
                raise ValueError(
                    f"the model has {number} = {held.get(number)}, which was {first[number]} when the relay was made and "
                    f"is {value} in {self.saved.path}: build the model with one of these, and change it after loading (Loops)"
                )
        rollback.callback(editor.set_loops(name, numbers)[1])

    def _make_unit(self, editor: Editor, key: str, units: Mapping[str, Unit]) -> Unit:
        origin = self.edited.origin[key]
        nearest = {origin: units[origin]} if origin in units else {}
        module = self.find_module(key, self._kinds[key], {k: unit.module for k, unit in {**nearest, **units}.items()})
        if module is None:
            raise ValueError(self.missing_message(key, "layer"))
        return editor.layer_factory.make_empty(key, module)

    def find_module(self, key: str, kind: str, candidates: Mapping[str, nn.Module]) -> nn.Module | None:
        """Return a module with the fingerprint `kind`: the caller's, or a copy of a candidate; None if none matches.

        Raises:
            ValueError: the module of the caller has another fingerprint.
        """
        if (given := self.modules.get(key)) is not None:
            if layer_fingerprint(given) != kind:
                raise ValueError(
                    f"modules={{{key!r}: ...}}: this {type(given).__name__} is of another kind than the saved layer (other "
                    f"parts, shapes or settings): build it as it was when an edit inserted it"
                )
            return given
        fingerprints = [(m, self._kinds.get(other) or layer_fingerprint(m)) for other, m in candidates.items()]
        fingerprints += [(module, layer_fingerprint(module)) for module in self.modules.values()]
        like = [module for module, fingerprint in fingerprints if fingerprint == kind]
        return deep_copy(like[0]) if like else None

    def missing_message(self, key: str, kind: str) -> str:
        """Return the message for a layer that cannot be built."""
        return (
            f"layer {key}, a {kind} like none in the model, cannot be built, since a save contains no code. Load with such a "
            f"module: modules={{{key!r}: ...}}"
        )

    def _set_trained(self, editor: Editor) -> None:
        trained = set(self.saved.manifest["trainable"])
        for block in editor.registry.blocks:
            editor.set_block_trained(block, [name in trained for name in block.names])

    def _regroup(self, editor: Editor) -> None:
        """Assign parameters to optimizer groups as in the save."""
        groups, params = self.saved.manifest["groups"], named_params(editor.registry.units)
        masters = editor.store.masters
        if len(groups) == len(masters.groups) and all(name in params for names in groups for name in names):
            masters.assign_groups([[params[name] for name in names] for names in groups])


class _SharedWeightHolder(nn.Module):
    """Module that holds parameters and never runs."""

    def __init__(self, params: Sequence[nn.Parameter]) -> None:
        super().__init__()
        self.held = nn.ParameterList(params)

    def forward(self) -> None:
        raise AssertionError("the holder is removed before any step")


def register_restore(model: nn.Module, optimizer: object, rollback: ExitStack) -> None:
    """Add callbacks to `rollback` that restore `requires_grad` and the contents of an optimizer."""
    for param in model.parameters():
        rollback.callback(param.requires_grad_, param.requires_grad)
    if isinstance(optimizer, Optimizer):
        for each in members_of(optimizer):
            rollback.callback(_set_state, each, dict(each.state))
        for group in optimizer.param_groups:
            rollback.callback(group.update, {name: group[name] for name in ("params", "param_names") if name in group})


def _set_state(optimizer: Optimizer, state: dict[torch.Tensor, Any]) -> None:
    optimizer.state.clear()
    optimizer.state.update(state)
