"""Writing of a generation by one or several workers, and clean-up after a failure.

Each worker writes its part. Worker 0 writes the rest, and makes the generation current when all have sent their checksums. A
crash before that leaves files that nothing refers to; worker 0 deletes them, once no worker can be writing any more.
"""

from __future__ import annotations

import secrets
import shutil
import socket
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeVar

from l2l_core.devices import explain_full_disk
from l2l_core.model import Tensors
from l2l_core.saves.generations import (
    MANIFEST,
    SEVERAL_WORKERS,
    SINGLE_WORKER,
    FileDigest,
    current_generation,
    delete_generations,
    set_current,
    sync,
    write_files,
    write_json,
)

T = TypeVar("T")

_PART = "part.json"
_DISK_FULL_REMEDY = (
    "Free some, or save to another disk. The last save in this folder is as it was, and the relay can continue"
)


class SaveGroup(Protocol):
    """Workers that save or load together in one folder; see `workers/backend.py`."""

    @property
    def rank(self) -> int: ...
    @property
    def count(self) -> int: ...
    @property
    def lost(self) -> Exception | None: ...
    def gather_items(self, items: Sequence[T], what: str) -> list[T]:
        """Concatenate the items of all workers; raise if a worker has failed."""
        ...


class FolderContent(NamedTuple):
    """Contents of one folder of files.

    Attributes:
        plain: data for JSON; complete when `files` is exhausted.
        files: names without suffix, and the tensors of each, which are valid until the next iteration.
        nbytes: approximate bytes of all tensors.
    """

    plain: dict[str, Any]
    files: Iterable[tuple[str, Tensors]]
    nbytes: int


class GenerationWriter:
    """Context that writes a generation and makes it the only one; on any failure the folder keeps its last save.

    Exit only when no worker writes any more: after a failure, when it has been reported to all.

    Args:
        folder: created if it does not exist.
        group: the workers that write together.
    """

    def __init__(self, folder: Path, group: SaveGroup) -> None:
        self._folder, self._group = folder, group
        self._path: Path | None = None

    def __enter__(self) -> GenerationWriter:
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if error is None or self._path is None or self._group.rank != 0 or self._group.lost is not None:
            return  # after the loss of a worker others may still be writing: the next save deletes the files
        # Unless it is already current, and then the only save
        if current_generation(self._folder) != self._path.name:
            shutil.rmtree(self._path, ignore_errors=True)

    @property
    def is_rank_zero(self) -> bool:
        """Whether this worker writes the data that all workers have in common."""
        return self._group.rank == 0

    def write(self, steps: int, own: FolderContent, common: FolderContent | None) -> None:
        """Write the generation of step `steps`, together with all other workers; `common` is None on all but worker 0.

        Raises:
            OSError: the disk is full, permission is denied, or the folder is not shared.
        """
        needed_bytes = own.nbytes + (common.nbytes if common is not None else 0)
        with explain_full_disk(self._folder, needed_bytes, _DISK_FULL_REMEDY):
            if common is not None:
                self._begin(steps)
            if common is not None and self._group.count == 1:
                files = write_files(self._generation, chain(own.files, common.files))
                self._make_current({"schema": SINGLE_WORKER, **common.plain, **own.plain, "files": files})
            else:
                self._write_with_others(own, common)

    def _write_with_others(self, own: FolderContent, common: FolderContent | None) -> None:
        rank, gather = self._group.rank, self._group.gather_items
        [name] = gather([self._generation.name] if common is not None else [], "begin a save")
        self._path = self._folder / name
        if not self._path.is_dir():
            raise _not_shared_error(self._path, rank, 0)
        part = self._path / _folder_of(rank)
        part.mkdir()
        files = write_files(part, own.files)
        digest = write_json(part / _PART, {**own.plain, "files": files})
        sync(part)
        digests = gather([digest], "write a save")
        if common is not None:
            self._check_visible(digests)
            files = write_files(self._path, common.files)
            parts = {f"{_folder_of(other)}/{_PART}": digest for other, digest in enumerate(digests)}
            self._make_current({"schema": SEVERAL_WORKERS, **common.plain, "parts": parts, "files": files})
        gather([None], "finish a save")  # so that no worker continues before the save is complete

    @property
    def _generation(self) -> Path:
        assert self._path is not None, "no generation has been begun"
        return self._path

    def _begin(self, steps: int) -> None:
        """Delete old generations and make the folder of the new one."""
        folder = self._folder
        if not folder.is_dir():
            new = [path for path in (folder, *folder.parents) if not path.exists()]
            folder.mkdir(parents=True, exist_ok=True)
            for path in new:  # a new folder survives a power cut only if its parent is flushed
                sync(path.parent)
        if current := current_generation(folder):  # else it is unknown which one is current, and all are kept
            delete_generations(folder, but=current)  # leftovers of crashed saves may fill the disk
        self._path = folder / f"step-{steps:08d}-{secrets.token_hex(4)}"
        self._path.mkdir()

    def _check_visible(self, digests: Sequence[FileDigest]) -> None:
        """Check that the parts of the other workers are visible on this machine."""
        for rank, digest in enumerate(digests):
            path = self._generation / _folder_of(rank) / _PART
            if not path.is_file() or path.stat().st_size != digest["bytes"]:
                raise _not_shared_error(path, 0, rank)

    def _make_current(self, manifest: Mapping[str, Any]) -> None:
        """Write the manifest and make the generation the current one."""
        folder, name = self._folder, self._generation.name
        digest = write_json(self._generation / MANIFEST, manifest)
        sync(self._generation)  # before the pointer, which must not name files that a power cut could lose
        sync(folder)
        set_current(folder, name, digest["sha256"])
        delete_generations(folder, but=name)


def _folder_of(rank: int) -> str:
    return f"rank-{rank:03d}"


def _not_shared_error(path: Path, here: int, there: int) -> FileNotFoundError:
    return FileNotFoundError(
        f"worker {here}, on {socket.gethostname()}, does not see {path}, which worker {there} has written: all workers must save "
        "to one folder. Give one on a file system that all machines share, under the same path. The last save is as it was"
    )
