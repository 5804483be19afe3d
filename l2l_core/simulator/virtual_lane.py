"""Lanes on a virtual clock: copies, as `Lane` of `step/traffic/lanes.py`, and both directions of a disk."""

from __future__ import annotations

from bisect import bisect_right, insort
from collections import deque
from collections.abc import Callable, Mapping
from itertools import pairwise
from typing import Any

from l2l_core.schedule_rules import chunk_bounds
from l2l_core.simulator.step_costs import CopySpeed
from l2l_core.trace import Event


class VirtualLane:
    """One direction of the link, in order of issue. A whole layer is sent in pieces, one per turn."""

    def __init__(
        self, name: str, speed: CopySpeed, figures: Mapping[str, Any], chunks: int, events: list[Event]
    ) -> None:
        bytes_per_s = figures.get(f"{name}_bytes_per_s") or speed.bytes_per_s
        # The measured time contains a latency, so adding another would count it twice
        self._fixed_s = max(speed.fixed_s, figures.get("latency_s") or 0.0)
        self._s_per_byte = 1 / bytes_per_s
        self._name, self._chunks, self._add_event = name, chunks, events.append
        self._free_s = 0.0
        self._pending: deque[int] = deque()  # remaining pieces of the chunked copy
        self._count = 0  # number of its pieces
        self._event = "", "", -1  # its kind, layer and weight slot
        self._on_done: Callable[[float], None] = lambda done_s: None

    def send(
        self, t: float, kind: str, layer: str, nbytes: int, k: int = -1, visit: int = -1, **of_piece: int
    ) -> float:
        """Issue a copy at `t`; return its end. A chunked copy has `slot`, `piece`, `pieces`, see `Event`."""
        start_s = self._free_s if self._free_s > t else t
        self._free_s = stop_s = start_s + self._fixed_s + nbytes * self._s_per_byte
        self._add_event(Event(self._name, kind, start_s, stop_s, layer, k, nbytes, visit, **of_piece))
        return stop_s

    def send_chunked(
        self,
        t: float,
        kind: str,
        layer: str,
        nbytes: int,
        itemsize: int,
        on_done: Callable[[float], None],
        slot: int = -1,
    ) -> None:
        """Issue the first piece of a copy, the others turn by turn; call `on_done` with the end of the last."""
        self.flush(t)  # a lane has one chunked copy at a time
        edges = chunk_bounds(nbytes // itemsize, itemsize, self._chunks)
        self._pending.extend(itemsize * (stop - start) for start, stop in pairwise(edges))
        self._count, self._event, self._on_done = len(self._pending), (kind, layer, slot), on_done
        self.send_chunk(t)

    def send_chunk(self, t: float) -> None:
        """Send the next piece, if any."""
        if self._pending:
            (kind, layer, slot), piece = self._event, self._count - len(self._pending)
            nbytes = self._pending.popleft()
            done_s = self.send(t, kind, layer, nbytes, slot=slot, piece=piece, pieces=self._count)
            if not self._pending:
                self._on_done(done_s)

    def flush(self, t: float) -> None:
        """Send all remaining pieces."""
        while self._pending:
            self.send_chunk(t)


class VirtualDiskLane:
    """One direction of a disk: serial, in order of readiness, not of issue."""

    def __init__(self, name: str, bytes_per_s: float, events: list[Event]) -> None:
        self._name, self._bytes_per_s, self._add_event = name, bytes_per_s, events.append
        self._busy: list[tuple[float, float]] = []  # sorted, without overlaps

    def transfer(self, t: float, layer: str, nbytes: int, kind: str, k: int = -1, visit: int = -1) -> float:
        """Move `nbytes` in the first free interval from `t` on; return the end."""
        seconds = nbytes / self._bytes_per_s
        for start_s, stop_s in self._busy[max(0, bisect_right(self._busy, (t, t)) - 1) :]:
            if t + seconds <= start_s:
                break
            t = max(t, stop_s)
        insort(self._busy, (t, t + seconds))
        self._add_event(Event(self._name, kind, t, t + seconds, layer, k, nbytes, visit))
        return t + seconds
