"""One time axis for pictures that are compared."""

from __future__ import annotations

from l2l_core import Trace
from workbench.pictures.scale import round_up
from workbench.readings import Columns


def common_span_s(*traces: Trace) -> float:
    """Return the end of an axis that holds all of these steps, for `span_s` of their pictures; a round number of seconds.

    Raises:
        ValueError: no traces.
    """
    if not traces:
        raise ValueError("no traces: give those whose pictures are to be compared")
    return round_up(max(Columns.of(trace).end_s for trace in traces))
