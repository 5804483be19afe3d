"""Reading and writing of files in whole pages, past the page cache where the file system allows it.

A model on disk would evict everything else from the cache and gain nothing, since the records read last are needed last. Files
are therefore opened with ``O_DIRECT``; where a file system refuses that, their pages are dropped from the cache after each call.
"""

from __future__ import annotations

import ctypes
import errno
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

PAGE = 4096  # bytes; a multiple of the block size of all common disks
_MAX_CALL_BYTES = 1 << 26  # bytes per system call, whose limit is 2 GiB
_sync_data = getattr(os, "fdatasync", os.fsync)  # macOS has only `fsync`
_O_DIRECT = getattr(os, "O_DIRECT", 0)  # Linux only


def round_to_pages(nbytes: int) -> int:
    """Round a number of bytes up to whole pages."""
    return -(-nbytes // PAGE) * PAGE


def page_aligned(raw: torch.Tensor, nbytes: int) -> torch.Tensor:
    """Return the page-aligned part, (nbytes,), of `raw` (uint8, at least ``nbytes + PAGE`` bytes)."""
    start = -raw.data_ptr() % PAGE
    return raw[start : start + nbytes]


class DirectFiles:
    """Reader and writer for the files of a folder.

    Args:
        folder: folder on whose file system direct access is tried.

    Attributes:
        is_direct: whether files bypass the page cache.
    """

    def __init__(self, folder: Path) -> None:
        self.is_direct = bool(_O_DIRECT) and _supports_direct(folder / "direct.tmp")

    def read(self, path: Path, into: torch.Tensor) -> None:
        """Fill `into` (uint8, whole pages on a page boundary) from the start of a file.

        Raises:
            OSError: the file cannot be read, or ends too early.
        """
        with self._open(path, os.O_RDONLY) as file:
            _read_all(into, file, 0, path)
            self._drop_cache(file)

    def write(self, path: Path, source: torch.Tensor) -> None:
        """Write `source` (uint8, whole pages on a page boundary) as a file, and flush it to the disk.

        Raises:
            OSError: the file cannot be written.
        """
        with self._open(path, os.O_WRONLY | os.O_CREAT) as file:
            _write_all(source, file, 0, path)
            if os.fstat(file).st_size != len(source):
                os.ftruncate(file, len(source))
            _sync_data(file)  # a changed size too
            self._drop_cache(file)

    def open_scratch(self, path: Path) -> ScratchFile:
        """Make an unnamed file that the system deletes when it is closed or the process ends.

        Raises:
            OSError: the file cannot be made.
        """
        flags = os.O_RDWR | os.O_CREAT | os.O_TRUNC | (_O_DIRECT if self.is_direct else 0)
        file = os.open(path, flags, 0o600)
        path.unlink()
        return ScratchFile(file, path, self._drop_cache)

    @contextmanager
    def _open(self, path: Path, flags: int) -> Iterator[int]:
        file = os.open(path, flags | (_O_DIRECT if self.is_direct else 0), 0o666)
        try:
            yield file
        finally:
            os.close(file)

    def _drop_cache(self, file: int) -> None:
        if not self.is_direct and hasattr(os, "posix_fadvise"):
            os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)


class ScratchFile:
    """An unnamed file, read and written in whole pages at any position; thread-safe.

    Args:
        file: descriptor.
        path: path with which it was made, for messages.
        drop_cache: drops its pages from the page cache unless access is direct.
    """

    def __init__(self, file: int, path: Path, drop_cache: Callable[[int], None]) -> None:
        self._file, self._path, self._drop_cache, self.nbytes = file, path, drop_cache, 0

    def grow(self, nbytes: int) -> None:
        """Reserve disk space up to `nbytes`.

        Raises:
            OSError: the disk is full; nothing has changed.
        """
        more = nbytes - self.nbytes
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(self._file, self.nbytes, more)
        elif shutil.disk_usage(self._path.parent).free < more:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self._path))
        self.nbytes = nbytes

    def read(self, into: torch.Tensor, start: int) -> None:
        """Fill `into` (uint8, whole pages on a page boundary) from byte `start`."""
        _read_all(into, self._file, start, self._path)
        self._drop_cache(self._file)

    def write(self, source: torch.Tensor, start: int) -> None:
        """Write `source` (uint8, whole pages on a page boundary) at byte `start`."""
        _write_all(source, self._file, start, self._path)
        self._drop_cache(self._file)

    def close(self) -> None:
        """Close the file, which deletes it."""
        os.close(self._file)


def _read_all(into: torch.Tensor, file: int, start: int, path: Path) -> None:
    view, done = _bytes_of(into), 0
    while done < len(view):
        count = os.preadv(file, [view[done : done + _MAX_CALL_BYTES]], start + done)
        if count == 0:
            raise OSError(errno.EIO, f"the file ends after {start + done:,} of {start + len(view):,} bytes", str(path))
        done += count


def _write_all(source: torch.Tensor, file: int, start: int, path: Path) -> None:
    view, done = _bytes_of(source), 0
    while done < len(view):
        count = os.pwrite(file, view[done : done + _MAX_CALL_BYTES], start + done)
        count -= count % PAGE  # less on a disk that is nearly full; the next call raises
        if count == 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        done += count


def _supports_direct(path: Path) -> bool:
    """Return whether direct access works: some file systems refuse to open a file, others to read or write it."""
    page = page_aligned(torch.zeros(2 * PAGE, dtype=torch.uint8), PAGE)
    try:
        file = os.open(path, os.O_RDWR | os.O_CREAT | _O_DIRECT, 0o666)
        try:
            return os.pwrite(file, _bytes_of(page), 0) == os.preadv(file, [_bytes_of(page)], 0) == PAGE
        finally:
            os.close(file)
    except OSError as error:
        if error.errno in (errno.EINVAL, errno.EOPNOTSUPP):
            return False
        raise
    finally:
        path.unlink(missing_ok=True)


def _bytes_of(flat: torch.Tensor) -> memoryview:
    """Return the memory of a contiguous tensor, which must outlive the view."""
    return memoryview((ctypes.c_char * flat.nbytes).from_address(flat.data_ptr())).cast("B")
