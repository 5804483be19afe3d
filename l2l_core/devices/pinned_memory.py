"""Pinned host memory: buffers registered with CUDA at exactly the requested size.

PyTorch's own pinned allocator rounds every block up to a power of two and never frees it. Here each buffer is a separate
anonymous mapping (whole pages) that is registered in place. Registering is slow (pages are touched and locked one by one), so
freed buffers stay available for a few passes.
"""

from __future__ import annotations

import mmap
import sys
import weakref
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch

from l2l_core.trace import format_bytes

_PORTABLE = 1  # cudaHostRegisterPortable: pinned for every GPU of the process
_IDLE_PASSES = 4  # a training shape survives a few evaluation passes
_HUGE_BYTES = 2 << 20  # of a huge page, where the kernel has them


class _Region:
    """A mapping that is registered with CUDA from its creation until `unpin`.

    Invariant: it is never unmapped while registered; the next mapping of the same addresses could not be registered.
    """

    def __init__(self, nbytes: int, cudart: Any) -> None:
        self._pinned = False  # first, since `__del__` reads it even if mapping fails
        self.nbytes = nbytes
        self.last_pass = 0
        self.pages = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if nbytes >= _HUGE_BYTES:
            with suppress(AttributeError, OSError):  # a kernel without them
                self.pages.madvise(mmap.MADV_HUGEPAGE)  # fewer pages to touch now and to translate later
        self._cudart, self._address = cudart, torch.frombuffer(self.pages, dtype=torch.uint8).data_ptr()
        self.status = int(cudart.cudaHostRegister(self._address, nbytes, _PORTABLE))
        self._pinned = self.status == 0

    def unpin(self) -> None:
        """Turn it into ordinary memory. CUDA waits for copies that still use it."""
        if self._pinned:
            self._pinned = False
            status = int(self._cudart.cudaHostUnregister(self._address))
            assert status == 0, f"cudaHostUnregister of {self.nbytes} bytes at {self._address:#x} failed: {status}"

    def __del__(self) -> None:
        if not sys.is_finalizing():
            self.unpin()


class PinnedMemory:
    """Pinned buffers of one process, as tensors.

    Invariant: a region is either lent to one tensor (and its views) or free.

    Args:
        cudart: the CUDA runtime, `torch.cuda.cudart()`.
        clear_error: called after a failed call of the runtime. CUDA keeps the last error and would report it again at the next
            kernel.
    """

    def __init__(self, cudart: Any, clear_error: Callable[[], None]) -> None:
        self._cudart, self._clear_error = cudart, clear_error
        self._regions: set[_Region] = set()
        self._free: dict[int, list[_Region]] = {}
        self._pass = 0

    @property
    def nbytes(self) -> int:
        """Bytes registered now, lent and free."""
        return sum(region.nbytes for region in tuple(self._regions))

    def empty(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Return a pinned flat buffer, shape (numel,); its region is freed with the tensor and its views.

        Raises:
            MemoryError: the operating system or CUDA refuses; the message has the bytes and remedies.
        """
        nbytes = numel * dtype.itemsize
        if nbytes == 0:
            return torch.empty(numel, dtype=dtype)
        region = free.pop() if (free := self._free.get(nbytes)) else self._register(nbytes)
        self._regions.add(region)
        lease = memoryview(region.pages)  # held by the tensor's storage
        weakref.finalize(lease, self._release, region).atexit = False
        return torch.frombuffer(lease, dtype=dtype, count=numel)

    def end_pass(self) -> None:
        """End a pass over the model; unpin regions unused for some passes."""
        self._pass += 1
        self._unpin_free(lambda region: self._pass - region.last_pass > _IDLE_PASSES)

    def close(self) -> None:
        """Unpin everything. Lent buffers stay valid as ordinary memory."""
        self._free.clear()
        regions, self._regions = self._regions, set()
        for region in regions:
            region.unpin()

    def _release(self, region: _Region) -> None:
        """Free a region. May run in any thread at any time, so each step is atomic and needs no lock."""
        if region in self._regions:
            region.last_pass = self._pass
            self._free.setdefault(region.nbytes, []).append(region)

    def _register(self, nbytes: int) -> _Region:
        for last in (False, True):  # retry after unpinning the free regions
            try:
                region = _Region(nbytes, self._cudart)
            except OSError as error:
                reason = str(error)
            else:
                if region.status == 0:
                    return region
                reason = f"cudaHostRegister gave error {region.status}"
                self._clear_error()
            if not last:
                self._unpin_free(lambda region: True)
        raise MemoryError(
            f"{format_bytes(nbytes)} of host memory cannot be pinned ({reason}); {format_bytes(self.nbytes)} are pinned "
            "already. Remedy: free host memory or raise the limits on it (the container's, `ulimit -l`), keep the stash on "
            "the device (RelayConfig(stash='device')), or use update='eager', which keeps fewer gradients on the host"
        )

    def _unpin_free(self, unwanted: Callable[[_Region], bool]) -> None:
        for free in list(self._free.values()):
            for region in [region for region in free if unwanted(region)]:
                free.remove(region)
                self._regions.discard(region)
                region.unpin()
