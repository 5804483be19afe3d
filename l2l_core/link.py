"""Copies of one kind in one direction, issued and recorded."""

from __future__ import annotations

from collections.abc import Sequence

from l2l_core.device import Copy, Device, Ticket
from l2l_core.trace import Event, Trace


class Link:
    """Issues copies on a lane of the device, adds them to the trace as events of `kind`, and counts their bytes."""

    def __init__(self, device: Device, trace: Trace, lane: str, kind: str) -> None:
        self._device, self._trace, self._lane, self._kind = device, trace, lane, kind
        self.nbytes = 0

    def __call__(self, layer: str, copies: Sequence[Copy], k: int = -1) -> Ticket:
        """Start copies that belong to `layer` and micro-batch `k` as one event."""
        nbytes = sum(target.nbytes for target, _ in copies)
        self.nbytes += nbytes
        t0, add = self._trace.began_s, self._trace.add
        lane, kind = self._lane, self._kind
        return self._device.issue(lane, copies, lambda a, b: add(Event(lane, kind, a - t0, b - t0, layer, k, nbytes)))
