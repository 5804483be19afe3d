"""A GPU that copies as late as it may: `CudaDevice` over a double of the CUDA runtime, on a machine without one.

Compute runs at once. A copy only joins the queue of its stream, and runs when somebody waits for it, on the host or on
the compute stream. So every wait that the relay forgets shows: layers compute with what was in the slot before, the EPS
reads what was in the buffer before, a gradient is overwritten before it has left.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch.utils._mode_utils import no_dispatch

from l2l_core import CudaDevice


class Stream:
    """A queue of work. Invariant: what comes off it runs in order, one at a time."""

    def __init__(self) -> None:
        self.queue: deque[Callable[[], object]] = deque()
        self.lock = threading.RLock()

    def enqueue(self, work: Callable[[], object]) -> None:
        self.queue.append(work)

    def wait_stream(self, other: Stream) -> None:
        assert isinstance(other, ComputeStream), "only compute is waited for as a whole; it is never late"

    def wait_event(self, event: Event) -> None:
        self.enqueue(event.synchronize)

    def synchronize(self) -> None:
        self.run_until(lambda: False)

    def run_until(self, over: Callable[[], bool]) -> None:
        with self.lock, no_dispatch():
            while self.queue and not over():
                self.queue.popleft()()


class ComputeStream(Stream):
    """What runs on it runs at once, so waiting for an event means to make it happen."""

    def enqueue(self, work: Callable[[], object]) -> None:
        work()

    def wait_event(self, event: Event) -> None:
        event.synchronize()


class Event:
    def __init__(self, enable_timing: bool = False, blocking: bool = False) -> None:
        self.timed, self.stream, self.at_s = enable_timing, None, 0.0

    def record(self, stream: Stream) -> None:
        self.stream = stream
        stream.enqueue(self._happen)

    def _happen(self) -> None:
        self.at_s = time.perf_counter()

    def query(self) -> bool:
        return self.at_s > 0

    def synchronize(self) -> None:
        assert self.stream is not None, "waits for an event that was never recorded"
        self.stream.run_until(self.query)

    def elapsed_time(self, later: Event) -> float:
        assert self.timed and later.timed and self.query() and later.query()
        return (later.at_s - self.at_s) * 1e3


class Runtime:
    """cudaHostRegister and its counterpart, with the rules that they enforce; `refuses` makes calls fail."""

    def __init__(self) -> None:
        self.registered: dict[int, int] = {}  # address -> bytes
        self.refuses = 0

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:  # noqa: N802 - its name
        if self.refuses:
            self.refuses -= 1
            return 2
        overlaps = any(a < address + nbytes and address < a + n for a, n in self.registered.items())
        if overlaps or address % 4096:
            return 712
        self.registered[address] = nbytes
        return 0

    def cudaHostUnregister(self, address: int) -> int:  # noqa: N802 - its name
        return 0 if self.registered.pop(address, None) else 713

    @property
    def nbytes(self) -> int:
        return sum(self.registered.values())


class Ranges:
    """Profiler ranges: names seen, and how many are open."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self.open: set[int] = set()

    def range_start(self, name: str) -> int:
        self.names.append(name)
        self.open.add(len(self.names))
        return len(self.names)

    def range_end(self, number: int) -> None:
        self.open.remove(number)


class LateCuda:
    """What `CudaDevice` uses of `torch.cuda`."""

    Event = Event

    def __init__(self) -> None:
        self.compute, self.runtime, self.nvtx = ComputeStream(), Runtime(), Ranges()
        self.current = self.compute

    def Stream(self) -> Stream:  # noqa: N802 - its name
        return Stream()

    def cudart(self) -> Runtime:
        return self.runtime

    def current_stream(self, device: Any) -> Stream:
        return self.current

    def device(self, device: Any) -> Any:
        return nullcontext()

    @contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before


class LateDevice(CudaDevice):
    """See above."""

    def _runtime(self) -> Any:
        self.cuda = LateCuda()
        return self.cuda

    def _resolve(self, device: str | int) -> torch.device:
        return torch.device("cpu")

    def _describe(self) -> str:
        return "late double of a GPU"

    def _copy(self, target: torch.Tensor, source: torch.Tensor, stream: Stream) -> None:
        stream.enqueue(lambda: target.copy_(source))

    def _clear_error(self) -> None:
        pass
