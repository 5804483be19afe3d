"""How many layer inputs wait for their recompute."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from workbench.readings.ordered_events import OrderedEvents


class StashCount:
    """The number over time: it grows with each call that begins in forward, and shrinks when its recompute is over.

    Args:
        events: of the step.
        micro_batches: that an event of all of them together stands for.
        live: whether the step is still under way, so that backward may still come for any of them.
    """

    def __init__(self, events: OrderedEvents, micro_batches: int, live: bool) -> None:
        width = int(events.k.max(initial=0)) + 2
        calls = events.visit * width + events.k + 1  # by event, a number for each visit and micro-batch
        forward, backward = events.of_layers("forward"), events.of_layers("backward")
        # a call is split where compute waits: its first part puts the input aside, its last part ends it
        forward = forward[np.unique(calls[forward], return_index=True)[1]]
        backward = backward[len(backward) - 1 - np.unique(calls[backward][::-1], return_index=True)[1]]
        if not live and len(backward):  # what no backward comes back for is not kept
            total = 2 * (int(events.visit[forward].max(initial=-1)) + 1) - 1
            partners = (total - events.visit[backward]) * width + events.k[backward] + 1
            forward = forward[np.isin(calls[forward], partners)]
        amounts = np.where(events.k < 0, micro_batches, 1)
        self._stashed = _running_total(events.start_s[forward], amounts[forward])
        self._consumed = _running_total(events.stop_s[backward], amounts[backward])

    def at(self, t_s: float) -> int:
        """Count the inputs that wait at a time."""
        return self._stashed(t_s) - self._consumed(t_s)


def _running_total(times: NDArray[np.float64], amounts: NDArray[np.int64]) -> Callable[[float], int]:
    """The sum of the amounts up to a time."""
    order = np.argsort(times, kind="stable")
    times, sums = times[order], np.concatenate([np.zeros(1, np.int64), np.cumsum(amounts[order])])
    return lambda t_s: int(sums[np.searchsorted(times, t_s, side="right")])
