"""Contents of time pictures of a session: the running step left of a cursor, the previous step right of it.

Steps shorter than `SHORT_S` are shown when they are finished.
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
    """Columns to draw; the fields are those of `draw_timeline`."""

    now: Columns
    before: Columns | None
    now_s: float | None
    span_s: float
    keys: Iterable[str]  # keys of the layers at that step


def make_sweep(snapshot: Snapshot, span_s: float = 0.0) -> Sweep | None:
    """Return the columns of a snapshot to draw; None before the first step.

    Args:
        snapshot: snapshot of the session.
        span_s: present end of the time axis, kept while it fits.
    """
    last = Columns.of(snapshot.last) if snapshot.last is not None else None
    short = last is not None and last.end_s < SHORT_S
    if snapshot.progress is None or short:
        if last is None or snapshot.last is None:
            return None
        return Sweep(last, None, None, _stable_span(span_s, last.end_s), snapshot.last.names)
    part = Columns.of(snapshot.progress.trace, snapshot.progress.events, snapshot.progress.samples)
    # at least as long as the previous step, so that the axis does not move when the step ends
    end_s = max(snapshot.progress.now_s, last.end_s if last is not None else 0.0)
    return Sweep(part, last, snapshot.progress.now_s, _stable_span(span_s, end_s), snapshot.progress.trace.names)


def failed_trace(snapshot: Snapshot) -> Trace | None:
    """Return the trace of the step that has just failed for lack of device memory, if any."""
    trace = snapshot.failure.trace if snapshot.failure is not None else None
    return trace if trace is not None and trace.failed is not None and trace.failed.asked_bytes else None


def make_failed_sweep(snapshot: Snapshot, span_s: float = 0.0) -> Sweep | None:
    """Return the columns of a step that failed for lack of device memory, over the last finished step, if any."""
    trace = failed_trace(snapshot)
    if trace is None or trace.failed is None:
        return None
    part, last = Columns.of(trace), Columns.of(snapshot.last) if snapshot.last is not None else None
    end_s = max(trace.failed.t_s, last.end_s if last is not None else 0.0)
    return Sweep(part, last, trace.failed.t_s, _stable_span(span_s, end_s), trace.names)


def describe_sweep(snapshot: Snapshot, sweep: Sweep | None) -> str:
    """Return branch and step left and right of the cursor, in words."""
    if sweep is None or sweep.now_s is None:
        return snapshot.shown_words
    previous = f"; right of the cursor, {snapshot.shown_words}" if sweep.before is not None else ""
    return f"{snapshot.progress_words if snapshot.progress is not None else snapshot.failed_words}{previous}"


def _stable_span(span_s: float, end_s: float) -> float:
    """Return the end of the axis, which changes only if it is too short or more than half is empty."""
    return span_s if 0 < end_s <= span_s <= 2 * end_s else round_up(1.05 * end_s)
