"""What a save holds beside the present state: the way back from edits, layers that wait for it, and other branches.

All of it is plain data with tensors in it, in parts: one for each parked layer, for each block's values of another
branch, and for each branch. The tensors of every part go to a file of their own. Values of which each worker has a part
are saved as weights of the present state are: every worker writes what it has (`manifest.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from l2l_core.edits import Branches, Editor, History, Parked, Values
from l2l_core.eps import Contents
from l2l_core.eps.blocks import Block, Empty, Layout, Unit
from l2l_core.saves.codec import Part, Reader, of_kind, plain_branch, plain_history
from l2l_core.saves.resume import Resumption
from l2l_core.surgery import kind_of, per_layer

# -- to plain data -----------------------------------------------------------------------------------------------------


def parts_of(editor: Editor, history: History, branches: Branches) -> dict[str, Part]:
    """Describe the past of a relay, by name of the part."""
    parts = {f"parked-{parked.unit.key}": _plain_layer(parked, editor.contents_of(parked)) for parked in editor.parking}
    present = editor.present
    names = _names_of(branches)
    for values, name in names.items():
        parts[name] = {"version": values.version}
        if values.part is None:
            parts[name] |= {"master": values.master, "states": values.states}
    for i, (name, state) in enumerate(branches.others.items()):
        parts[f"branch-{i}"] = plain_branch(name, state, names, present)
    parts["history"] = {"branch": branches.active, **plain_history(history, present)}
    return parts


def parts_of_values(branches: Branches) -> dict[str, tuple[Block, Values]]:
    """Give the values of other branches of which a worker has a part, each with its block, by name of the part."""
    names = _names_of(branches)
    held = (pair for state in branches.others.values() for pair in state.values.items())
    return {names[values]: (block, values) for block, values in held if values is not None and values.part is not None}


def _names_of(branches: Branches) -> dict[Values, str]:
    # By identity: what several branches hold together is written once, and held together again
    held = dict.fromkeys(v for state in branches.others.values() for v in state.values.values() if v is not None)
    return {values: f"values-{i}" for i, values in enumerate(held)}


def _plain_layer(parked: Parked, contents: Mapping[Block, Contents]) -> Part:
    unit = parked.unit
    return {
        "key": unit.key,
        "class": type(unit.module).__name__,
        "kind": kind_of(unit.module),
        "entries": per_layer.entries_of(unit.module),
        "blocks": [
            {
                "master": contents[block][0],
                "version": block.version,
                "warmup": block.warmup,
                "trained": [param.requires_grad for param in block.params],
                "groups": side.groups,
                "states": contents[block][1],
            }
            for block, side in parked.sides.items()
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
class Restorer:
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
    empty: Empty
    read: Callable[[str, Block, Layout | None, torch.Tensor], list[dict[str, Any] | None]]
    room: Callable[[Block], tuple[Layout | None, int]]

    def restore(self, parts: Mapping[str, Part]) -> Callable[[], None]:
        """Take over what `parts_of` gave.

        Returns:
            What gives parked layers their values. It cannot fail; until then, nothing of the caller's has changed.

        Raises:
            ValueError: a branch has a layer that nobody can build; says how to give it.
        """
        units = {unit.key: unit for unit in self.editor.lineup.units}
        missing: dict[str, str] = {}  # why, by key
        waiting: list[tuple[Part, Unit]] = []
        parked = {each.unit.key: each.unit for each in self.editor.parking}
        for part in of_kind("parked", parts).values():
            unit = self._layer(part, units, parked)
            if unit is None:
                missing[part["key"]] = self.resumption.missing(part["key"], part["class"])
            else:
                units[unit.key] = unit  # also as a pattern for those that come after it
                waiting.append((part, unit))
        reader = Reader(self.editor, units, missing)
        branches = [*of_kind("branch", parts).values()]
        keys = {name: key for branch in branches for key, name in branch["values"].items() if key in reader.blocks}
        held = {
            name: self._values(name, part, reader.blocks[keys[name]])
            for name, part in of_kind("values", parts).items()
            if name in keys  # else it is of a layer that is missing
        }
        others = {part["name"]: reader.branch(part, held) for part in branches}
        # Not before all of them are read: a branch that cannot be restored refuses the load
        self.branches.adopt(parts["history"]["branch"], others)
        reader.restore(self.history, parts["history"], self.history.journal)

        def fill() -> None:
            for part, unit in waiting:
                self._fill(part, unit)
            self.editor.parking.book_again()

        return fill

    def _layer(self, part: Part, units: Mapping[str, Unit], parked: Mapping[str, Unit]) -> Unit | None:
        """Find or build a parked layer, which may be parked here already, as it was part of the caller's model."""
        key, unit = part["key"], parked.get(part["key"])
        if unit is None:
            shell = self.editor.lineup.shell
            there = {k: each.module for k, each in {**units, **parked}.items() if each is not shell}
            module = self.resumption.find(key, part["kind"], there)
            if module is None:
                return None
            for inner, name in part["shared"]:  # the copy has weights of its own where the layer had the model's
                path, _, attribute = inner.rpartition(".")
                module.get_submodule(path).register_parameter(attribute, self.editor.lineup.model.get_parameter(name))
            unit = self.editor.new_layers.make_room(key, module)
        sizes = [block.layout.numel for block in unit.blocks if not block.shared]
        if sizes != (saved := [block["master"].numel() for block in part["blocks"]]):
            raise ValueError(
                f"layer {key} has {sizes} weights of its own and had {saved} when it was saved: build the model as it was when "
                "the relay was made"
            )
        return unit

    def _fill(self, part: Part, unit: Unit) -> None:
        for (block, side), saved in zip(self.editor.parking[unit].sides.items(), part["blocks"], strict=True):
            block.fill(saved["master"])
            block.version, block.warmup = saved["version"], saved["warmup"]
            self.editor.train_only(block, saved["trained"])
            side.groups[:] = saved["groups"]
            side.state.clear()
            states = zip(side.masters, saved["states"], strict=True)
            side.state.update({master: state for master, state in states if state is not None})
        unit.buffers.restore(part["buffers"])
        per_layer.remember_entries(unit.module, part["entries"])

    def _values(self, name: str, plain: Part, block: Block) -> Values:
        if "master" in plain:
            master = self.empty(plain["master"].numel(), dtype=plain["master"].dtype).copy_(plain["master"])
            return self.branches.keep(master, plain["version"], plain["states"])
        part, numel = self.room(block)
        master = self.empty(numel, dtype=block.values.dtype).zero_()
        return self.branches.keep(master, plain["version"], self.read(name, block, part, master), part)
