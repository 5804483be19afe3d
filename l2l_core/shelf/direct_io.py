"""Files read and written in whole pages, past the page cache if possible, and their buffers.

A model on disk would evict everything else from the cache and gain nothing, since the records read last are needed last. Files
are therefore opened with ``O_DIRECT``; where a file system refuses that, their pages are dropped from the cache after each call.
"""

from __future__ import annotations

import ctypes
import errno
import os
import shutil
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from l2l_core.devices import Ledger, Ticket

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
        with closing(DirectFile(path, os.O_RDONLY, 0o666, self.is_direct)) as file:
            file.read(into, 0)

    def write(self, path: Path, source: torch.Tensor) -> None:
        """Write `source` (uint8, whole pages on a page boundary) as a file, and flush it to the disk.

        Raises:
            OSError: the file cannot be written.
        """
        with closing(DirectFile(path, os.O_WRONLY | os.O_CREAT, 0o666, self.is_direct)) as file:
            file.write(source, 0, flush=True)

    def open_scratch(self, path: Path) -> ScratchFile:
        """Make an unnamed file that the system deletes when it is closed or the process ends.

        Raises:
            OSError: the file cannot be made.
        """
        file = ScratchFile(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o600, self.is_direct)
        path.unlink()
        return file


class DirectFile:
    """An open file, read and written in whole pages at any position; thread-safe."""

    def __init__(self, path: Path, flags: int, mode: int, is_direct: bool) -> None:
        self._path, self._is_direct = path, is_direct
        self._file = os.open(path, flags | (_O_DIRECT if is_direct else 0), mode)

    def read(self, into: torch.Tensor, start: int) -> None:
        """Fill `into` (uint8, whole pages on a page boundary) from byte `start`."""
        view, done = _bytes_of(into), 0
        while done < len(view):
            count = os.preadv(self._file, [view[done : done + _MAX_CALL_BYTES]], start + done)
            if count == 0:
                cause = f"the file ends after {start + done:,} of {start + len(view):,} bytes"
                raise OSError(errno.EIO, cause, str(self._path))
            done += count
        self._drop_cache()

    def write(self, source: torch.Tensor, start: int, flush: bool = False) -> None:
        """Write `source` (uint8, whole pages on a page boundary) at byte `start`; `flush` ends the file there on the disk."""
        view, done = _bytes_of(source), 0
        while done < len(view):
            count = os.pwrite(self._file, view[done : done + _MAX_CALL_BYTES], start + done)
            count -= count % PAGE  # less on a disk that is nearly full; the next call raises
            if count == 0:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self._path))
            done += count
        if flush:
            if os.fstat(self._file).st_size != start + done:
                os.ftruncate(self._file, start + done)
            _sync_data(self._file)  # a changed size too
        self._drop_cache()

    def close(self) -> None:
        """Close the file."""
        os.close(self._file)

    def _drop_cache(self) -> None:
        if not self._is_direct and hasattr(os, "posix_fadvise"):
            os.posix_fadvise(self._file, 0, 0, os.POSIX_FADV_DONTNEED)


class ScratchFile(DirectFile):
    """An unnamed file of `nbytes`, for storages."""

    nbytes = 0

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


def _supports_direct(path: Path) -> bool:
    """Return whether direct access works: some file systems refuse to open a file, others to read or write it."""
    page = page_aligned(torch.zeros(2 * PAGE, dtype=torch.uint8), PAGE)
    try:
        with closing(DirectFile(path, os.O_RDWR | os.O_CREAT, 0o666, True)) as file:
            file.write(page, 0)
            file.read(page, 0)
        return True
    except OSError as error:
        if error.errno in (errno.EINVAL, errno.EOPNOTSUPP):
            return False
        raise
    finally:
        path.unlink(missing_ok=True)


def _bytes_of(flat: torch.Tensor) -> memoryview:
    """Return the memory of a contiguous tensor, which must outlive the view."""
    return memoryview((ctypes.c_char * flat.nbytes).from_address(flat.data_ptr())).cast("B")


@dataclass(eq=False, slots=True)
class PoolBuffer:
    """Memory for a record or its beginning.

    Attributes:
        flat: (nbytes,) uint8, whole pages on a page boundary.
        load: load that may still read the buffer after its release.
    """

    flat: torch.Tensor
    load: Ticket | None = None


class BufferPool:
    """Buffers that are reused by size.

    Invariant: acquired and free buffers together take at most `limit_bytes`.
    """

    def __init__(
        self, limit_bytes: int, empty: Callable[[int, torch.dtype], torch.Tensor], host: Ledger, category: str
    ) -> None:
        self.limit_bytes, self._empty, self._host, self._category = limit_bytes, empty, host, category
        self._lock = threading.Lock()
        self._total = 0
        self._free: OrderedDict[PoolBuffer, int] = OrderedDict()  # the oldest first

    def acquire(self, nbytes: int) -> PoolBuffer | None:
        """Return a buffer of `nbytes`, whole pages, or None if the limit leaves no room now."""
        with self._lock:
            buffer = next((kept for kept, size in self._free.items() if size == nbytes), None)
            if buffer is not None:
                del self._free[buffer]
            else:
                while self._free and self._total + PAGE + nbytes > self.limit_bytes:
                    self._drop(self._free.popitem(last=False)[0])
                if self._total + PAGE + nbytes > self.limit_bytes:
                    return None
                buffer = self._new(nbytes)
        if buffer.load is not None:
            buffer.load.abandon()
            buffer.load = None
        return buffer

    def release(self, buffer: PoolBuffer, load: Ticket | None = None) -> None:
        """Return a buffer to the pool; `load` may still read it."""
        buffer.load = load
        with self._lock:
            self._free[buffer] = len(buffer.flat)

    @contextmanager
    def lease(self, nbytes: int) -> Iterator[torch.Tensor]:
        """Lend the memory of a buffer, (nbytes,) uint8, in a block of code between two steps, when there is room."""
        buffer = self.acquire(nbytes)
        assert buffer is not None, f"no room for {nbytes:,} bytes between two steps"
        try:
            yield buffer.flat
        finally:
            self.release(buffer)

    def close(self) -> None:
        """Free all buffers in the pool."""
        with self._lock:
            while self._free:
                self._drop(self._free.popitem()[0])

    def _new(self, nbytes: int) -> PoolBuffer:
        raw = self._empty(nbytes + PAGE, torch.uint8)
        self._host.book(self._category, "shelf", nbytes + PAGE)
        self._total += nbytes + PAGE
        return PoolBuffer(page_aligned(raw, nbytes))

    def _drop(self, buffer: PoolBuffer) -> None:
        if buffer.load is not None:
            buffer.load.abandon()
        self._host.release(self._category, "shelf", len(buffer.flat) + PAGE)
        self._total -= len(buffer.flat) + PAGE
