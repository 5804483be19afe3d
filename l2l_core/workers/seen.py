"""What workers do together, as events of a trace: waiting for the last one to come, and the exchange after that."""

from __future__ import annotations

from l2l_core.trace import Event, Trace
from l2l_core.workers.channel import Handshake


def record_collective(trace: Trace, lane: str, kind: str, layer: str, handshake: Handshake, nbytes: int = 0) -> None:
    """Add an event for a collective that is over now.

    Args:
        trace: of the step.
        lane: "gather" or "reduce".
        kind: of event.
        layer: key of the layer, if it is about one.
        met: who came when.
        nbytes: what came from other workers; about as much went to them.
    """
    stop_s = trace.now()
    start_s = min(handshake.began_s - trace.worker.began_s, stop_s)
    trace.add(
        Event(lane, kind, start_s, stop_s, layer, nbytes=nbytes, stalled_s=handshake.waited_s, last=handshake.last)
    )
