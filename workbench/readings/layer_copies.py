"""Loads and pushes of whole layers, assembled from their pieces, and the contents of the weight slots."""

from __future__ import annotations

from bisect import bisect_right
from typing import NamedTuple

import numpy as np

from workbench.readings.ordered_events import OrderedEvents


class LayerCopies:
    """Copies of whole layers. An unfinished or cancelled copy has only its first pieces.

    Args:
        events: events of the step.
        kind: "load" or "push".

    Attributes:
        layers: position of the layer, by copy.
        slots: weight slot, by copy; -1 if none.
        start_s, stop_s: (copies,).
    """

    def __init__(self, events: OrderedEvents, kind: str) -> None:
        rows = events.of_layers(kind)
        start_s, stop_s = events.start_s[rows], events.stop_s[rows]
        firsts = np.flatnonzero(events.piece[rows] == 0)
        self._first_piece: list[int] = [*firsts.tolist(), len(rows)]  # with the end of the last copy
        self._piece_start, self._piece_stop = start_s, stop_s
        self._cumulative_bytes = np.concatenate([[0], np.cumsum(events.nbytes[rows])])
        self._pieces: list[int] = events.pieces[rows[firsts]].tolist()
        self.layers: list[int] = events.position[rows[firsts]].tolist()
        self.slots: list[int] = events.slot[rows[firsts]].tolist()
        self.start_s = start_s[firsts]
        self.stop_s = np.maximum.reduceat(stop_s, firsts) if len(firsts) else stop_s

    def total_bytes(self, copy: int) -> float:
        """Return the bytes of a copy; missing pieces are assumed to be as large as the others."""
        first, end = self._first_piece[copy], self._first_piece[copy + 1]
        return float(self._cumulative_bytes[end] - self._cumulative_bytes[first]) * self._pieces[copy] / (end - first)

    def bytes_done(self, copy: int, t_s: float) -> float:
        """Return the bytes copied by a time; the current piece is interpolated."""
        first, end = self._first_piece[copy], self._first_piece[copy + 1]
        current = first + int(np.searchsorted(self._piece_stop[first:end], t_s, side="right"))
        done = float(self._cumulative_bytes[current] - self._cumulative_bytes[first])
        if current < end and (start_s := self._piece_start[current]) < t_s:
            share = (t_s - start_s) / (self._piece_stop[current] - start_s)
            done += float(share * (self._cumulative_bytes[current + 1] - self._cumulative_bytes[current]))
        return done

    def share(self, copy: int, t_s: float) -> float:
        """Return the share of a copy that is done by a time, in [0, 1]."""
        total = self.total_bytes(copy)
        return min(1.0, self.bytes_done(copy, t_s) / total) if total else 1.0


class SlotContent(NamedTuple):
    """Content of a slot: position of the layer, and number of its load."""

    layer: int
    load: int


class SlotTimeline:
    """Contents of the weight slots over time, deduced from loads.

    Invariant: `states[j]` is valid from `times[j]` until `times[j + 1]`, and has no layer twice.

    Args:
        loads: loads of the step.
        slots: minimum number of slots.
    """

    def __init__(self, loads: LayerCopies, slots: int) -> None:
        self._empty_slots: tuple[SlotContent | None, ...] = (None,) * max(slots, 1 + max(loads.slots, default=-1))
        contents: list[SlotContent | None] = [*self._empty_slots]
        self.times: list[float] = loads.start_s.tolist()  # ascending
        self.states: list[tuple[SlotContent | None, ...]] = []
        for load, (layer, slot) in enumerate(zip(loads.layers, loads.slots, strict=True)):
            contents[slot] = SlotContent(layer, load)
            self.states.append(tuple(contents))

    def at(self, t_s: float) -> tuple[SlotContent | None, ...]:
        """Return the contents of the slots at a time."""
        j = bisect_right(self.times, t_s) - 1
        return self.states[j] if j >= 0 else self._empty_slots
