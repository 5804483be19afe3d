"""Interface of a device, the same for an emulated and a real one.

Copies are *issued* on a lane and return a `Ticket`; the user of the result waits for the ticket. Whether a copy runs in a thread
or on a CUDA stream is up to the device.
"""

from __future__ import annotations

import ctypes
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import psutil
import torch

from l2l_core.devices.ledger import Ledger

Copy = tuple[torch.Tensor, torch.Tensor]  # destination, source; same number of elements
RecordFn = Callable[[float, float], None]  # start and stop in seconds of time.perf_counter
_USABLE_SHARE = 0.9  # of memory without a budget: fragments, libraries and other processes take the rest


class Ticket(Protocol):
    """A copy under way."""

    def wait(self) -> None:
        """Make compute wait until the copy is done."""
        ...

    def join(self) -> None:
        """Block the calling thread until the copy is done and the host may read the result."""
        ...

    def abandon(self) -> None:
        """Block until the copy has ended; ignore its errors."""
        ...


class Device(ABC):
    """A compute device.

    Attributes:
        name: used in messages and traces.
        torch_device: device of its tensors.
        ledger: bytes in its memory.
        in_host_memory: True if it computes on host memory. Then the model's buffers stay in place, copies may cast, and the same
            operation gives the same bits every time.

    Example:
        >>> relay.device.name, relay.device.in_host_memory
        ('emulated device', True)
        >>> relay.device.figures()["memory_bytes"] is None  # without a budget
        True
    """

    name: str
    torch_device: torch.device
    ledger: Ledger
    in_host_memory: bool = False

    def current(self) -> AbstractContextManager[object]:
        """Make this PyTorch's current device while entered (its random generator, its streams)."""
        return nullcontext()

    def empty(self, numel: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Return a flat buffer on the device, shape (numel,). The caller books its bytes."""
        return torch.empty(numel, dtype=dtype, device=self.torch_device)

    def recycle(self, flat: torch.Tensor) -> None:  # noqa: B027 - optional: PyTorch's caching allocator needs no help
        """Return a buffer from `empty` for reuse."""

    @abstractmethod
    def host_empty(self, numel: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Return a flat buffer in host memory that copies reach at full speed, shape (numel,)."""

    @abstractmethod
    def issue(
        self,
        lane: str,
        copies: Sequence[Copy],
        record: RecordFn,
        label: str = "",
        overlaps: bool = True,
    ) -> Ticket:
        """Start copies on lane "h2d" or "d2h".

        The copies wait for all compute issued so far.

        Args:
            lane: "h2d" or "d2h".
            copies: (destination, source) pairs.
            record: called with start and stop of the copies.
            label: shown by profilers.
            overlaps: False if the caller waits for the copies at once.
        """

    @abstractmethod
    def start_timer(self, record: RecordFn, label: str = "") -> Callable[[], None]:
        """Start timing compute; call the result to stop. `record` gets start and stop, at the latest in `synchronize`."""

    def synchronize(self) -> None:  # noqa: B027 - optional: a synchronous device has nothing to do
        """Wait for all compute and deliver the outstanding records."""

    def figures(self) -> dict[str, Any]:
        """Return figures of the device and its link, as plain values for the header of a trace.

        Optional keys: "memory_bytes", "h2d_bytes_per_s", "d2h_bytes_per_s", "latency_s". None means no limit.
        """
        return {}

    def free_bytes(self) -> int | None:
        """Return the bytes free in the device's memory, regardless of the budget; None if it uses host memory."""
        return None

    @abstractmethod
    def close(self) -> None:
        """Join the device's threads and free its buffers."""


def free_bytes(device: Device | None) -> int:
    """Return the usable bytes of a device, regardless of its budget; of the host for None or a host device."""
    free = device.free_bytes() if device is not None else None
    return int(_USABLE_SHARE * (psutil.virtual_memory().available if free is None else free))


def return_freed_memory() -> None:
    """Return freed host memory to the system that glibc keeps because small tensors lie among it."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
    if trim is not None:
        trim(0)
