"""What the relay asks of a device: a few verbs, the same for an emulated and for a real one.

The loop never asks which device it has. Copies are *issued* on a lane and return a `Ticket`; whoever needs the result
waits for the ticket. That the copy runs in a thread or on a CUDA stream is the device's own affair.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch

from l2l_core.devices.ledger import Ledger

Copy = tuple[torch.Tensor, torch.Tensor]  # destination, source; same number of elements
RecordFn = Callable[[float, float], None]  # start and stop in seconds of time.perf_counter


class Ticket(Protocol):
    """A copy under way."""

    def wait(self) -> None:
        """Let compute proceed only when the copy is done."""

    def join(self) -> None:
        """Block the calling thread until the copy is done and the host may read the result."""

    def abandon(self) -> None:
        """Block until the copy is over, however it ended; nobody needs its result."""


class Device(ABC):
    """A compute device with memory of its own.

    Attributes:
        name: for people, in messages and traces.
        torch_device: where tensors of the device live.
        ledger: what fills its memory.
        in_host_memory: whether it computes on host memory. Then buffers of the model can stay where they are, copies
            cast on the way, and the same operation gives the same bits every time.
    """

    name: str
    torch_device: torch.device
    ledger: Ledger
    in_host_memory: bool = False

    def current(self) -> AbstractContextManager[object]:
        """Make this PyTorch's current device while entered: its random generator, its streams."""
        return nullcontext()

    def empty(self, numel: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Return a flat buffer on the device, shape (numel,). The caller books its bytes."""
        return torch.empty(numel, dtype=dtype, device=self.torch_device)

    def recycle(self, flat: torch.Tensor) -> None:  # noqa: B027 - a device with an allocator of its own needs no help
        """Say that a buffer from `empty` is no longer used."""

    @abstractmethod
    def host_empty(self, numel: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Return a flat buffer in host memory that copies can reach at full speed, shape (numel,)."""

    @abstractmethod
    def issue(
        self,
        lane: str,
        copies: Sequence[Copy],
        record: RecordFn,
        after: Ticket | None = None,
        label: str = "",
        overlaps: bool = True,
    ) -> Ticket:
        """Start copies on lane "h2d" or "d2h"; `record` gets their start and stop, profilers see `label`.

        The copies wait for all compute issued so far and, if given, for the ticket `after`. Whoever says that nothing `overlaps`
        waits for them at once.
        """

    @abstractmethod
    def start_timer(self, record: RecordFn, label: str = "") -> Callable[[], None]:
        """Begin to time compute; calling the result ends it, and `record` gets start and stop, now or in `settle`."""

    def synchronize(self) -> None:  # noqa: B027 - a device whose clocks are exact at once has nothing to do
        """Wait for all compute and deliver records that are still outstanding."""

    def figures(self) -> dict[str, Any]:
        """Say what is known of the device and its link, as plain values for the trace's header.

        Keys, each optional: "memory_bytes", "h2d_bytes_per_s", "d2h_bytes_per_s", "latency_s". None means no limit.
        """
        return {}

    def free_bytes(self) -> int | None:
        """Say how much of the device's memory is free now, whatever its budget; None if it has none of its own."""
        return None

    @abstractmethod
    def close(self) -> None:
        """Join every thread and free every buffer of the device's own."""
