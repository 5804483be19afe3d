"""Loads and pushes of whole layers, put together from the pieces in which they travel."""

from __future__ import annotations

import numpy as np

from workbench.readings.events import Events


class Copies:
    """Copies of whole layers, which may travel in pieces: consecutive pieces of one layer are one copy.

    Args:
        events: of the step.
        kind: "load" or "push".
        live: whether pieces of the last copy may be still to come.
        earlier: copies of the step before, which say how many bytes to expect.

    Attributes:
        layers: place in the stack, by copy.
        start_s, stop_s: (copies,).
    """

    def __init__(self, events: Events, kind: str, live: bool, earlier: Copies | None) -> None:
        rows = events.of_layers(kind)
        start_s, stop_s, layers = events.start_s[rows], events.stop_s[rows], events.rank[rows]
        firsts = np.flatnonzero(np.append(True, np.diff(layers) != 0)[: len(layers)])
        self._first: list[int] = [*firsts.tolist(), len(layers)]
        self._piece_start, self._piece_stop, self._live = start_s, stop_s, live
        self._sum = np.concatenate([[0], np.cumsum(events.nbytes[rows])])
        self.layers: list[int] = layers[firsts].tolist()
        self.start_s = start_s[firsts]
        self.stop_s = np.maximum.reduceat(stop_s, firsts) if len(firsts) else stop_s
        self._known: dict[int, int] = dict(earlier._known) if earlier else {}  # most bytes of a layer's copy
        for copy, layer in enumerate(self.layers):
            self._known[layer] = max(self._known.get(layer, 0), self.total(copy))

    def total(self, copy: int) -> int:
        """Bytes of all its pieces."""
        return int(self._sum[self._first[copy + 1]] - self._sum[self._first[copy]])

    def done(self, copy: int, t_s: float) -> float:
        """Bytes that are there; a piece under way counts by its time."""
        first, end = self._first[copy], self._first[copy + 1]
        over = first + int(np.searchsorted(self._piece_stop[first:end], t_s, side="right"))
        done = float(self._sum[over] - self._sum[first])
        if over < end and (start_s := self._piece_start[over]) < t_s:
            share = (t_s - start_s) / (self._piece_stop[over] - start_s)
            done += float(share * (self._sum[over + 1] - self._sum[over]))
        return done

    def share(self, copy: int, t_s: float, is_whole: bool = False) -> float:
        """Share of the copy that is there; `is_whole` if it is known that no piece of it is still to come."""
        total = self.total(copy)
        if self._live and copy == len(self.layers) - 1 and not is_whole:
            total = max(total, self._known.get(self.layers[copy], 0))
        return min(1.0, self.done(copy, t_s) / total) if total else 1.0
