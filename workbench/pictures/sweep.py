"""What the pictures of time show of a session: like an oscilloscope, the step under way over the one before.

Left of the cursor is the step under way, right of it what the last step did there. So the whole picture is always there
and only the cursor moves. Steps that are over in a few frames are shown when they are finished.
"""

from __future__ import annotations

from typing import NamedTuple

from workbench.pictures.scale import round_up
from workbench.readings import Columns
from workbench.session import Snapshot

SHORT_S = 0.25  # a step that takes less would flicker


class Sweep(NamedTuple):
    """Columns to draw; see `draw_timeline` for the fields."""

    now: Columns
    before: Columns | None
    now_s: float | None
    span_s: float


def sweep_of(now: Snapshot, span_s: float = 0.0) -> Sweep | None:
    """What to draw of a snapshot; None if there is nothing yet.

    Args:
        now: the session.
        span_s: end of the time axis so far; it stays while it fits.
    """
    last = Columns.of(now.last) if now.last is not None else None
    short = last is not None and last.end_s < SHORT_S
    if now.progress is None or short:
        return Sweep(last, None, None, _steady(span_s, last.end_s)) if last is not None else None
    part = Columns.of(now.progress.trace, now.progress.events, now.progress.samples)
    end_s = max(now.progress.now_s, last.end_s if last is not None else 0.0)
    return Sweep(part, last, now.progress.now_s, _steady(span_s, end_s))


def _steady(span_s: float, end_s: float) -> float:
    """The end of the axis: it moves only when it must, or when most of the axis is empty."""
    return span_s if 0 < end_s <= span_s <= 2 * end_s else round_up(1.05 * end_s)
