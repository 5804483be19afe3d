"""Loads and pushes of whole layers, put together from the pieces in which they travel."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


class Copies:
    """Copies of whole layers, which may travel in pieces: consecutive pieces of one layer are one copy.

    Args:
        start_s, stop_s, layers, nbytes: of the pieces, in order of start.
        earlier: copies of the step before, which say how many bytes to expect.
        live: whether pieces of the last copy may be still to come.
    """

    def __init__(
        self,
        start_s: NDArray[np.float64],
        stop_s: NDArray[np.float64],
        layers: NDArray[np.int64],
        nbytes: NDArray[np.int64],
        earlier: Copies | None,
        live: bool,
    ) -> None:
        firsts = np.flatnonzero(np.append(True, np.diff(layers) != 0)[: len(layers)])
        self._first: list[int] = [*firsts.tolist(), len(layers)]
        self._piece_start, self._piece_stop, self._live = start_s, stop_s, live
        self._sum = np.concatenate([[0], np.cumsum(nbytes)])
        self.layers: list[int] = layers[firsts].tolist()
        self.start_s = start_s[firsts]
        self.stop_s = np.maximum.reduceat(stop_s, firsts) if len(firsts) else stop_s
        self.known: dict[int, int] = dict(earlier.known) if earlier else {}  # most bytes of a layer's copy
        for copy, layer in enumerate(self.layers):
            self.known[layer] = max(self.known.get(layer, 0), self.total(copy))

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

    def share(self, copy: int, t_s: float) -> float:
        """Share of the copy that is there."""
        total = self.total(copy)
        if self._live and copy == len(self.layers) - 1:
            total = max(total, self.known.get(self.layers[copy], 0))
        return min(1.0, self.done(copy, t_s) / total) if total else 1.0
