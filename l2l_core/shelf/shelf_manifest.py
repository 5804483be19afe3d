"""Manifest of a shelf: one file, replaced after every step and edit, that names the committed copy of each block.

    folder/
      step.json                   committed copies, their layouts, settings of the optimizer
      step-00000012.safetensors   buffers of the model, random generators, settings that are tensors
      records/L000.a, L000.b ...  two copies per block
      lock                        locked by the process that trains

The copies are flushed to the disk before the manifest; a rename then makes the step the current one. A crash before the rename
leaves the old step, a crash after it the new one.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

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


@dataclass
class DryRunManifest:
    """Manifest of a rehearsal, which writes nothing: the copies of the last whole step stay committed."""

    steps: int

    def begin(self) -> None:
        pass

    def write_next(self, steps: int) -> None:
        pass

    def activate(self, steps: int) -> None:
        self.steps = steps


class ShelfManifest:
    """Manifest in the folder of a shelf.

    Invariant: `steps` is the number of the whole step in the folder.

    Args:
        folder: folder of the shelf.
        units: the shell and the layers.
        masters: blocks and optimizer.
        records: records of all blocks.

    Attributes:
        notes: plain data that edits store.
    """

    def __init__(self, folder: Path, units: Sequence[Unit], masters: Masters, records: RecordStore) -> None:
        self.steps = 0
        self.notes: dict[str, Any] = {}
        self._folder, self._masters, self._records = folder, masters, records
        self._random, self._tensors = RandomState.capture(), ""
        self.set_units(units, {})

    def set_units(self, units: Sequence[Unit], notes: dict[str, Any]) -> Callable[[], None]:
        """Set the shell and the layers; the function returned restores the previous ones.

        The outline is computed here, where the stack has all its layers, also those that sit out a step.
        """
        before = {name: vars(self).get(name) for name in ("_units", "_params", "_outline", "notes")}
        self._units, self.notes = tuple(units), notes
        self._params = {block: self._masters.params_of(block) for unit in units for block in unit.blocks}
        self._outline = self._describe()
        return lambda: vars(self).update(before)

    @property
    def blocks(self) -> list[Block]:
        """All blocks of the stack in order."""
        return [*self._params]

    def begin(self) -> None:
        """Begin a step, and capture the random generators, whose state a step leaves as it is."""
        self._random = RandomState.capture()

    def write_next(self, steps: int) -> None:
        """Write the next manifest under a temporary name; it names pending copies, and committed ones of other blocks.

        Raises:
            OSError: it cannot be written; the old manifest stays valid.
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
            "records": {block.key: _plain_record(block, self._records.latest(block)) for block in self._params},
            "own_settings": encode(own_settings, "own_settings", tensors),
            "settings": encode(settings, "settings", tensors),
            "random": encode(plain_random(self._random), "random", tensors),
            "buffers": encode({unit.key: unit.buffers.copy() for unit in self._units}, "buffers", tensors),
        }
        self._next_tensors = name
        write_tensors({name: t.detach().cpu().contiguous().clone() for name, t in tensors.items()}, self._folder / name)
        sync(self._folder / name)
        sync(self._records.folder)  # new files
        write_bytes(self._folder / _NEXT, json.dumps(plain).encode())

    def activate(self, steps: int) -> None:
        """Replace the manifest by the one that `write_next` has written.

        Raises:
            OSError: the disk has failed, and either manifest may be the current one.
        """
        os.replace(self._folder / _NEXT, self._folder / _NAME)
        sync(self._folder)
        self.steps, self._tensors = steps, self._next_tensors
        for path in self._folder.glob("step-*.safetensors"):
            if path.name != self._tensors:
                with suppress(OSError):  # the next step tries again
                    path.unlink()

    def load(self) -> Callable[[], None]:
        """Read the manifest; the function returned restores records, optimizer settings, buffers and generators from it.

        Raises:
            ValueError: there is no manifest, or it belongs to another model or optimizer.
        """
        plain = read_plain(self._folder)
        _compare(self._folder, plain["outline"], json.loads(json.dumps(self._outline)))
        take = tensor_copier(load_file(self._folder / plain["tensors"]))
        settings = [*decode(plain["own_settings"], take), *decode(plain["settings"], take)]
        random, buffers = read_random(decode(plain["random"], take)), decode(plain["buffers"], take)

        def restore() -> None:
            for block, masters in self._params.items():
                saved = plain["records"][block.key]
                layout = RecordLayout(**saved["form"])
                self._records.committed[block] = BlockRecord(saved["file"], saved["half"], layout)
                block.version, block.warmup = saved["version"], saved["warmup"]
                for param, master, trained in zip(block.params, masters, saved["trained"], strict=True):
                    param.requires_grad_(trained)
                    master.requires_grad_(trained)
            load_settings(self._masters.optimizer, settings, exact=False)
            for unit in self._units:
                unit.buffers.restore(buffers[unit.key])
            random.restore()
            self.steps, self.notes = plain["steps"], plain["notes"]
            self._random, self._tensors = random, plain["tensors"]
            self._records.delete_orphans()

        return restore

    def _describe(self) -> dict[str, Any]:
        """Return the properties that a model and an optimizer must share with this folder."""
        names = {p: name for block in self._params for p, name in zip(block.params, block.names, strict=True)}
        parameters = {
            name: f"{list(piece.size)} {list(piece.stride)} in {block.key}"
            for block in self._params
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
    """Return two names: after an edit, old tensors of the same step are still in use."""
    return f"step-{steps:08d}.safetensors", f"step-{steps:08d}-edited.safetensors"


def has_step(folder: Path) -> bool:
    """Return whether the folder has a whole step."""
    return (folder / _NAME).exists()


def read_plain(folder: Path) -> dict[str, Any]:
    """Read the manifest of a folder.

    Raises:
        ValueError: it is missing or damaged, or this release cannot read its schema.
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
            f"{path} has schema {plain['schema']!r}, and this release of l2l_core reads schema {_SCHEMA}: use the release that "
            "wrote it, or give a new folder without resume=True"
        )
    return plain


def _plain_record(block: Block, record: BlockRecord) -> dict[str, Any]:
    return {
        "file": record.file,
        "half": record.copy_index,
        "form": asdict(record.layout),
        "version": block.version,
        "warmup": block.warmup,
        "trained": [param.requires_grad for param in block.params],
    }


def layer_keys_in(folder: Path, names: Sequence[str]) -> list[str] | None:
    """Return the keys in a folder of the layers with these names, or None if it has other layers.

    Raises:
        ValueError: as in `read_plain`.
    """
    keys = {name: key for key, name in read_plain(folder)["outline"]["layers"].items() if key != SHELL}
    return [keys[name] for name in names] if keys.keys() == set(names) else None


def _compare(folder: Path, saved: dict[str, Any], live: dict[str, Any]) -> None:
    for what, here in live.items():
        there = saved[what]
        unlike = [
            f"{name}: {there.get(name, 'absent')} in the folder, {here.get(name, 'absent')} here"
            for name in {**there, **here}
            if there.get(name) != here.get(name)
        ]
        if unlike:
            raise ValueError(
                f"{folder} is the shelf of a model with other {what} ({len(unlike)} differ: {'; '.join(unlike[:3])}). Give its "
                "model and optimizer, or another folder. Nothing was changed"
            )
