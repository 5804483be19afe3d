"""Visits of layers over time, and the layer that computes at a time."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import NamedTuple

import numpy as np

from workbench.readings.ordered_events import OrderedEvents


class ComputeState(NamedTuple):
    """The computing layer, the awaited layer, and the first micro-batch of a pending visit."""

    layer: str | None
    waits_for: str | None = None
    first_k: int | None = None


class VisitTimeline:
    """Visits of layers. The last layer has one visit for forward and backward, unless its graph was dropped.

    Args:
        events: events of the step.
        live: True if the step has not finished, so that visits may follow.
        previous: visits of the previous step, which have the same order.
        passes: number of forward-backward passes of a step.

    Attributes:
        rows: (visits,), first event of each visit.
        start_s, stop_s: (visits,).
        layers: position of the layer, by visit.
        expected: positions of the layers of the visits that will follow.
    """

    def __init__(self, events: OrderedEvents, live: bool, previous: VisitTimeline | None, passes: int = 1) -> None:
        self._keys, self._live, self._previous = events.keys, live, previous
        rows = events.of_layers("forward", "backward")
        firsts = np.flatnonzero(np.append(True, np.diff(events.stay[rows]) != 0)[: len(rows)])
        self.rows = rows[firsts]
        self.start_s = events.start_s[self.rows]
        self.stop_s = np.maximum.reduceat(events.stop_s[rows], firsts) if len(firsts) else events.stop_s[rows]
        self.layers: list[int] = events.position[self.rows].tolist()
        self._k: list[int] = events.k[self.rows].tolist()
        self.expected: list[int] = []
        if live:
            depth = len(self._keys)
            # The last layer has one visit for both directions.
            order = previous.layers if previous else [*range(depth), *range(depth - 2, -1, -1)] * passes
            self.expected = order[len(self.layers) :]

    @cached_property
    def typical_s(self) -> float:
        """Mean seconds between the starts of the last visits."""
        if len(self.start_s) > 1:
            return float(np.diff(self.start_s[-9:]).mean())
        return self._previous.typical_s if self._previous else 0.1

    def compute_state(self, t_s: float, shares: Mapping[str | None, float]) -> ComputeState:
        """Return the computing layer at a time; `shares` has the loaded share of weights by layer."""
        j = int(np.searchsorted(self.start_s, t_s, side="right")) - 1
        over = j < 0 or t_s >= self.stop_s[j]
        key = self._keys[self.layers[j]] if j >= 0 else None
        if not over or (self._live and key in shares):
            return ComputeState(key)
        following = [*self.layers[j + 1 : j + 2], *self.expected[:1]]
        if not following:
            return ComputeState(key if key in shares else None)
        next_layer = self._keys[following[0]]
        if shares.get(next_layer, 0.0) >= 1.0 and j >= 0:
            return ComputeState(next_layer, first_k=self._first_k(j + 1))
        return ComputeState(None, next_layer)

    def _first_k(self, j: int) -> int:
        """Return the first micro-batch of a visit; for a visit that has not begun, that of the previous step."""
        ks = self._k if j < len(self._k) or self._previous is None else self._previous._k
        return ks[j] if j < len(ks) else 0
