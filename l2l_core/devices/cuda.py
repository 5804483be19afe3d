"""A CUDA GPU as the relay's device: three streams, and host memory that it copies to and from at full speed.

    compute   whatever stream is current while the relay runs
    h2d, d2h  one stream of our own per direction

    issue: the copy stream waits for compute as issued so far [1], copies, and records an event [2]
    wait:  the compute stream waits for that event [3]; the host goes on
    join:  the host waits for that event

The host runs ahead of the GPU and waits for nothing except where its own code reads a result. Times of events are those
of the GPU, brought to the axis of `time.perf_counter`; they reach their trace when the event is seen to be over.
"""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch

from l2l_core._torch import no_dispatch
from l2l_core.devices.device import Copy, Device, RecordFn, Ticket
from l2l_core.devices.ledger import Ledger
from l2l_core.devices.pinned_memory import PinnedMemory

_POLL_S = 2e-3  # how often finished events are looked for while a pass runs


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
    """An event of the trace whose end has not been seen yet.

    Invariant: what the host side of a copy is made of stays allocated until then. (The device side need not be held: the
    allocator was told which stream uses it.)
    """

    begun: Any
    done: Any
    record: RecordFn
    host: list[torch.Tensor]


class _CudaClock:
    """Places CUDA events on the axis of `time.perf_counter`."""

    def __init__(self, cuda: Any, stream: Any) -> None:
        self._zero: Any = None
        self._zero_s, least_s = 0.0, math.inf
        for _ in range(4):  # the first is slow; the quickest is the most exact
            event = cuda.Event(enable_timing=True)
            before_s = time.perf_counter()
            event.record(stream)
            event.synchronize()
            took_s = time.perf_counter() - before_s
            if took_s < least_s:  # rather a little early than late: what the host does after an event, comes after it
                self._zero, self._zero_s, least_s = event, before_s, took_s

    def seconds(self, event: Any) -> float:
        """Say when a finished event was recorded, to 1e-7 of the time since the zero (CUDA counts in float32)."""
        return self._zero_s + self._zero.elapsed_time(event) / 1e3


class CudaDevice(Device):
    """A GPU.

    Args:
        device: "cuda" (PyTorch's current one), "cuda:n" or n.
        memory_bytes: budget of the ledger, checked when something is booked; None for what the GPU has. What PyTorch
            itself keeps (workspaces of libraries, rounding to 512 bytes, fragments) is not in the ledger.

    Raises:
        ValueError: no such GPU, or a budget that is not positive.
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

    # -- what a test can replace to run without a GPU ------------------------------------------------------------------

    def _runtime(self) -> Any:
        return torch.cuda

    def _resolve(self, device: str | int) -> torch.device:
        """Return the device with its index; CUDA is initialised: random states include its generator from now on."""
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

        The allocator may hand out the memory of a tensor as soon as nobody on the host holds it, in the belief that all
        work on it was issued to the stream that it was allocated on. `record_stream` corrects that: memory that is freed
        (or a storage that is emptied) while copies on `stream` are under way is kept until they are over.
        """
        target.copy_(source, non_blocking=True)
        for tensor in (target, source):
            if tensor.is_cuda:
                tensor.record_stream(stream)

    def _clear_error(self) -> None:
        try:
            torch.zeros(1, device=self.torch_device)
        except RuntimeError:
            pass  # the error of the call before, reported once more

    # -- verbs ---------------------------------------------------------------------------------------------------------

    def current(self) -> AbstractContextManager[object]:
        return self._cuda.device(self.torch_device)

    def compute_stream(self) -> Any:
        """Return the stream that layers run on: the caller's current one. By way of autograd, backward has it too."""
        return self._cuda.current_stream(self.torch_device)

    def free_bytes(self) -> int:
        free, _ = self._cuda.mem_get_info(self.torch_device)
        # What PyTorch's allocator holds and nobody uses can be had too.
        idle = self._cuda.memory_reserved(self.torch_device) - self._cuda.memory_allocated(self.torch_device)
        return int(free + idle)

    @property
    def pinned_bytes(self) -> int:
        """Bytes of host memory that are pinned now."""
        return self._pinned.nbytes

    def host_empty(self, numel: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        with self.current():
            return self._pinned.empty(numel, dtype)

    def issue(
        self,
        lane: str,
        copies: Sequence[Copy],
        record: RecordFn,
        after: Ticket | None = None,
        label: str = "",
        overlaps: bool = True,
    ) -> Ticket:
        stream, compute = self._stream(lane), self.compute_stream()
        self._start_clock()
        # Blocking: a thread that joins sleeps meanwhile, and leaves its core to others.
        begun, done = self._cuda.Event(enable_timing=True), self._cuda.Event(enable_timing=True, blocking=True)
        shown = self._cuda.nvtx.range_start(label)
        with no_dispatch(), self._cuda.stream(stream):  # the dispatch modes of a forward are not to see engine's copies
            stream.wait_stream(compute)  # [1] what is read has been computed; what is overwritten has been read
            if after is not None:
                stream.wait_event(after.done)  # type: ignore[attr-defined]  # a ticket of this device
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
        self._deliver_events(all_over=True)
        self._clock = None  # a fresh one per pass: events are timed in float32, from its zero
        self._pinned.end_pass()

    def close(self) -> None:
        """Wait for everything and unpin host memory; masters stay valid as ordinary memory."""
        try:
            self.synchronize()
        finally:
            self._streams.clear()
            for outstanding in self._pending.values():
                outstanding.clear()
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

    def _deliver_events(self, all_over: bool = False) -> None:
        """Hand over the events that have ended, lane by lane in order; often called, and cheap when called often.

        Copies are issued by the relay's thread and, where backward touches the stash, by autograd's.
        """
        now_s = time.perf_counter()
        # Whoever finds another thread at it leaves the events to that one, which delivers them in order.
        if (now_s < self._next_poll_s and not all_over) or not self._delivering.acquire(blocking=all_over):
            return
        try:
            self._next_poll_s = now_s + _POLL_S
            for outstanding in self._pending.values():
                while outstanding and (all_over or outstanding[0].done.query()):
                    event = outstanding.popleft()
                    assert self._clock is not None
                    event.record(self._clock.seconds(event.begun), self._clock.seconds(event.done))
        finally:
            self._delivering.release()
