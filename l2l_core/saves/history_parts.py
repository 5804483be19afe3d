"""What a save holds beside the present state: the way back from edits, layers that wait for it, and other branches.

All of it is plain data with tensors in it, in parts: one for each parked layer, for each block's values of another
branch, and for each branch. The tensors of every part go to a file of their own. Values of which each worker has a part
are saved as weights of the present state are: every worker writes what it has (`save_writer.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from l2l_core.edits import BlockSnapshot, Branches, DetachedLayer, Editor, History
from l2l_core.eps import BlockContents
from l2l_core.eps.blocks import Block, EmptyFn, Layout, Unit
from l2l_core.saves.codec import PlainPart, PlainReader, parts_of_kind, plain_branch, plain_history
from l2l_core.saves.resumption import Resumption
from l2l_core.surgery import layer_entries, layer_fingerprint

# -- to plain data -----------------------------------------------------------------------------------------------------


def history_parts(editor: Editor, history: History, branches: Branches) -> dict[str, PlainPart]:
    """Describe the past of a relay, by name of the part."""
    parts = {
        f"parked-{parked.unit.key}": _plain_layer(parked, editor.contents_of(parked)) for parked in editor.detached
    }
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
    """Give the values of other branches of which a worker has a part, each with its block, by name of the part."""
    names = _snapshot_names(branches)
    held = (pair for state in branches.others.values() for pair in state.snapshots.items())
    return {
        names[values]: (block, values)
        for block, values in held
        if values is not None and values.local_layout is not None
    }


def _snapshot_names(branches: Branches) -> dict[BlockSnapshot, str]:
    # By identity: what several branches hold together is written once, and held together again
    held = dict.fromkeys(v for state in branches.others.values() for v in state.snapshots.values() if v is not None)
    return {values: f"values-{i}" for i, values in enumerate(held)}


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
                "groups": side.groups,
                "states": contents[block][1],
            }
            for block, side in layer.entries.items()
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


# -- and back ----------------------------------------------------------------------------------------------------------


@dataclass
class HistoryRestorer:
    """Gives a relay that has the saved stacks its past.

    Args:
        editor, history, branches: of the relay.
        resumption: finds modules for parked layers.
        empty: makes a host buffer of so many elements of a `dtype`.
        read: reads values of a block into a buffer, by name; see `Saved.values`.
        room: says what of a block this worker holds, and in how many elements.
    """

    editor: Editor
    history: History
    branches: Branches
    resumption: Resumption
    empty: EmptyFn
    read_snapshot: Callable[[str, Block, Layout | None, torch.Tensor], list[dict[str, Any] | None]]
    shard_of: Callable[[Block], tuple[Layout | None, int]]

    def restore(self, parts: Mapping[str, PlainPart]) -> Callable[[], None]:
        """Take over what `parts_of` gave.

        Returns:
            What gives parked layers their values. It cannot fail; until then, nothing of the caller's has changed.

        Raises:
            ValueError: a branch has a layer that nobody can build; says how to give it.
        """
        units = {unit.key: unit for unit in self.editor.registry.units}
        missing: dict[str, str] = {}  # why, by key
        waiting: list[tuple[PlainPart, Unit]] = []
        parked = {each.unit.key: each.unit for each in self.editor.detached}
        for part in parts_of_kind("parked", parts).values():
            unit = self._find_layer(part, units, parked)
            if unit is None:
                missing[part["key"]] = self.resumption.missing_message(part["key"], part["class"])
            else:
                units[unit.key] = unit  # also as a pattern for those that come after it
                waiting.append((part, unit))
        reader = PlainReader(self.editor, units, missing)
        branches = [*parts_of_kind("branch", parts).values()]
        keys = {name: key for branch in branches for key, name in branch["values"].items() if key in reader.blocks}
        held = {
            name: self._read_values(name, part, reader.blocks[keys[name]])
            for name, part in parts_of_kind("values", parts).items()
            if name in keys  # else it is of a layer that is missing
        }
        others = {part["name"]: reader.read_branch(part, held) for part in branches}
        # Not before all of them are read: a branch that cannot be restored refuses the load
        self.branches.restore(parts["history"]["branch"], others)
        reader.read_history(self.history, parts["history"], self.history.journal)

        def fill() -> None:
            for part, unit in waiting:
                self._fill(part, unit)
            self.editor.detached.rebook()

        return fill

    def _find_layer(self, part: PlainPart, units: Mapping[str, Unit], parked: Mapping[str, Unit]) -> Unit | None:
        """Find or build a parked layer, which may be parked here already, as it was part of the caller's model."""
        key, unit = part["key"], parked.get(part["key"])
        if unit is None:
            shell = self.editor.registry.shell
            there = {k: each.module for k, each in {**units, **parked}.items() if each is not shell}
            module = self.resumption.find_module(key, part["kind"], there)
            if module is None:
                return None
            for inner, name in part["shared"]:  # the copy has weights of its own where the layer had the model's
                path, _, attribute = inner.rpartition(".")
                module.get_submodule(path).register_parameter(attribute, self.editor.registry.model.get_parameter(name))
            unit = self.editor.layer_factory.make_empty(key, module)
        sizes = [block.layout.numel for block in unit.blocks if not block.shared]
        if sizes != (saved := [block["master"].numel() for block in part["blocks"]]):
            raise ValueError(
                f"layer {key} has {sizes} weights of its own and had {saved} when it was saved: build the model as it was when "
                "the relay was made"
            )
        return unit

    def _fill(self, part: PlainPart, unit: Unit) -> None:
        for (block, side), saved in zip(self.editor.detached[unit].entries.items(), part["blocks"], strict=True):
            block.copy_from(saved["master"])
            block.version, block.warmup = saved["version"], saved["warmup"]
            self.editor.set_block_trained(block, saved["trained"])
            side.groups[:] = saved["groups"]
            side.state.clear()
            states = zip(side.masters, saved["states"], strict=True)
            side.state.update({master: state for master, state in states if state is not None})
        unit.buffers.restore(part["buffers"])
        layer_entries.restore_removed_entries(unit.module, part["entries"])

    def _read_values(self, name: str, plain: PlainPart, block: Block) -> BlockSnapshot:
        if "master" in plain:
            master = self.empty(plain["master"].numel(), dtype=plain["master"].dtype).copy_(plain["master"])
            return self.branches.make_snapshot(master, plain["version"], plain["states"])
        part, numel = self.shard_of(block)
        master = self.empty(numel, dtype=block.values.dtype).zero_()
        return self.branches.make_snapshot(
            master, plain["version"], self.read_snapshot(name, block, part, master), part
        )
