"""A CUDA GPU as the relay's device: three streams and pinned host memory.

    compute   the stream that is current while the relay runs
    h2d, d2h  one separate stream per direction

    issue: the copy stream waits for the compute issued so far [1], copies, and records an event [2]
    wait:  the compute stream waits for that event [3]; the host continues
    join:  the host waits for that event

The host runs ahead of the GPU and waits only where its code reads a result. Event times are measured by the GPU, converted to
`time.perf_counter`, and delivered to the trace when the event is found to be complete.
"""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from typing import Any

import torch

from l2l_core._torch import no_dispatch
from l2l_core.devices.device import Copy, Device, RecordFn, Ticket
from l2l_core.devices.ledger import Ledger
from l2l_core.devices.pinned_memory import PinnedMemory

_POLL_S = 2e-3  # interval between checks for finished events during a pass


class _CudaTicket:
    """Copies on a copy stream."""

    def __init__(self, device: CudaDevice, done: Any) -> None:
        self._device, self.done = device, done

    def wait(self) -> None:
        self._device.compute_stream().wait_event(self.done)  # [3]

    def join(self) -> None:
        self.done.synchronize()

    abandon = join


@dataclass(slots=True)
class _PendingEvent:
    """An event of the trace that is not known to be complete.

    Keeps the host tensors of a copy allocated until then. Device tensors are protected by `record_stream`.
    """

    begun: Any
    done: Any
    record: RecordFn
    host: list[torch.Tensor]


class _CudaClock:
    """Converts CUDA events to the time of `time.perf_counter`."""

    def __init__(self, cuda: Any, stream: Any) -> None:
        self._zero: Any = None
        self._zero_s, least_s = 0.0, math.inf
        for _ in range(4):  # the first is slow; the quickest is the most accurate
            event = cuda.Event(enable_timing=True)
            before_s = time.perf_counter()
            event.record(stream)
            event.synchronize()
            took_s = time.perf_counter() - before_s
            if took_s < least_s:  # early rather than late, so that later host times stay later
                self._zero, self._zero_s, least_s = event, before_s, took_s

    def seconds(self, event: Any) -> float:
        """Return the time of a finished event, to 1e-7 of the time since the zero (CUDA counts in float32)."""
        return self._zero_s + self._zero.elapsed_time(event) / 1e3


class CudaDevice(Device):
    """A CUDA GPU.

    Args:
        device: "cuda" (PyTorch's current one), "cuda:n" or n.
        memory_bytes: budget of the ledger, checked at every booking; None for no limit but the GPU's memory. The ledger leaves
            out PyTorch's overhead (workspaces of libraries, rounding to 512 bytes, fragmentation).

    Raises:
        ValueError: no such GPU, or a budget that is not positive.

    Example:
        >>> from l2l_core import CudaDevice
        >>> CudaDevice("cuda:0", memory_bytes=0)
        Traceback (most recent call last):
        ValueError: memory_bytes=0: must be positive, or None for no limit
    """

    def __init__(self, device: str | int = "cuda", memory_bytes: int | None = None) -> None:
        if memory_bytes is not None and not memory_bytes > 0:
            raise ValueError(f"memory_bytes={memory_bytes!r}: must be positive, or None for no limit")
        self.memory_bytes = memory_bytes
        self._cuda: Any = self._runtime()
        self.torch_device = self._resolve(device)
        self.name = self._describe()
        self.ledger = Ledger("device", self.name, memory_bytes)
        self._streams: dict[str, Any] = {}
        self._pending: dict[str, deque[_PendingEvent]] = {lane: deque() for lane in ("compute", "h2d", "d2h")}
        self._delivering = threading.Lock()
        self._next_poll_s = 0.0
        self._clock: _CudaClock | None = None
        self._pinned = PinnedMemory(self._cuda.cudart(), self._clear_error)

    def __repr__(self) -> str:
        return f"CudaDevice({str(self.torch_device)!r}, memory_bytes={self.memory_bytes})"

    # -- replaced by tests that run without a GPU ----------------------------------------------------------------------

    def _runtime(self) -> Any:
        return torch.cuda

    def _resolve(self, device: str | int) -> torch.device:
        """Return the device with its index, and initialise CUDA so that random states include its generator."""
        try:
            found = torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
        except RuntimeError:
            found = torch.device("cpu")
        if found.type != "cuda":
            raise ValueError(f"device={device!r} is not a CUDA device: give 'cuda', 'cuda:n' or a number")
        if not torch.cuda.is_available():
            raise ValueError(
                f"device={device!r} does not exist: PyTorch finds no CUDA device. Use 'cpu' or EmulatedDevice(...)"
            )
        count = torch.cuda.device_count()
        index = torch.cuda.current_device() if found.index is None else found.index
        if index >= count:
            raise ValueError(f"device={device!r} does not exist: there are {count}, cuda:0 to cuda:{count - 1}")
        torch.cuda.init()
        return torch.device("cuda", index)

    def _describe(self) -> str:
        return f"{self.torch_device} ({torch.cuda.get_device_name(self.torch_device)})"

    def _copy(self, target: torch.Tensor, source: torch.Tensor, stream: Any) -> None:
        """Enqueue one copy on `stream`, which is current.

        The allocator reuses a tensor's memory once the host drops it, assuming that all work on it was issued to the stream of
        its allocation. `record_stream` delays the reuse until the copies on `stream` are complete.
        """
        target.copy_(source, non_blocking=True)
        for tensor in (target, source):
            if tensor.is_cuda:
                tensor.record_stream(stream)

    def _clear_error(self) -> None:
        with suppress(RuntimeError):  # the error of the call before, reported once more
            torch.zeros(1, device=self.torch_device)

    # -- interface of Device -------------------------------------------------------------------------------------------

    def current(self) -> AbstractContextManager[object]:
        return self._cuda.device(self.torch_device)

    def compute_stream(self) -> Any:
        """Return the stream that layers run on: the caller's current one, which autograd also uses for backward."""
        return self._cuda.current_stream(self.torch_device)

    def free_bytes(self) -> int:
        free, _ = self._cuda.mem_get_info(self.torch_device)
        cached = self._cuda.memory_reserved(self.torch_device) - self._cuda.memory_allocated(self.torch_device)
        return int(free + cached)

    @property
    def pinned_bytes(self) -> int:
        """Bytes of host memory pinned now."""
        return self._pinned.nbytes

    def host_empty(self, numel: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        with self.current():
            return self._pinned.empty(numel, dtype)

    def issue(
        self,
        lane: str,
        copies: Sequence[Copy],
        record: RecordFn,
        label: str = "",
        overlaps: bool = True,
    ) -> Ticket:
        stream, compute = self._stream(lane), self.compute_stream()
        self._start_clock()
        # Blocking: a thread that joins sleeps and leaves its core to others.
        begun, done = self._cuda.Event(enable_timing=True), self._cuda.Event(enable_timing=True, blocking=True)
        shown = self._cuda.nvtx.range_start(label)
        with no_dispatch(), self._cuda.stream(stream):  # hide the engine's copies from dispatch modes
            stream.wait_stream(compute)  # [1] sources are computed, and old values of targets read
            begun.record(stream)
            for target, source in copies:
                assert target.dtype == source.dtype, f"{label}: {source.dtype} to {target.dtype}; copies do not cast"
                self._copy(target, source, stream)
            done.record(stream)  # [2]
        self._cuda.nvtx.range_end(shown)
        host = [tensor for pair in copies for tensor in pair if not tensor.is_cuda]
        self._pending[lane].append(_PendingEvent(begun, done, record, host))
        self._deliver_events()
        return _CudaTicket(self, done)

    def start_timer(self, record: RecordFn, label: str = "") -> Callable[[], None]:
        self._start_clock()
        begun, shown = self._cuda.Event(enable_timing=True), self._cuda.nvtx.range_start(label)
        begun.record(self.compute_stream())

        def stop() -> None:
            done = self._cuda.Event(enable_timing=True)
            done.record(self.compute_stream())
            self._cuda.nvtx.range_end(shown)
            self._pending["compute"].append(_PendingEvent(begun, done, record, []))
            self._deliver_events()

        return stop

    def synchronize(self) -> None:
        self.compute_stream().synchronize()
        for stream in self._streams.values():
            stream.synchronize()
        self._deliver_events(all_complete=True)
        self._clock = None  # a new one per pass, since float32 loses accuracy over time
        self._pinned.end_pass()

    def close(self) -> None:
        """Wait for all work and unpin host memory; masters stay valid as ordinary memory."""
        try:
            self.synchronize()
        finally:
            self._streams.clear()
            for pending in self._pending.values():
                pending.clear()
            with self.current():
                self._pinned.close()

    # -- helpers -------------------------------------------------------------------------------------------------------

    def _stream(self, lane: str) -> Any:
        if lane not in self._streams:
            with self.current():
                self._streams[lane] = self._cuda.Stream()
        return self._streams[lane]

    def _start_clock(self) -> None:
        if self._clock is None:
            with self.current():
                self._clock = _CudaClock(self._cuda, self._stream("h2d"))

    def _deliver_events(self, all_complete: bool = False) -> None:
        """Deliver the completed events, lane by lane in order; cheap when called often.

        Called from the relay's thread and, where backward touches the stash, from autograd's.
        """
        now_s = time.perf_counter()
        # A thread that already delivers keeps doing so, in order; this one returns.
        if (now_s < self._next_poll_s and not all_complete) or not self._delivering.acquire(blocking=all_complete):
            return
        try:
            self._next_poll_s = now_s + _POLL_S
            for pending in self._pending.values():
                while pending and (all_complete or pending[0].done.query()):
                    event = pending.popleft()
                    assert self._clock is not None
                    event.record(self._clock.seconds(event.begun), self._clock.seconds(event.done))
        finally:
            self._delivering.release()
