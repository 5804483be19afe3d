"""Loads and pushes of whole layers, put together from the pieces in which they travel."""

from __future__ import annotations

import numpy as np

from workbench.readings.ordered_events import OrderedEvents


class LayerCopies:
    """Copies of whole layers. Of a copy under way, and of one that was given up, only the first pieces are seen.

    Args:
        events: of the step.
        kind: "load" or "push".

    Attributes:
        layers: place in the stack, by copy.
        slots: weight slot that it fills, by copy; -1 if none.
        start_s, stop_s: (copies,).
    """

    def __init__(self, events: OrderedEvents, kind: str) -> None:
        rows = events.of_layers(kind)
        start_s, stop_s = events.start_s[rows], events.stop_s[rows]
        firsts = np.flatnonzero(events.piece[rows] == 0)
        self._first_piece: list[int] = [*firsts.tolist(), len(rows)]  # with an end, so that each copy has a next one
        self._piece_start, self._piece_stop = start_s, stop_s
        self._cumulative_bytes = np.concatenate([[0], np.cumsum(events.nbytes[rows])])
        self._pieces: list[int] = events.pieces[rows[firsts]].tolist()
        self.layers: list[int] = events.position[rows[firsts]].tolist()
        self.slots: list[int] = events.slot[rows[firsts]].tolist()
        self.start_s = start_s[firsts]
        self.stop_s = np.maximum.reduceat(stop_s, firsts) if len(firsts) else stop_s

    def total_bytes(self, copy: int) -> float:
        """Return the bytes of all its pieces; those that are not seen are as large as the others, to within a few elements."""
        first, end = self._first_piece[copy], self._first_piece[copy + 1]
        return float(self._cumulative_bytes[end] - self._cumulative_bytes[first]) * self._pieces[copy] / (end - first)

    def bytes_done(self, copy: int, t_s: float) -> float:
        """Return the bytes that are there; a piece under way counts by its time."""
        first, end = self._first_piece[copy], self._first_piece[copy + 1]
        over = first + int(np.searchsorted(self._piece_stop[first:end], t_s, side="right"))
        done = float(self._cumulative_bytes[over] - self._cumulative_bytes[first])
        if over < end and (start_s := self._piece_start[over]) < t_s:
            share = (t_s - start_s) / (self._piece_stop[over] - start_s)
            done += float(share * (self._cumulative_bytes[over + 1] - self._cumulative_bytes[over]))
        return done

    def share(self, copy: int, t_s: float) -> float:
        """Return the share of the copy that is there, in [0, 1]."""
        total = self.total_bytes(copy)
        return min(1.0, self.bytes_done(copy, t_s) / total) if total else 1.0
