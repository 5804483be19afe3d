"""Parts of a save beside the present state: undo history, detached layers, and other branches.

A part is plain data with tensors in it: one for each detached layer, each block snapshot of another branch, and each branch. The
tensors of a part fill one file. Sharded snapshots are saved like present weights, each worker writing its shard
(`relay_state.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from l2l_core.config import RelayConfig
from l2l_core.edits import BlockSnapshot, Branches, DetachedLayer, Editor, History
from l2l_core.eps import BlockContents
from l2l_core.eps.blocks import Block, EmptyFn, Layout, Unit
from l2l_core.saves.codec import PlainPart, PlainReader, parts_of_kind, plain_branch, plain_history
from l2l_core.saves.resumption import Resumption
from l2l_core.surgery import layer_entries, layer_fingerprint

# -- to plain data -----------------------------------------------------------------------------------------------------


def history_parts(editor: Editor, history: History, branches: Branches) -> dict[str, PlainPart]:
    """Return the history, detached layers and branches of a relay as parts by name."""
    parts = {f"parked-{layer.unit.key}": _plain_layer(layer, editor.contents_of(layer)) for layer in editor.detached}
    present = editor.units_with_values
    names = _snapshot_names(branches)
    for values, name in names.items():
        parts[name] = {"version": values.version}
        if values.local_layout is None:
            parts[name] |= {"master": values.master, "states": values.states}
    for i, (name, state) in enumerate(branches.others.items()):
        parts[f"branch-{i}"] = plain_branch(name, state, names, present)
    parts["history"] = {"branch": branches.active, **plain_history(history, present)}
    return parts


def snapshot_parts(branches: Branches) -> dict[str, tuple[Block, BlockSnapshot]]:
    """Return the sharded snapshots of other branches, each with its block, by name of the part."""
    names = _snapshot_names(branches)
    snapshots = (pair for state in branches.others.values() for pair in state.snapshots.items())
    return {names[v]: (block, v) for block, v in snapshots if v is not None and v.local_layout is not None}


def _snapshot_names(branches: Branches) -> dict[BlockSnapshot, str]:
    # By identity: a snapshot that several branches share is written once, and shared again after loading
    found = dict.fromkeys(v for state in branches.others.values() for v in state.snapshots.values() if v is not None)
    return {values: f"values-{i}" for i, values in enumerate(found)}


def _plain_layer(layer: DetachedLayer, contents: Mapping[Block, BlockContents]) -> PlainPart:
    unit = layer.unit
    return {
        "key": unit.key,
        "class": type(unit.module).__name__,
        "kind": layer_fingerprint(unit.module),
        "entries": layer_entries.removed_entries(unit.module),
        "blocks": [
            {
                "master": contents[block][0],
                "version": block.version,
                "warmup": block.warmup,
                "trained": [param.requires_grad for param in block.params],
                "groups": entry.groups,
                "states": contents[block][1],
            }
            for block, entry in layer.entries.items()
        ],
        "buffers": unit.buffers.copy(),
        "shared": [
            [name, block.names[0]]
            for block in unit.blocks
            if block.shared
            for name, param in unit.module.named_parameters(remove_duplicate=False)
            if param is block.params[0]
        ],
    }


# -- from plain data ----------------------------------------------------------------------------------------------------------


@dataclass
class HistoryRestorer:
    """Restores history, detached layers and branches of a relay that has the saved stacks."""

    editor: Editor
    history: History
    branches: Branches
    resumption: Resumption
    empty: EmptyFn
    read_snapshot: Callable[[str, Block, Layout | None, torch.Tensor], list[dict[str, Any] | None]]
    shard_of: Callable[[Block], Layout | None]  # layout of this worker's part; None: whole
    config: RelayConfig  # of the relay

    def restore(self, parts: Mapping[str, PlainPart]) -> Callable[[], None]:
        """Restore the result of `history_parts`.

        Returns:
            A function that fills the detached layers. It cannot fail; before its call no object of the caller has changed.

        Raises:
            ValueError: a branch needs a layer that cannot be built; explains how to supply it.
        """
        units = {unit.key: unit for unit in self.editor.registry.units}
        missing: dict[str, str] = {}  # reasons, by key
        to_fill: list[tuple[PlainPart, Unit]] = []
        detached = {layer.unit.key: layer.unit for layer in self.editor.detached}
        for part in parts_of_kind("parked", parts).values():
            unit = self._find_layer(part, units, detached)
            if unit is None:
                missing[part["key"]] = self.resumption.missing_message(part["key"], part["class"])
            else:
                units[unit.key] = unit  # also a pattern for later ones
                to_fill.append((part, unit))
        reader = PlainReader(self.editor, units, missing, self.config)
        branches = [*parts_of_kind("branch", parts).values()]
        keys = {name: key for branch in branches for key, name in branch["values"].items() if key in reader.blocks}
        snapshots = {
            name: self._read_values(name, part, reader.blocks[keys[name]])
            for name, part in parts_of_kind("values", parts).items()
            if name in keys  # else its layer is missing
        }
        others = {part["name"]: reader.read_branch(part, snapshots) for part in branches}
        # After all are read, since a branch that cannot be restored makes the load fail
        self.branches.restore(parts["history"]["branch"], others)
        reader.read_history(self.history, parts["history"], self.history.journal)

        def fill() -> None:
            for part, unit in to_fill:
                self._fill(part, unit)
            self.editor.detached.rebook()

        return fill

    def _find_layer(self, part: PlainPart, units: Mapping[str, Unit], detached: Mapping[str, Unit]) -> Unit | None:
        """Return a detached layer, found in the caller's model or made; None if neither is possible."""
        key, unit = part["key"], detached.get(part["key"])
        if unit is None:
            shell = self.editor.registry.shell
            candidates = {k: each.module for k, each in {**units, **detached}.items() if each is not shell}
            module = self.resumption.find_module(key, part["kind"], candidates)
            if module is None:
                return None
            for inner, name in part["shared"]:  # the copy does not share weights with the model, the layer did
                path, _, attribute = inner.rpartition(".")
                module.get_submodule(path).register_parameter(attribute, self.editor.registry.model.get_parameter(name))
            unit = self.editor.layer_factory.make_empty(key, module)
        sizes = [block.layout.numel for block in unit.blocks if not block.shared]
        if sizes != (saved := [block["master"].numel() for block in part["blocks"]]):
            raise ValueError(
                f"layer {key} has {sizes} unshared weights, and {saved} in the save: build the model as it was when the "
                "relay was made"
            )
        return unit

    def _fill(self, part: PlainPart, unit: Unit) -> None:
        for (block, entry), saved in zip(self.editor.detached[unit].entries.items(), part["blocks"], strict=True):
            block.values.copy_(saved["master"])
            block.version, block.warmup = saved["version"], saved["warmup"]
            self.editor.set_block_trained(block, saved["trained"])
            entry.groups[:] = saved["groups"]
            entry.state.clear()
            states = zip(entry.masters, saved["states"], strict=True)
            entry.state.update({master: state for master, state in states if state is not None})
        unit.buffers.restore(part["buffers"])
        layer_entries.restore_removed_entries(unit.module, part["entries"])

    def _read_values(self, name: str, plain: PlainPart, block: Block) -> BlockSnapshot:
        if "master" in plain:
            master = self.empty(plain["master"].numel(), dtype=plain["master"].dtype).copy_(plain["master"])
            return self.branches.booked(BlockSnapshot(master, plain["version"], plain["states"]))
        layout = self.shard_of(block)
        master = self.empty((layout or block.layout).numel, dtype=block.values.dtype).zero_()
        states = self.read_snapshot(name, block, layout, master)
        return self.branches.booked(BlockSnapshot(master, plain["version"], states, layout))
