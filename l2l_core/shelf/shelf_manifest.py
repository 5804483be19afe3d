"""Which step of a shelf is whole: one file, replaced at the end of every step and edit, names the half of each block of it.

    folder/
      step.json                   which halves are current, how they lie in their files, settings of the optimizer
      step-00000012.safetensors   buffers of the model, random generators, settings that are tensors
      records/L000.a, L000.b ...  two halves per block
      lock                        held by the process that trains

The halves are on the disk itself before the manifest is; then one rename makes the step the current one. Whoever dies before it
leaves the old step, and whoever dies after it the new one.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors.torch import load_file

from l2l_core.devices import write_tensors
from l2l_core.eps import Masters
from l2l_core.eps.blocks import SHELL, Block, Unit
from l2l_core.eps.optimizers import load_settings, settings_to_save
from l2l_core.model import RandomState, Tensors, decode, encode, tensor_copier
from l2l_core.saves import plain_random, read_random, sync, write_bytes
from l2l_core.shelf.record_layout import RecordLayout
from l2l_core.shelf.record_store import BlockRecord, RecordStore

_NAME, _NEXT, _SCHEMA = "step.json", "step.json.tmp", 2


class StepManifest(Protocol):
    """Makes steps count.

    Attributes:
        steps: number of the last one.
    """

    steps: int

    def begin(self) -> None: ...
    def write_next(self, steps: int) -> None: ...
    def activate(self, steps: int) -> None: ...


@dataclass
class DryRunManifest:
    """Stands for a manifest while a step is tried, which for the disk there is not: the halves of the last whole one are kept."""

    steps: int

    def begin(self) -> None:
        pass

    def write_next(self, steps: int) -> None:
        pass

    def activate(self, steps: int) -> None:
        self.steps = steps


class ShelfManifest:
    """Writes and reads the manifest of a folder.

    Invariant: `steps` is the number of the whole step that the folder has.

    Args:
        folder: of the shelf.
        units: the shell and the layers.
        masters: the optimizer's side of them.
        records: of all blocks.

    Attributes:
        notes: what edits want to find again, plain data.
    """

    def __init__(self, folder: Path, units: Sequence[Unit], masters: Masters, records: RecordStore) -> None:
        self.steps = 0
        self.notes: dict[str, Any] = {}
        self._folder, self._masters, self._records = folder, masters, records
        self._random, self._tensors = RandomState.capture(), ""
        self.set_units(units, {})

    def set_units(self, units: Sequence[Unit], notes: dict[str, Any]) -> Callable[[], None]:
        """Let units be the shell and the layers from now on; the result puts back those that were.

        What they are is looked at now: layers that sit a step out are in the stack all the same.
        """
        before = {name: vars(self).get(name) for name in ("_units", "_sides", "_outline", "notes")}
        self._units, self.notes = tuple(units), notes
        self._sides = {block: self._masters.params_of(block) for unit in units for block in unit.blocks}
        self._outline = self._describe()
        return lambda: vars(self).update(before)

    @property
    def blocks(self) -> list[Block]:
        """All blocks of the stack, each once, in order."""
        return [*self._sides]

    def begin(self) -> None:
        """A step begins: the caller's generators stand where they will stand after it."""
        self._random = RandomState.capture()

    def write_next(self, steps: int) -> None:
        """Write the manifest of a step under another name, with the halves that are coming and the others that are current.

        Raises:
            OSError: it cannot be written; the old one is there.
        """
        tensors: Tensors = {}
        own_settings, settings = settings_to_save(self._masters.optimizer)
        name = next(name for name in _tensors_names(steps) if name != self._tensors)
        plain = {
            "schema": _SCHEMA,
            "torch": torch.__version__,
            "steps": steps,
            "tensors": name,
            "notes": self.notes,
            "outline": self._outline,
            "records": {block.key: _plain_record(block, self._records.latest(block)) for block in self._sides},
            "own_settings": encode(own_settings, "own_settings", tensors),
            "settings": encode(settings, "settings", tensors),
            "random": encode(plain_random(self._random), "random", tensors),
            "buffers": encode({unit.key: unit.buffers.copy() for unit in self._units}, "buffers", tensors),
        }
        self._next_tensors = name
        write_tensors({name: t.detach().cpu().contiguous().clone() for name, t in tensors.items()}, self._folder / name)
        sync(self._folder / name)
        sync(self._records.folder)  # files that are new there
        write_bytes(self._folder / _NEXT, json.dumps(plain).encode())

    def activate(self, steps: int) -> None:
        """Make the manifest that `prepare` has written the one that counts.

        Raises:
            OSError: the disk has failed; one of the two is in force, and nobody knows which.
        """
        os.replace(self._folder / _NEXT, self._folder / _NAME)
        sync(self._folder)
        self.steps, self._tensors = steps, self._next_tensors
        for path in self._folder.glob("step-*.safetensors"):
            if path.name != self._tensors:
                with suppress(OSError):  # the next step tries it again
                    path.unlink()

    def load(self) -> Callable[[], None]:
        """Read what the folder has; the result makes it the state of records, optimizer, buffers and generators.

        Raises:
            ValueError: there is nothing, or it is of another model or optimizer.
        """
        plain = read_plain(self._folder)
        _compare(self._folder, plain["outline"], json.loads(json.dumps(self._outline)))
        take = tensor_copier(load_file(self._folder / plain["tensors"]))
        settings = [*decode(plain["own_settings"], take), *decode(plain["settings"], take)]
        random, buffers = read_random(decode(plain["random"], take)), decode(plain["buffers"], take)

        def restore() -> None:
            for block, twins in self._sides.items():
                said = plain["records"][block.key]
                self._records.committed[block] = BlockRecord(
                    said["file"], said["half"], RecordLayout.from_plain(said["form"])
                )
                block.version, block.warmup = said["version"], said["warmup"]
                for param, twin, trained in zip(block.params, twins, said["trained"], strict=True):
                    param.requires_grad_(trained)
                    twin.requires_grad_(trained)
            load_settings(self._masters.optimizer, settings, exact=False)
            for unit in self._units:
                unit.buffers.restore(buffers[unit.key])
            random.restore()
            self.steps, self._random, self._tensors, self.notes = (
                plain["steps"],
                random,
                plain["tensors"],
                plain["notes"],
            )
            self._records.delete_orphans()

        return restore

    def _describe(self) -> dict[str, Any]:
        """Say what a model and an optimizer must be like to go on with this folder."""
        names = {p: name for block in self._sides for p, name in zip(block.params, block.names, strict=True)}
        parameters = {
            name: f"{list(piece.size)} {list(piece.stride)} in {block.key}"
            for block in self._sides
            for name, piece in zip(block.names, block.layout.pieces, strict=True)
        }
        groups = [[names[param] for param in group] for group in self._masters.groups]
        return {
            "layers": {unit.key: unit.name for unit in self._units},
            "parameters": parameters,
            "the optimizer": {"class": type(self._masters.optimizer).__name__},
            "parameter groups": {name: str(index) for index, group in enumerate(groups) for name in group},
        }


def _tensors_names(steps: int) -> tuple[str, str]:
    """Give two names: an edit after a step has tensors of the same step, and those of before are in force until then."""
    return f"step-{steps:08d}.safetensors", f"step-{steps:08d}-edited.safetensors"


def has_step(folder: Path) -> bool:
    """Whether the folder has a whole step."""
    return (folder / _NAME).exists()


def read_plain(folder: Path) -> dict[str, Any]:
    """Read the manifest of a folder.

    Raises:
        ValueError: it has none, it is damaged, or its schema is another one than this release reads.
    """
    path = folder / _NAME
    try:
        plain = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise ValueError(
            f"{path} is missing: no shelf was ever filled in this folder. Give the folder of one, or leave out resume=True"
        ) from None
    except ValueError as error:
        raise ValueError(f"{path} is damaged ({error}): restore the whole folder from a copy") from error
    if plain["schema"] != _SCHEMA:
        raise ValueError(
            f"{path} has schema {plain['schema']!r}, and this release of l2l_core reads schema {_SCHEMA}: go on with the release "
            "that wrote it, or give a new folder without resume=True"
        )
    return plain


def _plain_record(block: Block, record: BlockRecord) -> dict[str, Any]:
    return {
        "file": record.file,
        "half": record.copy_index,
        "form": record.layout.to_plain(),
        "version": block.version,
        "warmup": block.warmup,
        "trained": [param.requires_grad for param in block.params],
    }


def layer_keys_in(folder: Path, names: Sequence[str]) -> list[str] | None:
    """Give the keys that the layers of these names have in a folder; None if it has others.

    Raises:
        ValueError: as `read_plain`.
    """
    found = {name: key for key, name in read_plain(folder)["outline"]["layers"].items() if key != SHELL}
    return [found[name] for name in names] if found.keys() == set(names) else None


def _compare(folder: Path, saved: dict[str, Any], live: dict[str, Any]) -> None:
    for what in live:
        unlike = [
            f"{name}: {saved[what].get(name, 'absent')} in the folder, {live[what].get(name, 'absent')} here"
            for name in {**saved[what], **live[what]}
            if saved[what].get(name) != live[what].get(name)
        ]
        if unlike:
            raise ValueError(
                f"{folder} is the shelf of a model with other {what} ({len(unlike)} differ: {'; '.join(unlike[:3])}). Give the "
                "model and optimizer that it was made with, or another folder. Nothing was changed"
            )
