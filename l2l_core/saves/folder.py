"""A folder that always holds one whole save: bytes, files and crashes. Of what is saved it knows nothing but names.

A save is a manifest and tensors in several files, JSON and safetensors. Nothing in it is pickled, so loading executes
nothing::

    folder/
      latest.json                    names the current generation, and the checksum of its manifest
      step-00000012-5f3a91c2/        one generation, never changed once it is named
        manifest.json                what is saved, besides tensors; size and checksum of each other file
        *.safetensors                tensors

Crashes: a generation is written and synced under a name that nothing refers to; then one `os.replace` of latest.json
switches to it; then older ones and leftovers of crashes are deleted. (Renaming a folder would not do: a rename cannot
replace a folder that has files in it.) One process at a time may save to a folder; any number may load from it.

Memory: tensors are written from where they are and mapped when read, file by file, without a second copy of the model.

Checksums: sha256, so that `sha256sum` can check them too. At 1.2 GB/s it is a quarter to a half of what writing a file
takes, and is taken while the next file is written: a save of 2 GB in 20 layers takes as long as one without. (crc32
would be at 2.7 GB/s. Measured on an AMD EPYC with SHA instructions and a disk of about 1 GB/s.)
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import secrets
import shutil
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from safetensors import SafetensorError
from safetensors.torch import load_file

from l2l_core.devices import is_full, no_room, write_tensors
from l2l_core.model import Tensors

_SCHEMA = 1
_POINTER, _MANIFEST = "latest.json", "manifest.json"
_GENERATION = re.compile(r"step-\d{8,}-[0-9a-f]{8}")

_AFTER_FULL = (
    "Free some, or save to another disk. Nothing is lost: the last save in this folder is as it was, the relay goes on"
)


class Generation(NamedTuple):
    """Is one save in a folder.

    Attributes:
        path: of the manifest.
        manifest: plain data.
        tensors: those of all files, mapped from them.
    """

    path: Path
    manifest: dict[str, Any]
    tensors: Tensors


# -- write -------------------------------------------------------------------------------------------------------------


def write(folder: Path, steps: int, manifest: Mapping[str, Any], contents: Mapping[str, Tensors]) -> None:
    """Write a generation and make it the folder's only one; whatever goes wrong, the folder keeps its last good save.

    Args:
        folder: is made if there is none.
        steps: are in the generation's name.
        manifest: plain data that JSON can hold.
        contents: the tensors of each file, by its name without suffix.

    Raises:
        OSError: disk full (says how much is needed, and free), no permission, and so on.
    """
    if not folder.is_dir():
        new = [path for path in (folder, *folder.parents) if not path.exists()]
        folder.mkdir(parents=True, exist_ok=True)
        for path in new:  # a folder is only safe from a power cut when the one that lists it is
            _sync(path.parent)
    if current := _current(folder):  # without a good pointer nobody knows which one is, so all stay for now
        _delete_generations(folder, but=current)  # first of all: what crashed saves left may be what fills the disk
    generation = folder / f"step-{steps:08d}-{secrets.token_hex(4)}"
    try:
        generation.mkdir()
        files = _write_tensors(generation, {f"{name}.safetensors": tensors for name, tensors in contents.items()})
        encoded = json.dumps({"schema": _SCHEMA, **manifest, "files": files}).encode()
        _write(generation / _MANIFEST, encoded)
        _sync(generation)  # before the pointer: after a power cut it must not name what never reached the disk
        _sync(folder)
        _point(folder, generation.name, encoded)
    except BaseException as error:
        if _current(folder) != generation.name:  # else it failed after the switch, and this is the only good save
            shutil.rmtree(generation, ignore_errors=True)
        if is_full(error):
            needed_bytes = sum(tensor.nbytes for tensors in contents.values() for tensor in tensors.values())
            raise no_room(error, folder, needed_bytes, _AFTER_FULL) from error
        raise
    _delete_generations(folder, but=generation.name)


def _write_tensors(generation: Path, contents: Mapping[str, Tensors]) -> dict[str, Any]:
    """Write the files and return their fingerprints, which are taken while the next file is being written."""
    with ThreadPoolExecutor(1) as pool:  # leaving it waits: nobody deletes a file that is still being read
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
    # Written whole under another name first: a reader finds the old pointer or the new one, never half of one
    os.replace(folder / f"{_POINTER}.tmp", folder / _POINTER)
    _sync(folder)


def _current(folder: Path) -> str | None:
    """Read which generation the folder's pointer names; None where there is no good pointer."""
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


# -- read --------------------------------------------------------------------------------------------------------------


def read(folder: Path) -> Generation:
    """Read what `write` wrote, and check every file of it.

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
    """Read the name of the current generation and the checksum of its manifest."""
    path = folder / _POINTER
    try:
        pointer = json.loads(path.read_bytes())
        generation, checksum = pointer["generation"], pointer["manifest_sha256"]
        if not _GENERATION.fullmatch(generation):
            raise ValueError(f"{generation!r} is not a generation")
        return generation, checksum
    except (FileNotFoundError, NotADirectoryError):
        cause = "no save was ever finished in this folder" if folder.is_dir() else "there is no such folder"
        raise ValueError(f"{path} is missing: {cause}. Give the folder that relay.save(folder) returned") from None
    except (ValueError, LookupError, TypeError) as error:
        raise _damaged(path, str(error)) from error


def _read_generation(generation: Path, checksum: str) -> Generation:
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
    return Generation(path, manifest, {name: tensor for part in parts for name, tensor in part.items()})


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
