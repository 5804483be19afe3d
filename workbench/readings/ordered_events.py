"""The events of a step in order of start, with the position of the layer of each event."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from l2l_core.trace import ALL_LANES
from workbench.readings.trace_columns import Columns


class OrderedEvents:
    """Events in order of start, then of stop.

    Attributes:
        start_s, stop_s, kind, layer, k, visit, nbytes, stay, slot, piece, pieces: (events,), as in `Columns`.
        position: (events,), position of the layer in `keys`, -1 if it is not one of them.
        lanes: indices of the events of each lane.
        keys: keys of the layers in order.
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
        numbers = {key: number for number, key in enumerate(keys)}
        positions = np.array([numbers.get(name, -1) for name in columns.layers], np.int64)
        self.position = positions[self.layer] if len(order) else np.empty(0, np.int64)

    def __len__(self) -> int:
        return len(self.start_s)

    def of_kind(self, *kinds: str) -> NDArray[np.intp]:
        """Return the indices of the events of these kinds."""
        numbers = [number for number, name in enumerate(self._kinds) if name in kinds]
        return np.flatnonzero(np.isin(self.kind, numbers))

    def of_layers(self, *kinds: str) -> NDArray[np.intp]:
        """Return the indices of the events of these kinds that belong to a layer in `keys`."""
        rows = self.of_kind(*kinds)
        return rows[self.position[rows] >= 0]

    def kind_and_layer(self, row: int) -> tuple[str, str]:
        """Return the names of an event's kind and layer."""
        return self._kinds[int(self.kind[row])], self._layers[int(self.layer[row])]

    def last_started(self, rows: NDArray[np.intp], lane: str, i: int) -> int:
        """Return the last event among `rows` of a lane that has started when event `i` starts, -1 if none has.

        Events that start together with `i` count on other lanes, but not on the lane of `i`.
        """
        if i >= 0 and self._lane[i] != ALL_LANES.index(lane):
            i = int(np.searchsorted(self.start_s, self.start_s[i], side="right")) - 1
        j = int(np.searchsorted(rows, i, side="right")) - 1
        return int(rows[j]) if j >= 0 else -1
