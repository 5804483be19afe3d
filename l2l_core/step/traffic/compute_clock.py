"""Timing of the compute lane, without the time for which compute is stalled."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

from l2l_core.devices import Device
from l2l_core.trace import Event, Trace

_ALREADY_STALLED = nullcontext()  # a stall inside another one


class ComputeClock:
    """Adds compute events of a device to a trace.

    Invariant: at most one event is open. A stall splits an event in two, so that stalled time is not compute time.

    Attributes:
        stay: number of the present layer's stay on the device, from 0; -1 before the first one.
    """

    def __init__(self, device: Device, trace: Trace) -> None:
        self._device, self._trace = device, trace
        self._event: tuple[str, str, int, int] = "", "", -1, -1  # kind, layer, micro-batch, visit
        self._stalled_s = 0.0  # since the last event
        self._is_stalled = False
        self.stay = -1
        self._stop: Callable[[], None] | None = None

    def start(self, kind: str, layer: str, k: int, visit: int = -1) -> None:
        """Open an event."""
        assert self._stop is None, f"{kind} of {layer} begins within {self._event}"
        self._event = kind, layer, k, visit
        # Bound now: a GPU reports the times later, during another event.
        t0, add, stalled_s, stay = self._trace.began_s, self._trace.add, self._stalled_s, self.stay
        self._stalled_s = 0.0
        self._stop = self._device.start_timer(
            lambda a, b: add(Event("compute", kind, a - t0, b - t0, layer, k, 0, visit, stalled_s, stay)),
            f"{kind} {layer} k={k}",
        )

    def stop(self) -> None:
        """Close the open event, if any."""
        if self._stop is not None:
            self._stop()
            self._stop = None

    def stalled(self) -> AbstractContextManager[None]:
        """Return a context in which compute waits: an open event ends before it and continues after it."""
        return _ALREADY_STALLED if self._is_stalled else _Stall(self)


class _Stall(AbstractContextManager[None]):
    """Context of `ComputeClock.stalled`. Every turn has several; a generator would take twice as long."""

    def __init__(self, clock: ComputeClock) -> None:
        self._clock = clock

    def __enter__(self) -> None:
        clock = self._clock
        clock._is_stalled, self._is_open = True, clock._stop is not None
        clock.stop()
        self._began_s = time.perf_counter()

    def __exit__(self, kind: object, *_: object) -> None:
        clock = self._clock
        clock._is_stalled = False
        clock._stalled_s += time.perf_counter() - self._began_s
        if self._is_open and kind is None:
            clock.start(*clock._event)
