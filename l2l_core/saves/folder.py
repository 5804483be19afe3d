"""Save and resume: a relay on disk, so that another process continues bit by bit where this one stood.

A save is a folder of safetensors and JSON. Nothing in it is pickled, so loading executes nothing::

    folder/
      latest.json                    names the current generation, and the checksum of its manifest
      step-00000012-5f3a91c2/        one generation, never changed once it is named
        manifest.json                config, step, layers, versions, optimizer settings; size and checksum of each file
        shell.safetensors            weights, buffers and optimizer state of the shell ...
        L000.safetensors             ... and of every layer, by its key; shared weights are in the first that holds them
        relay.safetensors            random generators, and settings that are tensors

Crashes: a generation is written and synced under a name that nothing refers to; then one `os.replace` of latest.json
switches to it; then older ones and leftovers of crashes are deleted. (Renaming a folder would not do: a rename cannot
replace a folder that has files in it.) One process at a time may save to a folder; any number may load from it.

Memory: tensors are written from the masters and mapped when read, file by file, without a second copy of the model.

Checksums: sha256, so that `sha256sum` can check them too. At 1.2 GB/s it is a quarter to a half of what writing a file
takes, and is taken while the next file is written: a save of 2 GB in 20 layers takes as long as one without. (crc32
would be at 2.7 GB/s. Measured on an AMD EPYC with SHA instructions and a disk of about 1 GB/s.)

What it is not: nothing of the model's structure is saved, nor Python attributes of modules, their training mode,
NumPy's generator, or learning-rate schedulers. Save ``scheduler.state_dict()`` yourself. To resume with one, make the
optimizer and the scheduler first, pass that optimizer to `Relay.load`, then load the scheduler's state: a scheduler
made afterwards sets the learning rate back to its first value.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import secrets
import shutil
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import nn

from l2l_core.config import RelayConfig
from l2l_core.devices import is_full, no_room, write_tensors
from l2l_core.eps import LayerStore
from l2l_core.eps.blocks import Block, Unit
from l2l_core.eps.optimizers import put, to_save
from l2l_core.model import RandomState, Tensors, decode, encode
from l2l_core.surgery import ties_of

logger = logging.getLogger("l2l_core")

_SCHEMA = 1
_POINTER, _MANIFEST, _COMMON = "latest.json", "manifest.json", "relay.safetensors"
_GENERATION = re.compile(r"step-\d{8,}-[0-9a-f]{8}")

_AFTER_FULL = (
    "Free some, or save to another disk. Nothing is lost: the last save in this folder is as it was, the relay goes on"
)


# -- what is saved -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class State:
    """What there is to save of a relay, or to restore into one: its own tensors, not copies of them.

    Attributes:
        config: fields of the relay's configuration.
        steps: completed steps.
        units: the shell, then the layers in order.
        store: the EPS of these units.
        random_state: the thread's generators.
        edits: what was edited, as plain data.
        past: parts of what is beside the present state, by name; plain data and tensors (see `history.py`).
    """

    config: dict[str, Any]
    steps: int
    units: tuple[Unit, ...]
    store: LayerStore
    random_state: RandomState
    edits: dict[str, Any]
    past: dict[str, dict[str, Any]]

    @staticmethod
    def of(
        config: RelayConfig,
        steps: int,
        shell: Unit,
        layers: Sequence[Unit],
        store: LayerStore,
        random_state: RandomState,
        edits: dict[str, Any],
        past: dict[str, dict[str, Any]],
    ) -> State:
        """The state of a relay between two steps."""
        return State(asdict(config), steps, (shell, *layers), store, random_state, edits, past)

    @property
    def keys_and_names(self) -> list[list[str]]:
        """Permanent key and dotted name of every unit."""
        return [[unit.key, unit.name] for unit in self.units]

    @property
    def blocks(self) -> dict[Block, Unit]:
        """Every block, with the first unit that holds it."""
        held: dict[Block, Unit] = {}
        for unit in self.units:
            for block in unit.blocks:
                held.setdefault(block, unit)
        return held

    @property
    def versions(self) -> dict[str, int]:
        return {block.key: block.version for block in self.blocks}

    @property
    def trainable(self) -> list[str]:
        """Names of the parameters that are not frozen."""
        return sorted(n for b in self.blocks for n, p in zip(b.names, b.params, strict=True) if p.requires_grad)

    @property
    def masters(self) -> dict[str, nn.Parameter]:
        """The optimizer's parameters, by the names of the model's."""
        names = {p: name for b in self.blocks for name, p in zip(b.names, b.params, strict=True)}
        return {names[param]: master for master, param in self.store.masters.model_params.items()}

    @property
    def ties(self) -> list[list[str]]:
        """Names that stand for one tensor."""
        return ties_of(self.units[0].module)

    @property
    def optimizer_class(self) -> str:
        return type(self.store.optimizer).__name__

    def groups(self) -> list[list[str]]:
        """Names of the parameters in every group of the optimizer."""
        names = {master: name for name, master in self.masters.items()}
        return [[names[param] for param in group["params"]] for group in self.store.optimizer.param_groups]

    def tensors(self) -> dict[str, Tensors]:
        """Weights and buffers (non-persistent ones too) as they are now, by name, for each unit's key."""
        held: dict[str, Tensors] = {unit.key: {} for unit in self.units}
        for block, unit in self.blocks.items():
            held[unit.key] |= {f"weights/{n}": view for n, view in zip(block.names, block.views, strict=True)}
        shell, *layers = self.units
        for name, buffer in shell.module.named_buffers():
            unit = next((unit for unit in layers if name.startswith(f"{unit.name}.")), shell)
            held[unit.key][f"buffers/{name}"] = buffer
        return held


# -- save --------------------------------------------------------------------------------------------------------------


def save(folder: Path, state: State) -> Path:
    """Save `state` to `folder` and return the folder; whatever goes wrong, the folder keeps its last good save.

    Raises:
        ValueError: the optimizer keeps something that is neither tensor nor plain data.
        OSError: disk full (says how much is needed, and free), no permission, and so on.
    """
    manifest, contents = _describe(state)
    if not folder.is_dir():
        folder.mkdir(parents=True, exist_ok=True)
        _sync(folder.parent)
    if current := _current(folder):
        _delete_generations(folder, but=current)  # first of all: what crashed saves left may be what fills the disk
    generation = folder / f"step-{state.steps:08d}-{secrets.token_hex(4)}"
    try:
        generation.mkdir()
        manifest["files"] = _write_tensors(generation, contents)
        _write(generation / _MANIFEST, encoded := json.dumps(manifest).encode())
        _sync(generation)
        _sync(folder)
        _point(folder, generation.name, encoded)
    except BaseException as error:
        if _current(folder) != generation.name:
            shutil.rmtree(generation, ignore_errors=True)
        if is_full(error):
            raise no_room(error, folder, _nbytes(contents), _AFTER_FULL) from error
        raise
    _delete_generations(folder, but=generation.name)
    return folder


def _nbytes(contents: Mapping[str, Tensors]) -> int:
    return sum(tensor.nbytes for tensors in contents.values() for tensor in tensors.values())


def _describe(state: State) -> tuple[dict[str, Any], dict[str, Tensors]]:
    """The manifest, without the list of files, and what tensors each file is to hold."""
    optimizer, masters, contents = state.store.optimizer, state.masters, state.tensors()
    optimizer_state = {}
    for tensors in contents.values():
        for name in [name.removeprefix("weights/") for name in tensors if name.startswith("weights/")]:
            if masters[name] in optimizer.state:
                optimizer_state[name] = encode(optimizer.state[masters[name]], f"optimizer/{name}", tensors)
    own_settings, settings = to_save(optimizer)
    common: Tensors = {}
    parts: dict[str, Tensors] = {name: {} for name in state.past}
    manifest = {
        "schema": _SCHEMA,
        "torch": torch.__version__,
        "steps": state.steps,
        "config": state.config,
        "units": state.keys_and_names,
        "versions": state.versions,
        "ties": state.ties,
        "warmups": {block.key: block.warmup for block in state.blocks if block.warmup},
        "edits": state.edits,
        "past": {name: encode(part, f"past/{name}", parts[name]) for name, part in state.past.items()},
        "trainable": state.trainable,
        "optimizer": state.optimizer_class,
        "groups": state.groups(),
        "settings": encode(settings, "settings", common),
        "own_settings": encode(own_settings, "own_settings", common),  # attributes and defaults
        "optimizer_state": optimizer_state,
        "random": encode({n: getattr(state.random_state, n) for n in RandomState.__slots__}, "random", common),
    }
    contents |= {name: tensors for name, tensors in parts.items() if tensors}
    return manifest, {**{f"{key}.safetensors": tensors for key, tensors in contents.items()}, _COMMON: common}


def _write_tensors(generation: Path, contents: Mapping[str, Tensors]) -> dict[str, Any]:
    """Write the files and return their fingerprints, which are taken while the next file is being written."""
    with ThreadPoolExecutor(1) as pool:
        sealed = {name: pool.submit(_seal, _write_file(generation / name, t)) for name, t in contents.items()}
    return {name: seal.result() for name, seal in sealed.items()}


def _write_file(path: Path, tensors: Tensors) -> Path:
    content = {name: t.detach().cpu().contiguous() for name, t in tensors.items()}
    # Buffers may overlap, and safetensors refuses tensors that do.
    write_tensors({name: t.clone() if name.startswith("buffers/") else t for name, t in content.items()}, path)
    path.chmod(path.parent.stat().st_mode & 0o666)  # safetensors leaves it to the owner alone
    return path


def _seal(path: Path) -> dict[str, Any]:
    _sync(path)
    return _fingerprint(path)


def _write(path: Path, content: bytes) -> None:
    path.write_bytes(content)
    _sync(path)


def _point(folder: Path, generation: str, manifest: bytes) -> None:
    """Make `generation` the current one: this is the moment of the save."""
    pointer = {"generation": generation, "manifest_sha256": hashlib.sha256(manifest).hexdigest()}
    _write(folder / f"{_POINTER}.tmp", json.dumps(pointer).encode())
    os.replace(folder / f"{_POINTER}.tmp", folder / _POINTER)
    _sync(folder)


def _current(folder: Path) -> str | None:
    """The generation that the folder's pointer names; None where there is no good pointer."""
    try:
        return _read_pointer(folder)[0]
    except ValueError:
        return None


def _delete_generations(folder: Path, but: str) -> None:
    """Delete generations except one; what cannot be deleted now is tried again by the next save."""
    for path in folder.iterdir():
        if _GENERATION.fullmatch(path.name) and path.name != but:
            shutil.rmtree(path, ignore_errors=True)


def _sync(path: Path) -> None:
    """Wait until a file, or the list of files of a folder, is on the disk itself."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _fingerprint(path: Path) -> dict[str, Any]:
    with open(path, "rb") as file:
        return {"bytes": os.fstat(file.fileno()).st_size, "sha256": hashlib.file_digest(file, "sha256").hexdigest()}


# -- load --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Saved:
    """A save whose files are complete and undamaged; its tensors are mapped from them."""

    path: Path  # of the manifest
    manifest: dict[str, Any]
    tensors: Tensors

    @property
    def config(self) -> dict[str, Any]:
        return self.manifest["config"]

    @property
    def steps(self) -> int:
        return self.manifest["steps"]

    @property
    def layers(self) -> dict[str, str]:
        """Dotted names of the layers by key, in order."""
        return dict(self.manifest["units"][1:])

    @property
    def past(self) -> dict[str, dict[str, Any]]:
        """What `State.past` was, in memory of its own."""
        return {name: decode(part, self.tensors, {}) for name, part in self.manifest.get("past", {}).items()}

    def restore_into(self, state: State) -> None:
        """Give the relay that `state` was taken from the saved weights, buffers, optimizer and random state.

        It must have passed `check`.
        """
        live, masters, optimizer = _merged(state.tensors().values()), state.masters, state.store.optimizer
        read: Tensors = {}
        settings = decode(self.manifest["settings"], self.tensors, read)
        own_settings = decode(self.manifest.get("own_settings", []), self.tensors, read)
        encoded = self.manifest["optimizer_state"]
        optimizer_state = {masters[name]: decode(values, self.tensors, read) for name, values in encoded.items()}
        random_state = RandomState(**decode(self.manifest["random"], self.tensors, read))
        # All memory is taken and nothing can fail from here on, where the relay begins to change.
        with torch.no_grad():
            for name, tensor in live.items():
                _copy(tensor, self.tensors[name])
        only = bool(optimizer.state)  # it has trained before: what it has counted goes
        optimizer.state.clear()
        optimizer.state.update(optimizer_state)
        put(optimizer, [*own_settings, *settings], only)
        state.store.masters.book_state()
        for block in state.blocks:
            block.version = self.manifest["versions"][block.key]
            block.warmup = self.manifest.get("warmups", {}).get(block.key, 0)
        usable(random_state).put()

    def check(self, state: State) -> None:
        """Whether the relay that `state` was taken from can take over this save.

        Raises:
            ValueError: it is of another model or optimizer.
        """
        path, saved = self.path, self.manifest
        self.compare_layers(saved["units"], state.keys_and_names)
        self._compare("parameters and buffers", _shapes(self.tensors), _shapes(_merged(state.tensors().values())))
        if "ties" in saved:
            self._compare("shared weights", _tied(saved["ties"]), _tied(state.ties))
        self._compare("blocks of weights", _together(saved["versions"]), _together(state.versions))
        self._compare("frozen parameters", _trained(saved["trainable"]), _trained(state.trainable))
        self._compare("the optimizer", {"class": saved["optimizer"]}, {"class": state.optimizer_class})
        self._compare("parameter groups", _members(saved["groups"]), _members(state.groups()))
        if saved["torch"] != torch.__version__:
            logger.warning("%s is by torch %s, here is %s: bits may differ", path, saved["torch"], torch.__version__)

    def compare_layers(self, saved: Iterable[Sequence[str]], live: Iterable[Sequence[str]]) -> None:
        """Compare keys and names of units.

        Raises:
            ValueError: they differ.
        """
        self._compare("layers", _listed(saved), _listed(live))

    def _compare(self, what: str, saved: Mapping[str, str], live: Mapping[str, str]) -> None:
        pairs = {name: (saved.get(name, "absent"), live.get(name, "absent")) for name in {**saved, **live}}
        unlike = [f"{name}: {a} in the save, {b} here" for name, (a, b) in pairs.items() if a != b]
        if unlike:
            raise ValueError(
                f"{self.path} was saved with other {what} ({len(unlike)} differ: {'; '.join(unlike[:3])}). Build the "
                "model and the optimizer as they were when it was saved, and change them after loading"
            )


def load(folder: Path) -> Saved:
    """Read what `save` wrote, and check every file of it.

    Raises:
        ValueError: there is no save, it is damaged or incomplete, or of another schema; names the file.
    """
    while True:
        pointer = _read_pointer(folder)
        try:
            return _read_generation(folder / pointer[0], pointer[1])
        except ValueError:
            if _read_pointer(folder) == pointer:
                raise
            # Another process has saved meanwhile and deleted what was being read here.


def _read_pointer(folder: Path) -> tuple[str, str]:
    """Name of the current generation and checksum of its manifest."""
    path = folder / _POINTER
    try:
        pointer = json.loads(path.read_bytes())
        generation, checksum = pointer["generation"], pointer["manifest_sha256"]
        if not _GENERATION.fullmatch(generation):
            raise ValueError(f"{generation!r} is no generation")
        return generation, checksum
    except (FileNotFoundError, NotADirectoryError):
        cause = "no save was ever finished in this folder" if folder.is_dir() else "there is no such folder"
        raise ValueError(f"{path} is missing: {cause}. Give the folder that relay.save(folder) returned") from None
    except (ValueError, LookupError, TypeError) as error:
        raise _damaged(path, str(error)) from error


def _read_generation(generation: Path, checksum: str) -> Saved:
    path = generation / _MANIFEST
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        raise _damaged(path, "it is missing") from None
    if hashlib.sha256(content).hexdigest() != checksum:
        raise _damaged(path, f"its sha256 is not the one in {generation.parent / _POINTER}")
    manifest = json.loads(content)
    if manifest["schema"] != _SCHEMA:
        raise ValueError(
            f"{path} has schema {manifest['schema']} and this version of l2l_core reads {_SCHEMA}: load it with the "
            "version that saved it"
        )
    with ThreadPoolExecutor() as pool:  # checksums take most of the time
        parts = list(
            pool.map(_read_file, [generation / name for name in manifest["files"]], manifest["files"].values())
        )
    return Saved(path, manifest, _merged(parts))


def _read_file(path: Path, expected: Mapping[str, Any]) -> Tensors:
    try:
        found = _fingerprint(path)
        if found["bytes"] != expected["bytes"]:
            raise _damaged(path, f"it has {found['bytes']:,} bytes and should have {expected['bytes']:,}")
        if found != expected:
            raise _damaged(path, "its content has changed (sha256)")
        return load_file(path)
    except FileNotFoundError:
        raise _damaged(path, "it is missing") from None
    except SafetensorError as error:
        raise _damaged(path, str(error)) from error


def _damaged(path: Path, cause: str) -> ValueError:
    return ValueError(
        f"{path} is damaged: {cause}. Restore the file or the whole folder from a copy, or load another save; nothing "
        "has been loaded"
    )


def _copy(target: torch.Tensor, saved: torch.Tensor) -> None:
    """Copy into `target`, which may be an expanded buffer: each element once."""
    once = tuple(slice(1) if stride == 0 else slice(None) for stride in target.stride())
    target[once].copy_(saved[once])


def usable(random_state: RandomState) -> RandomState:
    """As much of a saved random state as this machine has generators for."""
    if random_state.torch_cuda is not None and not torch.cuda.is_available():
        logger.warning("the save has a random state of CUDA, and there is no CUDA here: it is left out")
        return RandomState(random_state.torch_cpu, None, random_state.python)
    return random_state


def _merged(parts: Iterable[Tensors]) -> Tensors:
    return {name: tensor for part in parts for name, tensor in part.items()}


def _shapes(tensors: Tensors) -> dict[str, str]:
    """What a model's tensors must agree in."""
    own = {name: t for name, t in tensors.items() if name.startswith(("weights/", "buffers/"))}
    return {name: f"{tuple(t.shape)} {str(t.dtype).removeprefix('torch.')}" for name, t in own.items()}


def _listed(units: Iterable[Sequence[str]]) -> dict[str, str]:
    return {f"[{index}]": f"{key} {name}" for index, (key, name) in enumerate(units)}


def _members(groups: Sequence[Sequence[str]]) -> dict[str, str]:
    members = {name: f"group {index}" for index, names in enumerate(groups) for name in names}
    return members | {"number of groups": str(len(groups))}


def _tied(ties: Iterable[Sequence[str]]) -> dict[str, str]:
    return {name: f"one with {', '.join(sorted({*names} - {name}))}" for names in ties for name in names}


def _together(versions: Iterable[str]) -> dict[str, str]:
    return dict.fromkeys(versions, "present")


def _trained(names: Iterable[str]) -> dict[str, str]:
    return dict.fromkeys(names, "trained")
