"""A device emulated on the CPU: real computation, a memory budget, and copies delayed to a given bandwidth.

A copy takes at least latency plus bytes over bandwidth, in real time. Copies run on one thread per direction, or in the caller's
thread if nothing overlaps with them. Compute runs at the speed of this CPU; a GPU's arithmetic is not modelled.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from typing import Any

import torch

from l2l_core.devices.device import Copy, Device, RecordFn, Ticket
from l2l_core.devices.executors import InlineExecutor, NoTorchModes, serial_executor, sleep_until
from l2l_core.devices.ledger import Ledger
from l2l_core.trace import format_bytes, parse_bytes

_INLINE = InlineExecutor(NoTorchModes)


class _CopyTicket:
    def __init__(self, job: Future[None]) -> None:
        self._job = job

    def wait(self) -> None:
        self._job.result()

    join = wait

    def abandon(self) -> None:
        self._job.exception()  # waits, and raises nothing


class EmulatedDevice(Device):
    """CPU memory with a budget, used as a device behind a link.

    Args:
        memory_bytes: budget of the device, as a number or as text: ``"4 MB"``; None for no limit.
        h2d_bytes_per_s: bandwidth to the device; None for the speed of a memory copy.
        d2h_bytes_per_s: bandwidth from the device, independent of the other direction.
        latency_s: fixed cost of every copy, in seconds.

    Raises:
        ValueError: a figure is not positive (the latency may be 0).

    Example:
        >>> from l2l_core import EmulatedDevice
        >>> device = EmulatedDevice("1 MB", h2d_bytes_per_s=1e9, d2h_bytes_per_s=1e9)
        >>> relay.close()  # a model belongs to one relay
        >>> with Relay(model, device=device, loss=nn.CrossEntropyLoss()) as relay:
        ...     relay.step(batch).peak_device_bytes < 1_000_000
        True
    """

    in_host_memory = True

    def __init__(
        self,
        memory_bytes: int | str | None = None,
        h2d_bytes_per_s: float | None = None,
        d2h_bytes_per_s: float | None = None,
        latency_s: float = 0.0,
    ) -> None:
        memory_bytes = parse_bytes(memory_bytes, "memory_bytes") if isinstance(memory_bytes, str) else memory_bytes
        figures = {"memory_bytes": memory_bytes, "h2d_bytes_per_s": h2d_bytes_per_s, "d2h_bytes_per_s": d2h_bytes_per_s}
        for name, value in figures.items():
            if value is not None and not value > 0:
                raise ValueError(f"{name}={value!r}: must be positive, or None for no limit")
        if not latency_s >= 0:
            raise ValueError(f"latency_s={latency_s!r}: must be 0 or more seconds")
        self.memory_bytes, self.latency_s = memory_bytes, latency_s
        self.bytes_per_s = {"h2d": h2d_bytes_per_s, "d2h": d2h_bytes_per_s}
        self.name = "emulated device" + (f" of {format_bytes(memory_bytes)}" if memory_bytes else "")
        self.torch_device = torch.device("cpu")
        self.ledger = Ledger("device", f"The {self.name}", memory_bytes)
        self._lanes: dict[str, ThreadPoolExecutor] = {}
        self._free_buffers: dict[tuple[int, torch.dtype], list[torch.Tensor]] = defaultdict(list)

    def __repr__(self) -> str:
        return (
            f"EmulatedDevice(memory_bytes={self.memory_bytes}, h2d_bytes_per_s={self.bytes_per_s['h2d']}, "
            f"d2h_bytes_per_s={self.bytes_per_s['d2h']}, latency_s={self.latency_s})"
        )

    def figures(self) -> dict[str, Any]:
        return {
            "memory_bytes": self.memory_bytes,
            "h2d_bytes_per_s": self.bytes_per_s["h2d"],
            "d2h_bytes_per_s": self.bytes_per_s["d2h"],
            "latency_s": self.latency_s,
        }

    def throttle(
        self, h2d_bytes_per_s: float | None = None, d2h_bytes_per_s: float | None = None, latency_s: float = 0.0
    ) -> None:
        """Change the figures of the link, as in the constructor; copies that have begun keep the old ones."""
        checked = EmulatedDevice(None, h2d_bytes_per_s, d2h_bytes_per_s, latency_s)
        self.bytes_per_s, self.latency_s = checked.bytes_per_s, latency_s

    def empty(self, numel: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        free = self._free_buffers[numel, dtype]
        return free.pop() if free else torch.empty(numel, dtype=dtype)

    def recycle(self, flat: torch.Tensor) -> None:
        self._free_buffers[flat.numel(), flat.dtype].append(flat)

    def host_empty(self, numel: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.empty(numel, dtype=dtype)

    def issue(
        self,
        lane: str,
        copies: Sequence[Copy],
        record: RecordFn,
        label: str = "",
        overlaps: bool = True,
    ) -> Ticket:
        executor: Executor = self._thread(lane) if overlaps else _INLINE
        return _CopyTicket(executor.submit(self._run, lane, list(copies), record))

    def _thread(self, lane: str) -> ThreadPoolExecutor:
        if lane not in self._lanes:
            self._lanes[lane] = serial_executor(lane)
        return self._lanes[lane]

    def _run(self, lane: str, copies: list[Copy], record: RecordFn) -> None:
        start_s, bytes_per_s = time.perf_counter(), self.bytes_per_s[lane]
        nbytes = sum(target.copy_(source).nbytes for target, source in copies)
        sleep_until(start_s + self.latency_s + (nbytes / bytes_per_s if bytes_per_s else 0.0))
        copies.clear()  # the thread keeps its arguments a while longer; the tensors must be free when the wait ends
        record(start_s, time.perf_counter())

    def start_timer(self, record: RecordFn, label: str = "") -> Callable[[], None]:
        start_s = time.perf_counter()
        return lambda: record(start_s, time.perf_counter())

    def close(self) -> None:
        for thread in self._lanes.values():
            thread.shutdown(wait=True)
        self._lanes.clear()
        self._free_buffers.clear()
