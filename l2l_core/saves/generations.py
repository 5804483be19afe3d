"""A folder that always holds one complete save, also after a crash.

A save is a manifest and tensors in several files, JSON and safetensors. Nothing is pickled, so loading executes no code::

    folder/
      latest.json                    name of the current generation, and the checksum of its manifest
      step-00000012-5f3a91c2/        one generation, never changed once it is current
        manifest.json                plain data; size and checksum of each other file
        *.safetensors                tensors
        rank-000/                    with several workers: the part of worker 0
          part.json                  manifest of the part; its checksum is in manifest.json
          *.safetensors
        rank-001/ ...

A generation is written and flushed under a name that nothing refers to; one `os.replace` of latest.json then makes it current;
older generations and leftovers of crashes are deleted last. (A folder cannot be renamed over another one that has files.) One
process, or the workers of one relay, may save to a folder at a time; any number may load from it. `generation_writer.py` writes
generations.

Tensors are written from their storages and mapped when read, without a second copy of the model. A checksum, sha256, takes a
quarter to a half of the time of writing a file, and is computed while the next file is written: a save of 2 GB in 20 layers
takes as long as one without. (Measured at 1.2 GB/s on an AMD EPYC with SHA instructions and a disk of about 1 GB/s; crc32
reaches 2.7 GB/s.)
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from safetensors import SafetensorError
from safetensors.torch import load_file

from l2l_core.devices import write_tensors
from l2l_core.model import Tensors

FileDigest = dict[str, Any]  # bytes and sha256 of a file


# -- write -------------------------------------------------------------------------------------------------------------


def write_files(folder: Path, contents: Iterable[tuple[str, Tensors]]) -> dict[str, FileDigest]:
    """Write files, given by name without suffix and tensors; return the digest of each by its name with suffix."""
    with ThreadPoolExecutor(
        1
    ) as pool:  # its exit waits, also after an error, so that no file is deleted while it is read
        paths = ((f"{name}.safetensors", tensors) for name, tensors in contents)
        digests = {name: pool.submit(_sync_and_digest, _write_file(folder / name, tensors)) for name, tensors in paths}
    return {name: digest.result() for name, digest in digests.items()}


def write_json(path: Path, plain: Mapping[str, Any]) -> FileDigest:
    """Write plain data as JSON; return the digest."""
    content = json.dumps(plain).encode()
    write_bytes(path, content)
    return {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}


def write_bytes(path: Path, content: bytes) -> None:
    """Write a file and flush it to the disk."""
    path.write_bytes(content)
    sync(path)


def sync(path: Path) -> None:
    """Flush a file, or the entries of a folder, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _write_file(path: Path, tensors: Tensors) -> Path:
    content = {name: t.detach().cpu().contiguous() for name, t in tensors.items()}
    # Buffers may overlap, which safetensors refuses
    write_tensors({name: t.clone() if name.startswith("buffers/") else t for name, t in content.items()}, path)
    path.chmod(path.parent.stat().st_mode & 0o666)  # safetensors makes it readable for the owner alone
    return path


def _sync_and_digest(path: Path) -> FileDigest:
    sync(path)
    return _digest(path)


def _digest(path: Path) -> FileDigest:
    with open(path, "rb") as file:
        return {"bytes": os.fstat(file.fileno()).st_size, "sha256": hashlib.file_digest(file, "sha256").hexdigest()}


# -- read --------------------------------------------------------------------------------------------------------------


def read_json(path: Path, sha256: str, listed_in: Path) -> dict[str, Any]:
    """Read plain data from JSON.

    Raises:
        ValueError: the file is missing or damaged.
    """
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        raise damaged_error(path, "it is missing") from None
    if hashlib.sha256(content).hexdigest() != sha256:
        raise damaged_error(path, f"its sha256 is not the one in {listed_in}")
    return json.loads(content)


def read_file(path: Path, digest: FileDigest, read_all: bool = True) -> Tensors:
    """Map the tensors of a file.

    Args:
        path: path of the file.
        digest: expected size and checksum.
        read_all: compare the checksum too, not only the size.

    Raises:
        ValueError: the file is missing or damaged.
    """
    try:
        found = _digest(path) if read_all else {**digest, "bytes": path.stat().st_size}
        if found["bytes"] != digest["bytes"]:
            raise damaged_error(path, f"it has {found['bytes']:,} bytes and should have {digest['bytes']:,}")
        if found != digest:
            raise damaged_error(path, "its content has changed (sha256)")
        return load_file(path)
    except FileNotFoundError:
        raise damaged_error(path, "it is missing") from None
    except SafetensorError as error:
        raise damaged_error(path, str(error)) from error


def damaged_error(path: Path, cause: str) -> ValueError:
    """Return the error for a damaged file."""
    return ValueError(
        f"{path} is damaged: {cause}. Restore the file or the whole folder from a copy, or load another save; nothing "
        "has been loaded"
    )


_POINTER, MANIFEST = "latest.json", "manifest.json"
SINGLE_WORKER, SEVERAL_WORKERS = 1, 2  # schemas of a manifest: without and with a part per worker
_GENERATION = re.compile(r"step-\d{8,}-[0-9a-f]{8}")


class WorkerPart(NamedTuple):
    """Part of one worker: plain data, and tensors mapped from its files."""

    plain: dict[str, Any]
    tensors: Tensors


class Generation(NamedTuple):
    """A save, as read from its folder.

    Attributes:
        path: path of the manifest.
        manifest: plain data.
        tensors: common tensors, mapped from files; all tensors if one worker saved alone.
        parts: part of each worker, by rank.
    """

    path: Path
    manifest: dict[str, Any]
    tensors: Tensors
    parts: list[WorkerPart]


# -- the current generation --------------------------------------------------------------------------------------------


def set_current(folder: Path, generation: str, manifest_sha256: str) -> None:
    """Make a generation the current one, atomically."""
    pointer = {"generation": generation, "manifest_sha256": manifest_sha256}
    write_bytes(folder / f"{_POINTER}.tmp", json.dumps(pointer).encode())
    os.replace(folder / f"{_POINTER}.tmp", folder / _POINTER)
    sync(folder)


def current_generation(folder: Path) -> str | None:
    """Return the name of the current generation, or None without a valid pointer."""
    try:
        return _read_pointer(folder)[0]
    except ValueError:
        return None


def delete_generations(folder: Path, but: str) -> None:
    """Delete all generations except `but`; the next save retries failed deletions."""
    for path in folder.iterdir():
        if _GENERATION.fullmatch(path.name) and path.name != but:
            shutil.rmtree(path, ignore_errors=True)


# -- read --------------------------------------------------------------------------------------------------------------


def read_current(folder: Path, rank: int = 0, count: int = 1) -> Generation:
    """Read the current generation and check all of its files.

    Args:
        folder: folder of the save.
        rank: rank of this worker, if several read the folder.
        count: number of workers; each compares the checksums of every `count`-th file, and only the sizes of the others.

    Raises:
        ValueError: there is no save, it is damaged or incomplete, or has another schema; names the file.
    """
    while True:
        pointer = _read_pointer(folder)
        try:
            return _read_generation(folder / pointer[0], pointer[1], rank, count)
        except ValueError:
            if _read_pointer(folder) == pointer:
                raise
            # Else another process has saved, and deleted the generation


def _read_pointer(folder: Path) -> tuple[str, str]:
    """Return the name of the current generation and the checksum of its manifest."""
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
            f"{path} has schema {manifest['schema']!r}, and this release of l2l_core reads schemas {SINGLE_WORKER} and "
            f"{SEVERAL_WORKERS}: load it with the release that wrote it, or train and save again with this one"
        )
    digests = manifest.get("parts", {})
    plain = {(generation / name).parent: read_json(generation / name, d["sha256"], path) for name, d in digests.items()}
    listed = [
        (folder / name, d) for folder, p in {generation: manifest, **plain}.items() for name, d in p["files"].items()
    ]
    with ThreadPoolExecutor() as pool:  # checksums take most of the time
        read_all = [index % count == rank for index in range(len(listed))]
        read = list(pool.map(read_file, *zip(*listed, strict=True), read_all))
    tensors: dict[Path, Tensors] = {folder: {} for folder in (generation, *plain)}
    for (file, _), content in zip(listed, read, strict=True):
        tensors[file.parent] |= content
    parts = [WorkerPart(each, tensors[folder]) for folder, each in plain.items()]
    return Generation(path, manifest, tensors[generation], parts or [WorkerPart(manifest, tensors[generation])])
