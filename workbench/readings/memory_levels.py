"""Memory over a step at the resolution of a picture: for every pixel column the highest moment in it.

A peak may last a microsecond in a step of seconds. A column therefore shows the categories of its highest sample, not of
its first one, so that the highest point of the picture is the peak of the trace.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from workbench.readings.trace_columns import Columns


@dataclass(frozen=True)
class Peak:
    """The first highest sample of a place, and the compute event that it describes.

    Attributes:
        began_s, t_s: start of that event, and when the sample was taken.
        nbytes: all categories together.
        kind, layer, k: of the event, "" and -1 if there is none.
    """

    began_s: float
    t_s: float
    nbytes: int
    kind: str
    layer: str
    k: int


@dataclass(frozen=True)
class MemoryLevels:
    """Samples of one place, from each one's time on until the next.

    Attributes:
        t_s: (samples,), ascending.
        nbytes: (samples, categories), in the order of `CATEGORIES`.
        totals: (samples,).
        taken_s: (samples,), when they were taken.
    """

    t_s: NDArray[np.float64]
    nbytes: NDArray[np.int64]
    totals: NDArray[np.int64]
    recorded_s: NDArray[np.float64]

    @staticmethod
    def of(columns: Columns, place: str, compute: NDArray[np.intp], until_s: float = np.inf) -> MemoryLevels:
        """Read the samples of a place up to a time; `compute`: indices of the compute events by start.

        When a compute event has ended, the relay notes the highest bytes while it ran, then what is left. The highest
        are drawn from the start of the event on, where they belong.
        """
        at = columns.samples_at(place)
        if until_s < np.inf:
            at = at[columns.sample_s[at] <= until_s]
        taken_s, nbytes = columns.sample_s[at], columns.sample_bytes[at]
        totals = sum((nbytes[:, i] for i in range(nbytes.shape[1])), np.zeros(len(at), np.int64))
        t_s = taken_s
        if len(t_s) > 1 and len(compute):
            event = np.searchsorted(columns.stop_s[compute], t_s, "right") - 1  # that ended last
            ended_now = np.append(True, event[1:] != event[:-1]) & (event >= 0)
            followed = np.append(event[1:] == event[:-1], False)
            rises = np.append(True, totals[1:] > totals[:-1])
            began_s = columns.start_s[compute][event]
            moved = np.where(ended_now & (followed | rises), np.minimum(began_s, t_s), t_s)
            t_s = np.maximum.accumulate(np.maximum(moved, np.append(-np.inf, t_s[:-1])))
        return MemoryLevels(t_s, nbytes, totals, taken_s)

    def column_maxima(self, edges_s: NDArray[np.float64]) -> NDArray[np.int64]:
        """Return (columns, categories): the highest sample in force between each of `edges_s` (columns + 1,) and the next."""
        count = len(self.totals)
        if not count:
            return np.zeros((len(edges_s) - 1, self.nbytes.shape[1]), np.int64)
        first = np.searchsorted(self.t_s, edges_s, "left")
        codes = self.totals * count + np.arange(count)[::-1]  # the largest code is the first highest sample
        codes = np.append(codes, -1)  # nothing before the first sample
        carried = np.searchsorted(self.t_s, edges_s[:-1], "right") - 1
        inside = np.where(first[1:] > first[:-1], np.maximum.reduceat(codes, first)[:-1], -1)
        best = np.maximum(codes[carried], inside)
        found = np.where(best >= 0, count - 1 - best % count, 0)
        return np.where((best >= 0)[:, None], self.nbytes[found], 0)


def find_peak(levels: MemoryLevels, columns: Columns, compute: NDArray[np.intp]) -> Peak | None:
    """Find where a place is fullest; None without samples."""
    if not len(levels.totals):
        return None
    highest = int(levels.totals.argmax())
    t_s, nbytes = float(levels.recorded_s[highest]), int(levels.totals[highest])
    event = int(np.searchsorted(columns.stop_s[compute], t_s, "right")) - 1
    if event < 0:
        return Peak(t_s, t_s, nbytes, "", "", -1)
    i = compute[event]
    kind, layer = columns.kinds[columns.kind[i]], columns.layers[columns.layer[i]]
    return Peak(float(columns.start_s[i]), t_s, nbytes, kind, layer, int(columns.k[i]))
