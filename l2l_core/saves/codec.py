"""Changes, histories and branches as plain data, and back.

A layer stands there by its key, a block by its own, and a parameter by its number in its layer. Saves that people have are
read by these lines, so what is written of a kind of change is here to stay.
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


# Names of commands in saves, which stay whatever the classes are called.
_KINDS: Mapping[type, str] = {
    commands.RestackCommand: "Restack",
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
    """Describe a branch that is not trained now.

    Args:
        values: what the values of blocks are called in the save.
        present: see `plain_history`.
    """
    return {
        "name": name,
        "config": asdict(state.config),
        "steps": state.steps,
        "stacks": {stack: _keys(units) for stack, units in state.stacks.items()},
        "values": {
            key: snapshot_names[held] if held is not None else None for key, held in _by_key(state.snapshots).items()
        },
        "trained": {key: list(flags) for key, flags in _by_key(state.trained).items()},
        "buffers": _by_key(state.buffers),
        "settings": state.settings,
        "random": plain_random(state.random),
        "units": _keys(state.units),
        "stats": _by_key(state.stats),
        "journal": [asdict(entry) for entry in state.history.journal],
        **plain_history(state.history, present),
    }


def plain_history(history: History, present: Collection[Unit]) -> PlainPart:
    """Describe the way back and forth, without the journal; `present` are the layers that are not freed."""

    def plain(turn: UndoStep) -> list[Any]:
        number, changes = turn
        if gone := [unit for one in changes for unit in one.units() if unit not in present]:
            names = ", ".join(dict.fromkeys(_keys(gone)))  # as a whole: the rest of a turn alone would be another edit
            changes = (ImpossibleCommand(f"{names} was dropped for good: its bytes are gone, it cannot come back"),)
        return [number, [plain_command(one) for one in changes]]

    return {
        "loss": history.loss,
        "done": [*map(plain, history.undo_stack)],
        "undone": [*map(plain, history.redo_stack)],
    }


def plain_command(one: EditCommand) -> list[Any]:
    """Give the name of its kind, then what `Reader.read_command` makes it of."""
    match one:
        case commands.RestackCommand():
            form = [one.stack, _keys(one.before), _keys(one.after), [_keys(pair) for pair in one.like.items()]]
        case commands.RewriteCommand():
            form = [one.unit.key, [[i, *held] for i, held in _numbered(one.unit, one.values)]]
        case commands.SetTrainedCommand():
            form = [one.unit.key, [[i, flag] for i, flag in _numbered(one.unit, one.trained)]]
        case commands.SpillCommand() | commands.FetchCommand() | commands.FreeCommand():
            form = _keys(one.layers)
        case ImpossibleCommand():
            form = [one.why]
        case _:
            raise AssertionError(f"nothing says how a {type(one).__name__} is saved")
    return [_KINDS[type(one)], *form]


def plain_random(random: RandomState) -> PlainPart:
    """Describe the generators; `read_random` is the way back."""
    return {slot: getattr(random, slot) for slot in RandomState.__slots__}


def _keys(units: Iterable[Unit]) -> list[str]:
    return [unit.key for unit in units]


def _by_key(held: Mapping[Keyed, T]) -> dict[str, T]:
    return {each.key: value for each, value in held.items()}


def _numbered(unit: Unit, held: Mapping[nn.Parameter, T]) -> list[tuple[int, T]]:
    number = {param: i for i, param in enumerate(unit.params)}
    return [(number[param], value) for param, value in held.items()]


# -- and back ----------------------------------------------------------------------------------------------------------


@dataclass
class PlainReader:
    """Finds what keys in a save stand for.

    Args:
        editor: of the relay.
        units: the shell, layers and parked layers, by key.
        missing: why a layer is not among them, by key.
    """

    editor: Editor
    units: Mapping[str, Unit]
    missing: Mapping[str, str]
    blocks: dict[str, Block] = field(init=False)

    def __post_init__(self) -> None:
        self.blocks = {block.key: block for unit in self.units.values() for block in unit.blocks}

    def read_branch(self, part: PlainPart, snapshots: Mapping[str, BlockSnapshot]) -> BranchState:
        """Read what `plain_branch` was given.

        Args:
            held: values of blocks, by what they are called in the save.

        Raises:
            ValueError: one of its layers is missing; says how to give it.
        """
        missing = [key for keys in part["stacks"].values() for key in keys if key not in self.units]
        if missing:
            raise ValueError(f"the branch {part['name']!r} cannot be restored: {self.missing[missing[0]]}")
        history = History(self.editor)
        self.read_history(history, part, [JournalEntry(**row) for row in part["journal"]])
        values, trained = _select_present(self.blocks, part["values"]), _select_present(self.blocks, part["trained"])
        return BranchState(
            config=RelayConfig(**part["config"]),
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
        )

    def read_history(self, history: History, part: PlainPart, journal: Sequence[JournalEntry]) -> None:
        """Let `history` have this journal, and what `plain_history` was given."""
        history.loss = part["loss"]
        done, undone = (
            [UndoStep(number, self._read_commands(plain)) for number, plain in part[way]] for way in ("done", "undone")
        )
        history.restore(journal, done, undone)

    def _read_commands(self, plain: Sequence[Any]) -> tuple[EditCommand, ...]:
        try:
            found = tuple(self.read_command(*each) for each in plain)
        except KeyError as error:
            why = f"this was before the relay was loaded: {self.missing[error.args[0]]}"
            logger.warning("an edit cannot be undone: %s", why)
            return (ImpossibleCommand(why),)
        for one in found:  # now that all of them are found: what is barred keeps nothing
            if isinstance(one, commands.RewriteCommand):
                self.editor.book_snapshots(one, one.values.values())
        return found

    def read_command(self, kind: str, *form: Any) -> EditCommand:
        """Read what `plain_change` was given.

        Raises:
            KeyError: of a layer that is missing.
        """
        units = self.units
        match kind, *form:
            case "Restack", stack, before, after, pairs:
                # One of a pair may be gone: what comes back has its entries then (`layer_entries.py`), and is like none. It
                # stood so in the relay that was saved, so nothing has to be proven.
                like = {units[new]: units[old] for new, old in pairs if new in units and old in units}
                return commands.RestackCommand(stack, self._layers(before), self._layers(after), like, proven=True)
            case "Rewrite", key, values:
                return commands.RewriteCommand(
                    unit := units[key], {unit.params[i]: ParameterSnapshot(*held) for i, *held in values}
                )
            case "Retrain", key, trained:
                return commands.SetTrainedCommand(unit := units[key], {unit.params[i]: flag for i, flag in trained})
            case "Spill" | "Fetch" | "Lose", *keys:
                return _STORAGE_COMMANDS[kind](self._layers(keys))
            case "Barred", why:
                return ImpossibleCommand(why)
        raise AssertionError(f"nothing says how a {kind} is read")

    def _layers(self, keys: Iterable[str]) -> tuple[Unit, ...]:
        return tuple(self.units[key] for key in keys)


def _select_present(there: Mapping[str, Keyed], by_key: Mapping[str, T]) -> dict[Keyed, T]:
    """Leave out what is not there: layers that nobody could build, and that only an undo would have brought back."""
    return {there[key]: value for key, value in by_key.items() if key in there}


def parts_of_kind(kind: str, parts: Mapping[str, PlainPart]) -> dict[str, PlainPart]:
    """Select the parts of one kind by their names, which begin with it."""
    return {name: part for name, part in parts.items() if name.startswith(f"{kind}-")}


def read_random(plain: PlainPart) -> RandomState:
    """Read what `plain_random` was given, as much of it as this machine has generators for."""
    random = RandomState(**plain)
    if random.torch_cuda is not None and not torch.cuda.is_available():
        logger.warning("the save has a random state of CUDA, and there is no CUDA here: it is left out")
        return RandomState(random.torch_cpu, None, random.python)
    return random
