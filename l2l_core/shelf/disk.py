"""Speed and free space of a disk, for forecasts: given, or measured in a folder."""

from __future__ import annotations

import math
import shutil
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import torch

from l2l_core.shelf.direct_io import PAGE, DirectFiles, page_aligned, round_to_pages
from l2l_core.trace import format_bytes

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
