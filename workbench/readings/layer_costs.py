"""What each layer costs in a step: how long it computes, how long compute waits for it, how full the device is meanwhile."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from workbench.readings.memory_levels import MemoryLevels
from workbench.readings.trace_columns import Columns


class LayerUsage(NamedTuple):
    """One layer in one step, all its visits and micro-batches together.

    Attributes:
        key: permanent identity.
        compute_s: seconds that it computes, forward and backward.
        waited_s: seconds that compute waited right before that, for copies or for the EPS.
        device_bytes: the most that the device held, of everything, while it computed; 0 if nothing was sampled.
    """

    key: str
    compute_s: float
    waiting_s: float
    device_bytes: int


def layer_usage(columns: Columns, keys: Iterable[str]) -> Sequence[LayerUsage]:
    """Add up the costs of layers, in the order of `keys`; a layer that has not run costs nothing."""
    compute = columns.events_on("compute")
    start_s, stop_s = columns.start_s[compute], columns.stop_s[compute]
    edges_s = np.maximum.accumulate(np.column_stack([start_s, stop_s]).ravel())  # a lane is serial
    levels = MemoryLevels.of(columns, "device", compute)
    held = levels.column_maxima(edges_s)[::2].sum(axis=1) if len(compute) else np.zeros(0, np.int64)
    places = {key: i for i, key in enumerate(columns.layers)}
    found = []
    for key in keys:
        mine = columns.layer[compute] == places.get(key, -1)
        waited_s = columns.stalled_s[compute][mine].sum()
        found.append(
            LayerUsage(key, float((stop_s - start_s)[mine].sum()), float(waited_s), int(held[mine].max(initial=0)))
        )
    return found
