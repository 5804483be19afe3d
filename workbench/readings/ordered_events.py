"""The events of a step by time of start, with the place that each one's layer has in the stack."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from l2l_core.trace import ALL_LANES
from workbench.readings.trace_columns import Columns


class OrderedEvents:
    """Events in order of start; those that start together come in order of stop.

    Attributes:
        start_s, stop_s, kind, layer, k, visit, nbytes, stay, slot, piece, pieces: (events,), as in `Columns`.
        rank: (events,), the layer's place in the stack, -1 if it is not in it.
        lanes: the events of each lane.
        keys: the stack.
    """

    def __init__(self, columns: Columns, keys: Sequence[str]) -> None:
        by_stop = np.argsort(columns.stop_s, kind="stable")
        order = by_stop[np.argsort(columns.start_s[by_stop], kind="stable")]
        self.keys, self._kinds, self._layers = keys, columns.kinds, columns.layers
        self.start_s, self.stop_s = columns.start_s[order], columns.stop_s[order]
        self.kind, self.layer = columns.kind[order], columns.layer[order]
        self.k, self.visit, self.nbytes = columns.k[order], columns.visit[order], columns.nbytes[order]
        self.stay, self.slot = columns.stay[order], columns.slot[order]
        self.piece, self.pieces = columns.piece[order], columns.pieces[order]
        self._lane = columns.lane[order]
        self.lanes = {name: np.flatnonzero(self._lane == number) for number, name in enumerate(ALL_LANES)}
        places = {key: number for number, key in enumerate(keys)}
        ranks = np.array([places.get(name, -1) for name in columns.layers], np.int64)
        self.position = ranks[self.layer] if len(order) else np.empty(0, np.int64)

    def __len__(self) -> int:
        return len(self.start_s)

    def of_kind(self, *kinds: str) -> NDArray[np.intp]:
        """Find the events of these kinds."""
        wanted = [number for number, name in enumerate(self._kinds) if name in kinds]
        return np.flatnonzero(np.isin(self.kind, wanted))

    def of_layers(self, *kinds: str) -> NDArray[np.intp]:
        """Find the events of these kinds that are of a layer in the stack."""
        rows = self.of_kind(*kinds)
        return rows[self.position[rows] >= 0]

    def kind_and_layer(self, row: int) -> tuple[str, str]:
        """Name an event's kind and layer."""
        return self._kinds[self.kind[row]], self._layers[self.layer[row]]

    def last_started(self, rows: NDArray[np.intp], lane: str, i: int) -> int:
        """Find the last of the events `rows` on a lane that has started when event `i` starts, -1 if there is none.

        Of those that start together with `i` the last one counts, but on its own lane `i` stands for itself.
        """
        if i >= 0 and self._lane[i] != ALL_LANES.index(lane):
            i = int(np.searchsorted(self.start_s, self.start_s[i], side="right")) - 1
        j = int(np.searchsorted(rows, i, side="right")) - 1
        return int(rows[j]) if j >= 0 else -1
