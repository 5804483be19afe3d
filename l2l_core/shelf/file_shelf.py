"""User settings of a shelf, checks of its folder, and the speed of its disk."""

from __future__ import annotations

import math
import os
import shutil
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from l2l_core.shelf.direct_io import PAGE, DirectFiles, page_aligned, round_to_pages
from l2l_core.shelf.shelf_manifest import has_prepared_step, has_step, read_plain
from l2l_core.trace import format_bytes, parse_bytes

Initialiser = Callable[[str, torch.Tensor], None]


@dataclass(frozen=True, kw_only=True)
class FileShelf:
    """Keep weights and optimizer state in files, for models that do not fit in memory: ``Relay(..., shelf=FileShelf(...))``.

    The disk holds two copies of every layer, so that a crash at any moment leaves the last whole step: 24 bytes per parameter
    with AdamW. Each of several workers keeps its shard in a folder inside `folder`. See `docs/CAPACITY.md`.

    Args:
        folder: a separate folder on a local disk.
        memory_bytes: host memory for buffers of weights and state, as a number or as text: ``"2 GB"``. Each of several workers
            takes as much, and gathers about ``ahead + 2`` whole layers beside it.
        weights: for a model without weights (see `empty_weights`): a function that fills a parameter, given its name; a
            safetensors file; or a folder of such files, as written by ``save_pretrained``. None uses the weights of the model.
            Worker 0 of several reads them.
        resume: continue from the last whole step or edit in the folder, ignoring the weights of the model. The model must have
            the layers that the edits have left, in their order; keys and ``requires_grad`` are taken from the folder.

    Raises:
        ValueError: `memory_bytes` is not a positive number, or both `weights` and `resume` are given.

    Example:
        >>> from l2l_core import FileShelf
        >>> shelf = FileShelf(folder="run", memory_bytes="1 MB")
        >>> relay.close()  # a model belongs to one relay
        >>> with Relay(model, device="cpu", loss=nn.CrossEntropyLoss(), shelf=shelf) as relay:
        ...     result = relay.step(batch)  # weights and optimizer state are in files
    """

    folder: str | Path
    memory_bytes: int | str
    weights: Initialiser | str | Path | None = None
    resume: bool = False

    def __post_init__(self) -> None:
        if isinstance(self.memory_bytes, bool) or not isinstance(self.memory_bytes, int | str) or self.nbytes <= 0:
            raise ValueError(
                f'memory_bytes={self.memory_bytes!r}: must be a positive number of bytes, or text as "2 GB"'
            )
        if self.resume and self.weights is not None:
            raise ValueError(
                "resume=True continues with the weights in the folder, and weights= gives others: leave out one of them"
            )

    @property
    def nbytes(self) -> int:
        """`memory_bytes` as a number."""
        given = self.memory_bytes
        return parse_bytes(given, "memory_bytes") if isinstance(given, str) else given


def worker_folder(folder: Path, rank: int, count: int) -> Path:
    """Return the folder with the files of one of `count` workers."""
    return folder if count == 1 else folder / f"rank-{rank:03d}"


def check_folder(folder: Path, resume: bool, rank: int, count: int) -> None:
    """Check that a worker's folder has a whole step if it is to be resumed, and none otherwise.

    Raises:
        ValueError: it does not.
    """
    own = worker_folder(folder, rank, count)
    found = next((each for each in (own, folder, *sorted(folder.glob("rank-*"))) if has_step(each)), None)
    if resume and found is not None and (before := read_plain(found)["workers"]) != count:
        raise ValueError(
            f"{folder} is the shelf of {before} worker(s), and this relay has {count}: resume it with {before}, save it "
            "(relay.save), and load that save with any number of workers onto another shelf (Relay.load). Nothing was changed"
        )
    if resume and not has_step(own) and not (found is not None and has_prepared_step(own)):
        raise ValueError(
            f"{own} has no whole step to resume: no shelf was ever filled there. Give the folder of one, or leave "
            "out resume=True"
        )
    if not resume and found is not None:
        raise ValueError(
            f"{folder} is the shelf of a model already: resume it with FileShelf(..., resume=True), delete it, or give another "
            "folder. Nothing was changed"
        )


def lock_folder(folder: Path) -> int:
    """Lock a folder until the process ends or closes the descriptor that is returned.

    Raises:
        ValueError: another process, or another relay of this one, holds the lock.
    """
    import fcntl  # not at the top: absent on Windows

    descriptor = os.open(folder / "lock", os.O_RDWR | os.O_CREAT, 0o666)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        raise ValueError(f"{folder} is in use by another relay: close that one, or end its process") from None
    return descriptor


_TRIES = 3  # the fastest counts: other programs only slow the disk down


@dataclass(frozen=True, kw_only=True)
class Disk:
    """Speed and free space of a disk. Forecasts assume that reads and writes do not slow each other down.

    Args:
        read_bytes_per_s: reading of large files.
        write_bytes_per_s: writing of large files, with the flush to the disk.
        free_bytes: free space, or None for no limit.
        name: description for people.

    Raises:
        ValueError: a number out of range.

    Example:
        >>> from l2l_core import Disk
        >>> Disk.of(".").free_bytes > 0  # measured, by files of 64 MB
        True
        >>> ssd = Disk(read_bytes_per_s=2e9, write_bytes_per_s=1e9, free_bytes=10**12)
    """

    read_bytes_per_s: float
    write_bytes_per_s: float
    free_bytes: int | None = None
    name: str = "a disk"

    def __post_init__(self) -> None:
        for name in ("read_bytes_per_s", "write_bytes_per_s"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
                raise ValueError(f"{name}={value!r}: must be a positive number of bytes per second, such as 2e9")
        if self.free_bytes is not None and not self.free_bytes >= 0:
            raise ValueError(f"free_bytes={self.free_bytes!r}: must be 0 or more, or None for no limit")

    @staticmethod
    def of(folder: str | Path, nbytes: int = 1 << 26) -> Disk:
        """Measure the disk of a folder by writing and reading a file of `nbytes`, which is deleted afterwards.

        Where the page cache cannot be bypassed, the result may be the speed of memory; `name` then mentions the page cache.

        Raises:
            ValueError: `nbytes` is not positive.
            OSError: the folder does not exist or is full.
        """
        if not nbytes > 0:
            raise ValueError(f"nbytes={nbytes!r}: must be a positive number of bytes")
        folder, size = Path(folder), round_to_pages(nbytes)
        flat = page_aligned(torch.zeros(size + PAGE, dtype=torch.uint8), size).random_(0, 256)  # some disks compress
        with tempfile.TemporaryDirectory(prefix="disk-", dir=folder) as scratch:
            files, path = DirectFiles(Path(scratch)), Path(scratch) / "measured"
            written_s, read_s = [], []
            for _ in range(_TRIES):
                start_s = time.perf_counter()
                files.write(path, flat)
                middle_s = time.perf_counter()
                files.read(path, flat)
                written_s.append(middle_s - start_s)
                read_s.append(time.perf_counter() - middle_s)
        return Disk(
            read_bytes_per_s=size / min(read_s),
            write_bytes_per_s=size / min(written_s),
            free_bytes=shutil.disk_usage(folder).free,
            name=f"measured with {format_bytes(size)}{'' if files.is_direct else ' through the page cache'}",
        )

    def figures(self) -> dict[str, float]:
        """Return the speeds under their names in a trace's settings."""
        return {
            "disk read_bytes_per_s": self.read_bytes_per_s,
            "disk write_bytes_per_s": self.write_bytes_per_s,
        }

    def __str__(self) -> str:
        free = "" if self.free_bytes is None else f", {format_bytes(self.free_bytes)} free"
        read, write = format_bytes(self.read_bytes_per_s), format_bytes(self.write_bytes_per_s)
        return f"{self.name}: reads {read}/s, writes {write}/s{free}"
