"""A folder that always holds one whole save: names, generations and crashes. Of what is saved it knows nothing but names.

A save is a manifest and tensors in several files, JSON and safetensors. Nothing in it is pickled, so loading executes
nothing::

    folder/
      latest.json                    names the current generation, and the checksum of its manifest
      step-00000012-5f3a91c2/        one generation, never changed once it is named
        manifest.json                what is saved, besides tensors; size and checksum of each other file
        *.safetensors                tensors
        rank-000/                    of several workers: what worker 0 alone has, and has written by itself
          part.json                  as a manifest of these files; the manifest has the checksum of it
          *.safetensors
        rank-001/ ...

Crashes: a generation is written and synced under a name that nothing refers to; then one `os.replace` of latest.json
switches to it; then older ones and leftovers of crashes are deleted. (Renaming a folder would not do: a rename cannot
replace a folder that has files in it.) One process at a time, or the workers of one relay, may save to a folder; any number
may load from it. How a generation is written is in `generation_writer.py`.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from l2l_core.model import Tensors
from l2l_core.saves.files import damaged_error, read_file, read_json, sync, write_bytes

_POINTER, MANIFEST = "latest.json", "manifest.json"
SINGLE_WORKER, SEVERAL_WORKERS = 1, 2  # schemas of a manifest: by one worker, and by several, of which each has a part
_GENERATION = re.compile(r"step-\d{8,}-[0-9a-f]{8}")


class WorkerPart(NamedTuple):
    """Is what one worker had, as it was read: plain data, and tensors that are mapped from its files."""

    plain: dict[str, Any]
    tensors: Tensors


class Generation(NamedTuple):
    """Is one save in a folder.

    Attributes:
        path: of the manifest.
        manifest: plain data.
        tensors: what is there once, mapped from files; of one worker alone all there is.
        parts: of each worker, by its number.
    """

    path: Path
    manifest: dict[str, Any]
    tensors: Tensors
    parts: list[WorkerPart]


# -- the current generation --------------------------------------------------------------------------------------------


def set_current(folder: Path, generation: str, manifest_sha256: str) -> None:
    """Make a generation the current one."""
    pointer = {"generation": generation, "manifest_sha256": manifest_sha256}
    write_bytes(folder / f"{_POINTER}.tmp", json.dumps(pointer).encode())
    # Written whole under another name first: a reader finds the old pointer or the new one, never half of one
    os.replace(folder / f"{_POINTER}.tmp", folder / _POINTER)
    sync(folder)


def current_generation(folder: Path) -> str | None:
    """Read which generation the folder's pointer names; None where there is no good pointer."""
    try:
        return _read_pointer(folder)[0]
    except ValueError:
        return None


def delete_generations(folder: Path, but: str) -> None:
    """Delete generations except one; what cannot be deleted now is tried again by the next save."""
    for path in folder.iterdir():
        if _GENERATION.fullmatch(path.name) and path.name != but:
            shutil.rmtree(path, ignore_errors=True)


# -- read --------------------------------------------------------------------------------------------------------------


def read_current(folder: Path, rank: int = 0, count: int = 1) -> Generation:
    """Read what was written, and check every file of it.

    Args:
        rank, count: of a worker, where several read the folder: each compares the content of every so many files, and the
            others' sizes. What it does not use of a file it does not read.

    Raises:
        ValueError: there is no save, it is damaged or incomplete, or of another schema; names the file.
    """
    while True:
        pointer = _read_pointer(folder)
        try:
            return _read_generation(folder / pointer[0], pointer[1], rank, count)
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
        raise damaged_error(path, str(error)) from error


def _read_generation(generation: Path, checksum: str, rank: int, count: int) -> Generation:
    path = generation / MANIFEST
    manifest = read_json(path, checksum, generation.parent / _POINTER)
    if manifest["schema"] not in (SINGLE_WORKER, SEVERAL_WORKERS):
        raise ValueError(
            f"{path} has schema {manifest['schema']!r}, and this release of l2l_core reads schemas {SINGLE_WORKER} and {SEVERAL_WORKERS}: load it "
            "with the release that wrote it, or train and save again with this one"
        )
    said = manifest.get("parts", {})
    plain = {(generation / name).parent: read_json(generation / name, s["sha256"], path) for name, s in said.items()}
    told = [
        (folder / name, s) for folder, p in {generation: manifest, **plain}.items() for name, s in p["files"].items()
    ]
    with ThreadPoolExecutor() as pool:  # checksums take most of the time
        compared = [index % count == rank for index in range(len(told))]
        tensors = list(pool.map(read_file, *zip(*told, strict=True), compared))
    held: dict[Path, Tensors] = {folder: {} for folder in (generation, *plain)}
    for (file, _), each in zip(told, tensors, strict=True):
        held[file.parent] |= each
    parts = [WorkerPart(each, held[folder]) for folder, each in plain.items()]
    return Generation(path, manifest, held[generation], parts or [WorkerPart(manifest, held[generation])])
