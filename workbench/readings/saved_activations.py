"""Layer graphs and layer inputs that wait for backward: kept graphs, and the size of the stash."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from l2l_core.schedule_rules import kept_layer_count
from workbench.readings.layer_copies import LayerCopies
from workbench.readings.ordered_events import OrderedEvents


class KeptGraphs:
    """Visits of backward that use the graph of forward instead of a recompute, deduced from events and settings.

    A layer that was loaded again since its forward has lost its graph. Layers that the engine recomputes for other reasons,
    for example because their forward changes module state, are not detected.

    Args:
        events: events of the step.
        loads: loads of the layers.
        keep, ahead, resident: settings of the step.
    """

    def __init__(self, events: OrderedEvents, loads: LayerCopies, keep: int, ahead: int, resident: int) -> None:
        self._events, self._loads = events, loads
        self._settings = {"keep": keep, "ahead": ahead, "resident": resident}

    def at(self, row: int) -> bool:
        """Return True if the event is the backward of a layer whose graph was kept."""
        events = self._events
        if row < 0 or events.kind_and_layer(row)[0] != "backward":
            return False
        visits, firsts = len(self._forward_starts), self._forward_starts
        behind = int(events.visit[row]) - visits  # forward visits after that of the layer
        if not 0 <= behind < kept_layer_count(self._settings, visits):
            return False
        forward = firsts[visits - 1 - behind]
        if behind == 0 and self._settings["keep"] < 1 and events.stay[forward] != events.stay[row]:
            return False  # without keep, the last layer has its graph only if the loss follows at once
        forward_s, backward_s = float(events.start_s[forward]), float(events.start_s[row])
        loads_s = self._load_starts_s.get(int(events.position[row]), [])
        return bisect_right(loads_s, forward_s) == bisect_right(loads_s, backward_s)

    @cached_property
    def _forward_starts(self) -> list[int]:
        """First event of each forward visit."""
        rows = self._events.of_layers("forward")
        return rows[np.unique(self._events.visit[rows], return_index=True)[1]].tolist()

    @cached_property
    def _load_starts_s(self) -> dict[int, list[float]]:
        """Start of each load, by position of the layer."""
        found: dict[int, list[float]] = {}
        for position, start_s in zip(self._loads.layers, self._loads.start_s.tolist(), strict=True):
            found.setdefault(position, []).append(start_s)
        return found


class StashCount:
    """Number of stashed layer inputs over time.

    Args:
        events: events of the step.
        micro_batches: number of inputs of an event for all micro-batches (k = -1).
        live: True if the step has not finished, so that the backward of any call may follow.
    """

    def __init__(self, events: OrderedEvents, micro_batches: int, live: bool) -> None:
        width = int(events.k.max(initial=0)) + 2
        calls = events.visit * width + events.k + 1  # by event: number of its visit and micro-batch
        forward, backward = events.of_layers("forward"), events.of_layers("backward")
        # A call has several events if compute waits: take the first of forward and the last of backward.
        forward = forward[np.unique(calls[forward], return_index=True)[1]]
        backward = backward[len(backward) - 1 - np.unique(calls[backward][::-1], return_index=True)[1]]
        if not live and len(backward):  # inputs without a backward are not stashed
            total = 2 * (int(events.visit[forward].max(initial=-1)) + 1) - 1
            partners = (total - events.visit[backward]) * width + events.k[backward] + 1
            forward = forward[np.isin(calls[forward], partners)]
        amounts = np.where(events.k < 0, micro_batches, 1)
        self._stashed = _running_total(events.start_s[forward], amounts[forward])
        self._consumed = _running_total(events.stop_s[backward], amounts[backward])

    def at(self, t_s: float) -> int:
        """Return the number of stashed inputs at a time."""
        return self._stashed(t_s) - self._consumed(t_s)


def _running_total(times: NDArray[np.float64], amounts: NDArray[np.int64]) -> Callable[[float], int]:
    """Return a function for the sum of the amounts up to a time."""
    order = np.argsort(times, kind="stable")
    times, sums = times[order], np.concatenate([np.zeros(1, np.int64), np.cumsum(amounts[order])])
    return lambda t_s: int(sums[np.searchsorted(times, t_s, side="right")])
