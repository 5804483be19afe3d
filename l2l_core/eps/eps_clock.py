"""Timing of the EPS's work: successive events on the lane ``eps``."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from l2l_core.trace import Event, Trace


class EPSClock:
    """Adds events of the lane ``eps`` to the trace of a step, from the EPS's thread.

    Invariant: at most one event is open. An event is split around waits for other workers or for a disk.
    """

    def __init__(self, trace: Trace) -> None:
        self.trace = trace
        self._start_s = 0.0
        self._parts: list[tuple[float, float]] = []  # finished parts of the open event

    def start(self) -> None:
        """Open an event; an earlier open event is dropped."""
        self._start_s, self._parts = time.perf_counter(), []

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Exclude a wait for other workers or a disk from the open event."""
        self._parts.append((self._start_s, time.perf_counter()))
        yield
        self._start_s = time.perf_counter()

    def stop(self, kind: str, layer: str = "", k: int = -1, nbytes: int = 0) -> None:
        """End the open event; its last part has the bytes."""
        t0, add = self.trace.began_s, self.trace.add
        for start_s, stop_s in self._parts:
            add(Event("eps", kind, start_s - t0, stop_s - t0, layer, k))
        add(Event("eps", kind, self._start_s - t0, time.perf_counter() - t0, layer, k, nbytes))
