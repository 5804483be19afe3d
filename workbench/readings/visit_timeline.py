"""Stays of layers on the device in which they compute, one after another; and which one computes at a time."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import NamedTuple

import numpy as np

from workbench.readings.ordered_events import OrderedEvents


class ComputeState(NamedTuple):
    """The layer that computes, the one that compute waits for, and the micro-batch with which it begins if that is to come."""

    layer: str | None
    waits_for: str | None = None
    first_k: int | None = None


class VisitTimeline:
    """Stays that have computed. At the turn forward and backward share one, unless the last layer's graphs were dropped.

    Args:
        events: of the step.
        live: whether the step is still under way, so that visits are still to come.
        earlier: visits of the step before, which come in the same order.
        rounds: how often a step goes down the stack and back.

    Attributes:
        rows: (visits,), the event with which each one begins.
        start_s, stop_s: (visits,).
        layers: place in the stack, by visit.
        expected: likewise, of visits that are still to come.
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
        if live:  # as in the step before, or down the stack and back
            depth = len(self._keys)
            # depth - 2: the last layer's visit is its forward and its backward.
            plan = previous.layers if previous else [*range(depth), *range(depth - 2, -1, -1)] * passes
            self.expected = plan[len(self.layers) :]

    @cached_property
    def typical_s(self) -> float:
        """About how long a visit takes."""
        if len(self.start_s) > 1:
            return float(np.diff(self.start_s[-9:]).mean())
        return self._previous.typical_s if self._previous else 0.1

    def compute_state(self, t_s: float, shares: Mapping[str | None, float]) -> ComputeState:
        """Say what computes at a time before compute is over; `shares`: of its weights on the device, by layer."""
        j = int(np.searchsorted(self.start_s, t_s, side="right")) - 1
        over = j < 0 or t_s >= self.stop_s[j]
        key = self._keys[self.layers[j]] if j >= 0 else None
        if not over or (self._live and key in shares):
            return ComputeState(key)
        following = [*self.layers[j + 1 : j + 2], *self.expected[:1]]
        if not following:
            return ComputeState(key if key in shares else None)
        coming = self._keys[following[0]]
        if shares.get(coming, 0.0) >= 1.0 and j >= 0:
            return ComputeState(coming, first_k=self._first_k(j + 1))
        return ComputeState(None, coming)

    def _first_k(self, j: int) -> int:
        """The micro-batch with which a visit begins; of one that is still to come, as in the step before."""
        ks = self._k if j < len(self._k) or self._previous is None else self._previous._k
        return ks[j] if j < len(ks) else 0
