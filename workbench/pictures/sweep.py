"""What the pictures of time show of a session: the step under way, drawn over the step before.

Left of the cursor is the step under way, right of it what the last step did there. So the whole picture is always there
and only the cursor moves. Steps that are over in a few frames are shown when they are finished.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from l2l_core import Trace
from workbench.pictures.scale import round_up
from workbench.readings import Columns
from workbench.session import Snapshot

SHORT_S = 0.25  # a step that takes less would flicker


class Sweep(NamedTuple):
    """Holds columns to draw; see `draw_timeline` for the fields."""

    now: Columns
    before: Columns | None
    now_s: float | None
    span_s: float
    keys: Iterable[str]  # of the layers of that step, which may be others now


def make_sweep(snapshot: Snapshot, span_s: float = 0.0) -> Sweep | None:
    """Return what to draw of a snapshot; None if there is nothing yet.

    Args:
        now: the session.
        span_s: end of the time axis so far; it stays while it fits.
    """
    last = Columns.of(snapshot.last) if snapshot.last is not None else None
    short = last is not None and last.end_s < SHORT_S
    if snapshot.progress is None or short:
        if last is None or snapshot.last is None:
            return None
        return Sweep(last, None, None, _stable_span(span_s, last.end_s), snapshot.last.names)
    part = Columns.of(snapshot.progress.trace, snapshot.progress.events, snapshot.progress.samples)
    # as long as the step before, too: the axis must not move when the step ends
    end_s = max(snapshot.progress.now_s, last.end_s if last is not None else 0.0)
    return Sweep(part, last, snapshot.progress.now_s, _stable_span(span_s, end_s), snapshot.progress.trace.names)


def failed_trace(snapshot: Snapshot) -> Trace | None:
    """Return the step that the session has just failed on for want of device memory; None if there is no such step."""
    trace = snapshot.failure.trace if snapshot.failure is not None else None
    return trace if trace is not None and trace.failed is not None and trace.failed.asked_bytes else None


def make_failed_sweep(snapshot: Snapshot, span_s: float = 0.0) -> Sweep | None:
    """Return the same of that step, up to where it failed, over the last finished one; None if there is no such step."""
    trace = failed_trace(snapshot)
    if trace is None or trace.failed is None:
        return None
    part, last = Columns.of(trace), Columns.of(snapshot.last) if snapshot.last is not None else None
    end_s = max(trace.failed.t_s, last.end_s if last is not None else 0.0)
    return Sweep(part, last, trace.failed.t_s, _stable_span(span_s, end_s), trace.names)


def describe_sweep(snapshot: Snapshot, sweep: Sweep | None) -> str:
    """Say of which branch and step it is, left of the cursor and right of it."""
    if sweep is None or sweep.now_s is None:
        return snapshot.shown_words
    before = f"; right of the cursor, {snapshot.shown_words}" if sweep.before is not None else ""
    return f"{snapshot.progress_words if snapshot.progress is not None else snapshot.failed_words}{before}"


def _stable_span(span_s: float, end_s: float) -> float:
    """The end of the axis: it moves only when it must, or when most of the axis is empty."""
    return span_s if 0 < end_s <= span_s <= 2 * end_s else round_up(1.05 * end_s)  # 0: a step without events
