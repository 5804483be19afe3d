"""Memory over a step at the resolution of a picture: the highest sample of every pixel column.

A peak may last a microsecond in a step of seconds. Taking the highest sample of a column, not the first, makes the highest
point of the picture the peak of the trace.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from workbench.readings.trace_columns import Columns


@dataclass(frozen=True)
class Peak:
    """The first highest sample of a place, and its compute event.

    Attributes:
        began_s: start of the event.
        t_s: time of the sample.
        nbytes: bytes of all categories.
        kind, layer, k: of the event; "" and -1 without an event.
    """

    began_s: float
    t_s: float
    nbytes: int
    kind: str
    layer: str
    k: int


@dataclass(frozen=True)
class MemoryLevels:
    """Samples of one place; each is valid from its time until the next.

    Attributes:
        t_s: (samples,), ascending.
        nbytes: (samples, categories), in the order of `CATEGORIES`.
        totals: (samples,).
        recorded_s: (samples,), times at which the samples were recorded.
    """

    t_s: NDArray[np.float64]
    nbytes: NDArray[np.int64]
    totals: NDArray[np.int64]
    recorded_s: NDArray[np.float64]

    @staticmethod
    def of(columns: Columns, place: str, compute: NDArray[np.intp], until_s: float = np.inf) -> MemoryLevels:
        """Return the samples of a place up to a time; `compute` has the indices of the compute events by start.

        At the end of a compute event the relay records the maximum during the event, then the current bytes. The maximum is
        moved to the start of the event.
        """
        at = columns.samples_at(place)
        if until_s < np.inf:
            at = at[columns.sample_s[at] <= until_s]
        recorded_s, nbytes = columns.sample_s[at], columns.sample_bytes[at]
        totals = sum((nbytes[:, i] for i in range(nbytes.shape[1])), np.zeros(len(at), np.int64))
        t_s = recorded_s
        if len(t_s) > 1 and len(compute):
            event = np.searchsorted(columns.stop_s[compute], t_s, "right") - 1  # the last one that has ended
            ended_now = np.append(True, event[1:] != event[:-1]) & (event >= 0)
            followed = np.append(event[1:] == event[:-1], False)
            rises = np.append(True, totals[1:] > totals[:-1])
            began_s = columns.start_s[compute][event]
            moved = np.where(ended_now & (followed | rises), np.minimum(began_s, t_s), t_s)
            t_s = np.maximum.accumulate(np.maximum(moved, np.append(-np.inf, t_s[:-1])))
        return MemoryLevels(t_s, nbytes, totals, recorded_s)

    def column_maxima(self, edges_s: NDArray[np.float64]) -> NDArray[np.int64]:
        """Return (columns, categories): the highest sample valid between adjacent `edges_s` (columns + 1,)."""
        count = len(self.totals)
        if not count:
            return np.zeros((len(edges_s) - 1, self.nbytes.shape[1]), np.int64)
        first = np.searchsorted(self.t_s, edges_s, "left")
        codes = self.totals * count + np.arange(count)[::-1]  # the largest code is that of the first highest sample
        codes = np.append(codes, -1)  # for columns before the first sample
        carried = np.searchsorted(self.t_s, edges_s[:-1], "right") - 1
        inside = np.where(first[1:] > first[:-1], np.maximum.reduceat(codes, first)[:-1], -1)
        best = np.maximum(codes[carried], inside)
        found = np.where(best >= 0, count - 1 - best % count, 0)
        return np.where((best >= 0)[:, None], self.nbytes[found], 0)


def find_peak(levels: MemoryLevels, columns: Columns, compute: NDArray[np.intp]) -> Peak | None:
    """Return the peak of a place; None without samples."""
    if not len(levels.totals):
        return None
    highest = int(levels.totals.argmax())
    t_s, nbytes = float(levels.recorded_s[highest]), int(levels.totals[highest])
    event = int(np.searchsorted(columns.stop_s[compute], t_s, "right")) - 1
    if event < 0:
        return Peak(t_s, t_s, nbytes, "", "", -1)
    i = int(compute[event])
    kind, layer = columns.kinds[int(columns.kind[i])], columns.layers[int(columns.layer[i])]
    return Peak(float(columns.start_s[i]), t_s, nbytes, kind, layer, int(columns.k[i]))
