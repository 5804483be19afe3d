"""Manifest of a shelf: one file, replaced after every step and edit, that names the committed copy of each block.

    folder/
      step.json                   committed copies, their layouts, settings of the optimizer
      step-00000012.safetensors   buffers of the model, random generators, settings that are tensors
      records/L000.a, L000.b ...  two copies per block
      lock                        locked by the process that trains

The copies are flushed to the disk before the manifest; a rename then makes the step the current one. A crash before the rename
leaves the old step, a crash after it the new one.

Each of several workers has such a folder, and renames its manifest when all have written theirs. If some are killed between their
renames, the others' manifests wait under their temporary names, and `complete_commit` renames them.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file

from l2l_core.devices import write_tensors
from l2l_core.eps import Masters
from l2l_core.eps.blocks import SHELL, Block, Unit
from l2l_core.eps.optimizers import load_settings, settings_to_save
from l2l_core.model import RandomState, Tensors, decode, encode, tensor_copier
from l2l_core.saves import describe_differences, plain_random, read_random, sync, write_bytes
from l2l_core.shelf.record_store import BlockRecord, RecordLayout, RecordStore

_NAME, _NEXT, _SCHEMA = "step.json", "step.json.tmp", 3


class ShelfManifest:
    """Manifest in the folder of a shelf.

    Invariant: `steps` is the number of the whole step in the folder.

    Args:
        workers: number of workers, each with a folder.
        own_loss: see the attribute.
        wait_for_all: returns when all workers have written their next manifest, and raises if one cannot.

    Attributes:
        units: the shell and the layers.
        notes: plain data that edits store.
        run: identifier of the shelf, the same for all workers.
        own_loss: True if the loss or the objective of this run, or of an earlier one, is the user's.
        is_rehearsal: whether steps are not to be recorded in the folder.
    """

    def __init__(
        self,
        folder: Path,
        units: Sequence[Unit],
        masters: Masters,
        records: RecordStore,
        workers: int,
        own_loss: bool,
        wait_for_all: Callable[[], object],
    ) -> None:
        self.steps = self._commits = 0
        self._workers, self._wait_for_all = workers, wait_for_all
        self.notes: dict[str, Any] = {}
        self.run, self.own_loss = "", own_loss
        self.is_rehearsal = False
        self.masters, self.records, self._folder = masters, records, folder
        self._random, self._tensors = RandomState.capture(), ""
        self.set_units(units, {})

    def set_units(self, units: Sequence[Unit], notes: dict[str, Any]) -> Callable[[], None]:
        """Set the shell and the layers; the function returned restores the previous ones.

        The outline is computed here, where the stack has all its layers, also those that sit out a step.
        """
        before = {name: vars(self).get(name) for name in ("units", "_params", "_outline", "notes")}
        self.units, self.notes = tuple(units), notes
        self._params = {block: self.masters.params_of(block) for unit in units for block in unit.blocks}
        self._outline = self._describe()
        return lambda: vars(self).update(before)

    @property
    def blocks(self) -> list[Block]:
        """All blocks of the stack in order."""
        return [*self._params]

    def begin(self) -> None:
        """Begin a step, and capture the random generators, whose state a step leaves as it is."""
        self._random = RandomState.capture()

    def commit(self, steps: int) -> None:
        """Make the pending copies, and the state of the random generators at `begin`, those of step `steps`.

        Raises:
            OSError: it cannot be written; the old manifest stays valid, unless the disk fails at the very end.
        """
        if self.is_rehearsal:
            self.records.commit(lambda: None, partial(setattr, self, "steps", steps))
        else:
            self.records.commit(partial(self._write_next, steps), partial(self._activate, steps))

    def _write_next(self, steps: int) -> None:
        """Write the next manifest under a temporary name; it names pending copies, and committed ones of other blocks."""
        tensors: Tensors = {}
        own_settings, settings = settings_to_save(self.masters.optimizer)
        # An edit after a step writes tensors for the same step while the old ones are still in use
        names = f"step-{steps:08d}.safetensors", f"step-{steps:08d}-edited.safetensors"
        name = next(name for name in names if name != self._tensors)
        plain = {
            "schema": _SCHEMA,
            "torch": torch.__version__,
            "workers": self._workers,
            "commits": self._commits + 1,
            "run": self.run,
            "own_loss": self.own_loss,
            "steps": steps,
            "tensors": name,
            "notes": self.notes,
            "outline": self._outline,
            "records": {block.key: _plain_record(block, self.records.latest(block)) for block in self._params},
            "own_settings": encode(own_settings, "own_settings", tensors),
            "settings": encode(settings, "settings", tensors),
            "random": encode(plain_random(self._random), "random", tensors),
            "buffers": encode({unit.key: unit.buffers.copy() for unit in self.units}, "buffers", tensors),
        }
        self._next_tensors = name
        write_tensors({name: t.detach().cpu().contiguous().clone() for name, t in tensors.items()}, self._folder / name)
        sync(self._folder / name)
        sync(self.records.folder)  # new files
        write_bytes(self._folder / _NEXT, json.dumps(plain).encode())
        self._wait_for_all()

    def _activate(self, steps: int) -> None:
        """Replace the manifest by the one that `_write_next` has written; after an error either may be the current one."""
        os.replace(self._folder / _NEXT, self._folder / _NAME)
        sync(self._folder)
        self._tensors = self._next_tensors
        for path in self._folder.glob("step-*.safetensors"):
            if path.name != self._tensors:
                with suppress(OSError):  # the next step tries again
                    path.unlink()
        self.steps, self._commits = steps, self._commits + 1

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
                self.records.committed[block] = BlockRecord(saved["file"], saved["half"], layout)
                block.version, block.warmup = saved["version"], saved["warmup"]
                for param, master, trained in zip(block.params, masters, saved["trained"], strict=True):
                    param.requires_grad_(trained)
                    master.requires_grad_(trained)
            load_settings(self.masters.optimizer, settings, exact=False)
            for unit in self.units:
                unit.buffers.restore(buffers[unit.key])
            random.restore()
            self.steps, self._commits, self.notes = plain["steps"], plain["commits"], plain["notes"]
            self.run = plain["run"]
            self.own_loss |= plain.get("own_loss", False)  # shelves of 0.2.0 lack the entry
            self._random, self._tensors = random, plain["tensors"]
            self.records.delete_orphans()

        return restore

    def _describe(self) -> dict[str, Any]:
        """Return the properties that a model and an optimizer must share with this folder."""
        names = {p: name for block in self._params for p, name in zip(block.params, block.names, strict=True)}
        parameters = {
            name: f"{list(piece.size)} {list(piece.stride)} in {block.key}"
            + (f" of {piece.dtype}" if piece.dtype else "")
            for block in self._params
            for name, piece in zip(block.names, block.layout.pieces, strict=True)
        }
        groups = [[names[param] for param in group] for group in self.masters.groups]
        return {
            "layers": {unit.key: unit.name for unit in self.units},
            "parameters": parameters,
            "the optimizer": {"class": type(self.masters.optimizer).__name__},
            "parameter groups": {name: str(index) for index, group in enumerate(groups) for name in group},
        }


def has_step(folder: Path) -> bool:
    """Return whether the folder has a whole step."""
    return (folder / _NAME).exists()


def complete_commit(folder: Path, gather: Callable[[list[_Commit]], list[_Commit]]) -> None:
    """Rename the next manifest if another worker has renamed its own; `gather` returns the commits of all workers.

    Raises:
        ValueError: the folders of the workers do not belong together.
    """
    prepared = _prepared_commit(folder)
    plain = read_plain(folder) if has_step(folder) else {"run": prepared.run, "commits": 0}
    commits = gather([own := _Commit(plain["run"], plain["commits"])])
    if len({commit.run for commit in commits}) > 1:
        raise ValueError(
            f"{folder} and the folders of other workers are not of one shelf (identifiers by worker: "
            f"{[commit.run[:8] for commit in commits]}): put the folders of one shelf side by side. Nothing was changed"
        )
    if own.number == (latest := max(commit.number for commit in commits)):
        return
    if prepared != (own.run, latest):
        raise ValueError(
            f"{folder} is older than the folders of other workers (number of commits by worker: "
            f"{[commit.number for commit in commits]}): restore all of them from copies of one time. Nothing was changed"
        )
    os.replace(folder / _NEXT, folder / _NAME)
    sync(folder)


def has_prepared_step(folder: Path) -> bool:
    """Return whether the folder has no whole step, but one that only needs to be renamed."""
    return not has_step(folder) and _prepared_commit(folder).number == 1


class _Commit(NamedTuple):
    run: str
    number: int


def _prepared_commit(folder: Path) -> _Commit:
    """Return the commit of the next manifest; its number is -1 if none was written to its end."""
    try:
        plain = json.loads((folder / _NEXT).read_bytes())
        return _Commit(plain["run"], plain["commits"])
    except (OSError, ValueError, KeyError):  # no worker has renamed its own then; a KeyError: of a former schema
        return _Commit("", -1)


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
        if unlike := describe_differences("folder", saved[what], here):
            raise ValueError(
                f"{folder} is the shelf of a model with other {what} ({unlike}). Give its model and optimizer, or another "
                "folder. Nothing was changed"
            )
