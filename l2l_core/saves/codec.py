"""Conversion of edits, histories and branches to plain data and back.

Layers and blocks are represented by their keys, parameters by their index in the layer. Released saves use this format, so the
form of each kind of edit must not change.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, TypeVar

import torch
from torch import nn

from l2l_core.config import RelayConfig
from l2l_core.edits import (
    BlockSnapshot,
    BranchState,
    EditCommand,
    Editor,
    History,
    ImpossibleCommand,
    JournalEntry,
    ParameterSnapshot,
    UndoStep,
    commands,
)
from l2l_core.eps.blocks import Block, Unit
from l2l_core.model import RandomState

logger = logging.getLogger("l2l_core")

PlainPart = dict[str, Any]
T = TypeVar("T")
Keyed = TypeVar("Keyed", Unit, Block)

# Names of commands in saves, independent of the names of the classes
_KINDS: Mapping[type, str] = {
    commands.RestackCommand: "Restack",
    commands.SetLoopsCommand: "Loops",
    commands.RewriteCommand: "Rewrite",
    commands.SetTrainedCommand: "Retrain",
    commands.SpillCommand: "Spill",
    commands.FetchCommand: "Fetch",
    commands.FreeCommand: "Lose",
    ImpossibleCommand: "Barred",
}
_STORAGE_COMMANDS = {"Spill": commands.SpillCommand, "Fetch": commands.FetchCommand, "Lose": commands.FreeCommand}


# -- to plain data -----------------------------------------------------------------------------------------------------


def plain_branch(
    name: str, state: BranchState, snapshot_names: Mapping[BlockSnapshot, str], present: Collection[Unit]
) -> PlainPart:
    """Return an inactive branch as plain data."""
    return {
        "name": name,
        "config": state.config.to_plain(),
        "steps": state.steps,
        "stacks": {stack: _keys(units) for stack, units in state.stacks.items()},
        "values": {key: value and snapshot_names[value] for key, value in _by_key(state.snapshots).items()},
        "trained": {key: list(flags) for key, flags in _by_key(state.trained).items()},
        "buffers": _by_key(state.buffers),
        "settings": state.settings,
        "random": plain_random(state.random),
        "units": _keys(state.units),
        "stats": _by_key(state.stats),
        "loops": state.loops,
        "journal": [asdict(entry) for entry in state.history.journal],
        **plain_history(state.history, present),
    }


def plain_history(history: History, present: Collection[Unit]) -> PlainPart:
    """Return undo and redo stacks, without the journal, as plain data; `present` are the layers that are not freed."""

    def plain(step: UndoStep) -> list[Any]:
        number, changes = step
        if freed := [unit for one in changes for unit in one.units() if unit not in present]:
            # The whole step: its other commands alone would be another edit
            names = ", ".join(dict.fromkeys(_keys(freed)))
            changes = (
                ImpossibleCommand(f"{names} was dropped for good: its weights are deleted and cannot be restored"),
            )
        return [number, [plain_command(one) for one in changes]]

    return {
        "loss": history.loss,
        "done": [*map(plain, history.undo_stack)],
        "undone": [*map(plain, history.redo_stack)],
    }


def plain_command(one: EditCommand) -> list[Any]:
    """Return the name of a command, followed by the arguments of `PlainReader.read_command`."""
    match one:
        case commands.RestackCommand():
            form = [one.stack, _keys(one.before), _keys(one.after), [_keys(pair) for pair in one.like.items()]]
        case commands.SetLoopsCommand():
            form = [one.stack, dict(one.numbers)]
        case commands.RewriteCommand():
            form = [one.unit.key, [[i, *value] for i, value in _numbered(one.unit, one.values)]]
        case commands.SetTrainedCommand():
            form = [one.unit.key, [[i, flag] for i, flag in _numbered(one.unit, one.trained)]]
        case commands.SpillCommand() | commands.FetchCommand() | commands.FreeCommand():
            form = _keys(one.layers)
        case ImpossibleCommand():
            form = [one.why]
        case _:
            raise AssertionError(f"no format for a {type(one).__name__}")
    return [_KINDS[type(one)], *form]


def plain_random(random: RandomState) -> PlainPart:
    """Return the random state as plain data; the inverse of `read_random`."""
    return {slot: getattr(random, slot) for slot in RandomState.__slots__}


def _keys(units: Iterable[Unit]) -> list[str]:
    return [unit.key for unit in units]


def _by_key(values: Mapping[Keyed, T]) -> dict[str, T]:
    return {item.key: value for item, value in values.items()}


def _numbered(unit: Unit, values: Mapping[nn.Parameter, T]) -> list[tuple[int, T]]:
    index = {param: i for i, param in enumerate(unit.params)}
    return [(index[param], value) for param, value in values.items()]


# -- from plain data ----------------------------------------------------------------------------------------------------------


@dataclass
class PlainReader:
    """Reader of plain data, which resolves the keys of layers and blocks."""

    editor: Editor
    units: Mapping[str, Unit]
    missing: Mapping[str, str]  # reasons for the absence of other layers, by key
    config: RelayConfig  # of the relay
    blocks: dict[str, Block] = field(init=False)

    def __post_init__(self) -> None:
        self.blocks = {block.key: block for unit in self.units.values() for block in unit.blocks}

    def read_branch(self, part: PlainPart, snapshots: Mapping[str, BlockSnapshot]) -> BranchState:
        """Return the branch from the result of `plain_branch`.

        Raises:
            ValueError: one of its layers is missing; explains how to supply it.
        """
        missing = [key for keys in part["stacks"].values() for key in keys if key not in self.units]
        if missing:
            raise ValueError(f"the branch {part['name']!r} cannot be restored: {self.missing[missing[0]]}")
        history = History(self.editor)
        self.read_history(history, part, [JournalEntry(**row) for row in part["journal"]])
        values, trained = _select_present(self.blocks, part["values"]), _select_present(self.blocks, part["trained"])
        return BranchState(
            config=RelayConfig.from_plain(part["config"], self.config),
            steps=part["steps"],
            history=history,
            stacks={stack: self._layers(keys) for stack, keys in part["stacks"].items()},
            snapshots={block: snapshots[name] if name else None for block, name in values.items()},
            trained={block: tuple(flags) for block, flags in trained.items()},
            buffers=_select_present(self.units, part["buffers"]),
            settings=part["settings"],
            random=read_random(part["random"]),
            stats=_select_present(self.units, part["stats"]),
            units=tuple(_select_present(self.units, dict.fromkeys(part["units"]))),
            loops=part.get("loops", {}),
        )

    def read_history(self, history: History, part: PlainPart, journal: Sequence[JournalEntry]) -> None:
        """Fill `history` with a journal and with the result of `plain_history`."""
        history.loss = part["loss"]
        done, undone = (
            [UndoStep(number, self._read_commands(plain)) for number, plain in part[name]]
            for name in ("done", "undone")
        )
        history.restore(journal, done, undone)

    def _read_commands(self, plain: Sequence[Any]) -> tuple[EditCommand, ...]:
        try:
            read = tuple(self.read_command(*each) for each in plain)
        except KeyError as error:
            why = f"the edit was made before the relay was loaded: {self.missing[error.args[0]]}"
            logger.warning("an edit cannot be undone: %s", why)
            return (ImpossibleCommand(why),)
        for one in read:  # after all are read: an impossible command keeps no snapshots
            if isinstance(one, commands.RewriteCommand):
                self.editor.book_snapshots(one, one.values.values())
        return read

    def read_command(self, kind: str, *form: Any) -> EditCommand:
        """Return the command from the result of `plain_command`.

        Raises:
            KeyError: the key of a missing layer.
        """
        units = self.units
        match kind, *form:
            case "Restack", stack, before, after, pairs:
                # One of a pair may be missing: the other has its optimizer entries (`layer_entries.py`) and needs no pattern.
                # `proven`, since the stack was valid in the relay that was saved
                like = {units[new]: units[old] for new, old in pairs if new in units and old in units}
                return commands.RestackCommand(stack, self._layers(before), self._layers(after), like, proven=True)
            case "Loops", stack, numbers:
                return commands.SetLoopsCommand(stack, numbers)
            case "Rewrite", key, values:
                snapshots = {units[key].params[i]: ParameterSnapshot(*value) for i, *value in values}
                return commands.RewriteCommand(units[key], snapshots)
            case "Retrain", key, trained:
                return commands.SetTrainedCommand(unit := units[key], {unit.params[i]: flag for i, flag in trained})
            case "Spill" | "Fetch" | "Lose", *keys:
                return _STORAGE_COMMANDS[kind](self._layers(keys))
            case "Barred", why:
                return ImpossibleCommand(why)
        raise AssertionError(f"no format for a {kind}")

    def _layers(self, keys: Iterable[str]) -> tuple[Unit, ...]:
        return tuple(self.units[key] for key in keys)


def _select_present(present: Mapping[str, Keyed], by_key: Mapping[str, T]) -> dict[Keyed, T]:
    """Map present layers or blocks to values; missing layers, which only an undo would have restored, are omitted."""
    return {present[key]: value for key, value in by_key.items() if key in present}


def parts_of_kind(kind: str, parts: Mapping[str, PlainPart]) -> dict[str, PlainPart]:
    """Return the parts whose names begin with `kind` and a hyphen."""
    return {name: part for name, part in parts.items() if name.startswith(f"{kind}-")}


def read_random(plain: PlainPart) -> RandomState:
    """Return the random state from the result of `plain_random`, without generators that this machine lacks."""
    random = RandomState(**plain)
    if random.torch_cuda is not None and not torch.cuda.is_available():
        logger.warning("the random state of CUDA in the save is ignored: CUDA is not available")
        return RandomState(random.torch_cpu, None, random.python)
    return random
