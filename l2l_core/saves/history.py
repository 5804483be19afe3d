"""What a save holds beside the present state: the way back from edits, layers that wait for it, and other branches.

All of it is plain data with tensors in it, in parts: one for each parked layer, for each block's values of another
branch, and for each branch. `folder.py` writes every part to a file of its own.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from l2l_core.config import RelayConfig
from l2l_core.edits import Barred, Branches, Change, Editor, Entry, History, Parked, State, Turn, Values, change
from l2l_core.eps.blocks import Block, Unit
from l2l_core.model import RandomState
from l2l_core.saves.folder import usable
from l2l_core.saves.resume import Resumption
from l2l_core.surgery import kind_of, per_layer

logger = logging.getLogger("l2l_core")

Part = dict[str, Any]
_KINDS = {
    kind.__name__: kind
    for kind in (
        change.Restack,
        change.Rewrite,
        change.Retrain,
        change.Spill,
        change.Fetch,
        change.Lose,
        Barred,
    )
}


# -- to plain data -----------------------------------------------------------------------------------------------------


def parts_of(editor: Editor, history: History, branches: Branches) -> dict[str, Part]:
    """The past of a relay, by name of the part."""
    parts = {f"parked-{parked.unit.key}": _plain_layer(parked) for parked in editor.parking}
    held = dict.fromkeys(v for state in branches.others.values() for v in state.values.values() if v is not None)
    names = {values: f"values-{i}" for i, values in enumerate(held)}
    for values, name in names.items():
        parts[name] = {"master": values.master, "version": values.version, "states": values.states}
    for i, (name, state) in enumerate(branches.others.items()):
        parts[f"branch-{i}"] = _plain_branch(name, state, names, editor)
    parts["history"] = {"branch": branches.active, "loss": history.loss, **_plain_turns(history, editor)}
    return parts


def _plain_layer(parked: Parked) -> Part:
    unit = parked.unit
    contents = parked.contents()
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


def _plain_branch(name: str, state: State, values: Mapping[Values, str], editor: Editor) -> Part:
    return {
        "name": name,
        "config": asdict(state.config),
        "steps": state.steps,
        "stacks": {stack: [unit.key for unit in units] for stack, units in state.stacks.items()},
        "values": {block.key: values[held] if held is not None else None for block, held in state.values.items()},
        "trained": {block.key: list(flags) for block, flags in state.trained.items()},
        "buffers": {unit.key: buffers for unit, buffers in state.buffers.items()},
        "settings": state.settings,
        "random": {slot: getattr(state.random, slot) for slot in RandomState.__slots__},
        "units": [unit.key for unit in state.units],
        "stats": {unit.key: stats for unit, stats in state.stats.items()},
        "journal": [asdict(entry) for entry in state.history.journal],
        "loss": state.history.loss,
        **_plain_turns(state.history, editor),
    }


def _plain_turns(history: History, editor: Editor) -> Part:
    present = editor.present
    return {
        "done": [_plain_turn(turn, present) for turn in history.done],
        "undone": [_plain_turn(turn, present) for turn in history.undone],
    }


def _plain_turn(turn: Turn, present: set[Unit]) -> list[Any]:
    number, changes = turn
    if gone := [unit.key for one in changes for unit in one.units() if unit not in present]:
        changes = (
            Barred(f"{', '.join(dict.fromkeys(gone))} was dropped for good: its bytes are gone, it cannot come back"),
        )
    return [number, [[type(one).__name__, *one.to_plain()] for one in changes]]


# -- and back ----------------------------------------------------------------------------------------------------------


@dataclass
class Restorer:
    """Gives a relay that has the saved stacks its past.

    Args:
        editor, history, branches: of the relay.
        resumption: finds modules for parked layers.
        empty: makes a float32 host buffer of so many elements.
    """

    editor: Editor
    history: History
    branches: Branches
    resumption: Resumption
    empty: Callable[[int], torch.Tensor]

    def restore(self, parts: Mapping[str, Part]) -> Callable[[], None]:
        """Take over what `parts_of` gave; nothing, of a save that knows no past.

        Returns:
            What gives parked layers their values. It cannot fail; until then, nothing of the caller's has changed.

        Raises:
            ValueError: a branch has a layer that nobody can build; says how to give it.
        """
        if not parts:
            return lambda: None
        units = {unit.key: unit for unit in self.editor.lineup.units}
        self._missing: dict[str, str] = {}  # why, by key
        waiting: list[tuple[Part, Unit]] = []
        parked = {each.unit.key: each.unit for each in self.editor.parking}
        for name, part in parts.items():
            if name.startswith("parked-") and (unit := self._layer(part, units, parked)) is not None:
                units[unit.key] = unit
                waiting.append((part, unit))
        blocks = {block.key: block for unit in units.values() for block in unit.blocks}
        held = {name: self._values(part) for name, part in parts.items() if name.startswith("values-")}
        others = {}
        for name, part in parts.items():
            if name.startswith("branch-"):
                self._check_complete(part, units)
                others[part["name"]] = self._branch(part, units, blocks, held)
        self.branches.adopt(parts["history"]["branch"], others)
        self.history.loss = parts["history"]["loss"]
        done, undone = (self._turns(parts["history"][which], units) for which in ("done", "undone"))
        self.history.continue_from(self.history.journal, done, undone)

        def fill() -> None:
            for part, unit in waiting:
                self._fill(part, unit)
            self.editor.parking.book_again()

        return fill

    def _layer(self, part: Part, units: Mapping[str, Unit], parked: Mapping[str, Unit]) -> Unit | None:
        """A parked layer, which may be parked here already, as it was part of the caller's model."""
        key, unit = part["key"], parked.get(part["key"])
        if unit is None:
            shell = self.editor.lineup.shell
            there = {k: each.module for k, each in {**units, **parked}.items() if each is not shell}
            module = self.resumption.find(key, part["kind"], there)
            if module is None:
                self._missing[key] = self.resumption.missing(key, part["class"])
                return None
            for inner, name in part["shared"]:
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
            block.master.copy_(saved["master"])
            block.version, block.warmup = saved["version"], saved["warmup"]
            self.editor.train_only(block, saved["trained"])
            side.groups[:] = saved["groups"]
            side.state.clear()
            states = zip(side.masters, saved["states"], strict=True)
            side.state.update({master: state for master, state in states if state is not None})
        unit.buffers.restore(part["buffers"])
        per_layer.remember_entries(unit.module, part["entries"])

    def _values(self, part: Part) -> Values:
        master = self.empty(part["master"].numel()).copy_(part["master"])
        return self.branches.keep(master, part["version"], part["states"])

    def _branch(
        self, part: Part, units: Mapping[str, Unit], blocks: Mapping[str, Block], held: Mapping[str, Values]
    ) -> State:
        history = History(self.editor)
        journal = [Entry(**row) for row in part["journal"]]
        history.continue_from(journal, self._turns(part["done"], units), self._turns(part["undone"], units))
        history.loss = part["loss"]
        return State(
            config=RelayConfig(**part["config"]),
            steps=part["steps"],
            history=history,
            stacks={stack: tuple(units[key] for key in keys) for stack, keys in part["stacks"].items()},
            values={blocks[key]: held[name] if name else None for key, name in part["values"].items() if key in blocks},
            trained={blocks[key]: tuple(flags) for key, flags in part["trained"].items() if key in blocks},
            buffers={units[key]: buffers for key, buffers in part["buffers"].items() if key in units},
            settings=part["settings"],
            random=usable(RandomState(**part["random"])),
            stats={units[key]: stats for key, stats in part["stats"].items() if key in units},
            units=tuple(units[key] for key in part["units"] if key in units),
        )

    def _check_complete(self, part: Part, units: Mapping[str, Unit]) -> None:
        missing = [key for keys in part["stacks"].values() for key in keys if key not in units]
        if missing:
            raise ValueError(f"the branch {part['name']!r} cannot be restored: {self._missing[missing[0]]}")

    def _turns(self, turns: Sequence[Any], units: Mapping[str, Unit]) -> list[Turn]:
        return [Turn(number, self._changes(changes, units)) for number, changes in turns]

    def _changes(self, changes: Sequence[Any], units: Mapping[str, Unit]) -> tuple[Change, ...]:
        try:
            found = tuple(_KINDS[kind].from_plain(plain, units) for kind, *plain in changes)
        except KeyError as error:
            why = f"this was before the relay was loaded: {self._missing[error.args[0]]}"
            logger.warning("an edit cannot be undone: %s", why)
            return (Barred(why),)
        for one in found:
            if isinstance(one, change.Rewrite):
                self.editor.book_kept(one, one.values.values())
        return found
