"""A generation on its way: what several workers write at once, and what is left where that fails.

Every worker writes what it alone has. Worker 0 writes the rest, and switches to the generation when all have told it their
checksums. Whoever dies before that leaves files that nothing refers to. It is worker 0 too that deletes them, and only where
no worker can be writing any more.
"""

from __future__ import annotations

import secrets
import shutil
import socket
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeVar

from l2l_core.devices import disk_full_error, is_disk_full
from l2l_core.model import Tensors
from l2l_core.saves.files import FileDigest, sync, write_files, write_json
from l2l_core.saves.generations import (
    MANIFEST,
    SEVERAL_WORKERS,
    SINGLE_WORKER,
    current_generation,
    delete_generations,
    set_current,
)

T = TypeVar("T")

_PART = "part.json"
_DISK_FULL_REMEDY = (
    "Free some, or save to another disk. Nothing is lost: the last save in this folder is as it was, the relay goes on"
)


class SaveGroup(Protocol):
    """Is whoever saves or loads together: one worker, or several that see one folder; see `workers/backend.py`.

    Attributes:
        rank, count: of this worker, and how many there are.
        lost: the error that tells of a lost worker, if there is one.
    """

    @property
    def rank(self) -> int: ...
    @property
    def count(self) -> int: ...
    @property
    def lost(self) -> Exception | None: ...
    def gather_items(self, items: Sequence[T], what: str) -> list[T]:
        """Put everybody's items side by side; raises where a worker has failed."""


class FolderContent(NamedTuple):
    """Is what goes into one folder of files.

    Attributes:
        plain: data that JSON can hold.
        files: names without suffix, and the tensors of each, which are there until the next one is asked for; they are gone
            through once, and `plain` is complete when that is done.
        nbytes: of all tensors, about.
    """

    plain: dict[str, Any]
    files: Iterable[tuple[str, Tensors]]
    nbytes: int


class GenerationWriter:
    """Writes a generation and makes it the folder's only one; whatever goes wrong, the folder keeps its last good save.

    Leave it when no worker writes any more: after a failure, that is when all have heard of it.

    Args:
        folder: is made if there is none.
        company: who writes together.
    """

    def __init__(self, folder: Path, group: SaveGroup) -> None:
        self._folder, self._group = folder, group
        self._path: Path | None = None

    def __enter__(self) -> GenerationWriter:
        return self

    def __exit__(self, kind: object, error: BaseException | None, at: object) -> None:
        if error is None or self._path is None or self._group.rank != 0 or self._group.lost is not None:
            return  # where one is lost others may be writing: the next save deletes it
        # After the switch it is the only good save
        if current_generation(self._folder) != self._path.name:
            shutil.rmtree(self._path, ignore_errors=True)

    @property
    def is_rank_zero(self) -> bool:
        """Whether this worker is the one that writes what is there once."""
        return self._group.rank == 0

    def write(self, steps: int, mine: FolderContent, common: FolderContent | None) -> None:
        """Write, together with all others of the company.

        Args:
            steps: are in the generation's name.
            mine: what this worker alone has.
            common: what is there once, on the first worker.

        Raises:
            OSError: disk full (says how much is needed, and free), no permission, no common folder, and so on.
        """
        try:
            if common is not None:
                self._begin(steps)
            if common is not None and self._group.count == 1:
                files = write_files(self._generation, chain(mine.files, common.files))
                self._make_current({"schema": SINGLE_WORKER, **common.plain, **mine.plain, "files": files})
            else:
                self._write_with_others(mine, common)
        except OSError as error:
            if is_disk_full(error):
                needed_bytes = mine.nbytes + (common.nbytes if common is not None else 0)
                raise disk_full_error(error, self._folder, needed_bytes, _DISK_FULL_REMEDY) from error
            raise

    def _write_with_others(self, mine: FolderContent, common: FolderContent | None) -> None:
        rank, every = self._group.rank, self._group.gather_items
        [name] = every([self._generation.name] if common is not None else [], "begin a save")
        self._path = self._folder / name
        if not self._path.is_dir():
            raise _not_shared_error(self._path, rank, 0)
        part = self._path / _folder_of(rank)
        part.mkdir()
        files = write_files(part, mine.files)
        seal = write_json(part / _PART, {**mine.plain, "files": files})
        sync(part)
        seals = every([seal], "write a save")
        if common is not None:
            self._check_visible(seals)
            files = write_files(self._path, common.files)
            parts = {f"{_folder_of(other)}/{_PART}": seal for other, seal in enumerate(seals)}
            self._make_current({"schema": SEVERAL_WORKERS, **common.plain, "parts": parts, "files": files})
        every([None], "finish a save")  # nobody goes on before the save is there

    @property
    def _generation(self) -> Path:
        assert self._path is not None, "no generation was begun"
        return self._path

    def _begin(self, steps: int) -> None:
        """Make room, and a folder for the generation."""
        folder = self._folder
        if not folder.is_dir():
            new = [path for path in (folder, *folder.parents) if not path.exists()]
            folder.mkdir(parents=True, exist_ok=True)
            for path in new:  # a folder is only safe from a power cut when the one that lists it is
                sync(path.parent)
        if current := current_generation(
            folder
        ):  # without a good pointer nobody knows which one is, so all stay for now
            delete_generations(folder, but=current)  # first of all: what crashed saves left may be what fills the disk
        self._path = folder / f"step-{steps:08d}-{secrets.token_hex(4)}"
        self._path.mkdir()

    def _check_visible(self, seals: Sequence[FileDigest]) -> None:
        """Make sure that what the others have written can be seen here: nobody else will look before a load."""
        for rank, seal in enumerate(seals):
            path = self._generation / _folder_of(rank) / _PART
            if not path.is_file() or path.stat().st_size != seal["bytes"]:
                raise _not_shared_error(path, 0, rank)

    def _make_current(self, manifest: Mapping[str, Any]) -> None:
        """Make the generation the current one: this is the moment of the save."""
        folder, name = self._folder, self._generation.name
        seal = write_json(self._generation / MANIFEST, manifest)
        sync(self._generation)  # before the pointer: after a power cut it must not name what never reached the disk
        sync(folder)
        set_current(folder, name, seal["sha256"])
        delete_generations(folder, but=name)


def _folder_of(rank: int) -> str:
    return f"rank-{rank:03d}"


def _not_shared_error(path: Path, here: int, there: int) -> FileNotFoundError:
    return FileNotFoundError(
        f"worker {here}, on {socket.gethostname()}, does not see {path} as worker {there} has made it: all workers must save to "
        "one folder. Give one that is on a file system that all machines share, under the same path. The last save is as it was"
    )
