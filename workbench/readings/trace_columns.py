"""The events and memory samples of a trace as arrays, one column per field; they grow along with the trace.

Drawing a picture of a hundred thousand events at ten frames a second must not look at each of them every time: what has
been read once is kept, and each look reads only what is new.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from threading import Lock
from weakref import WeakKeyDictionary

import numpy as np
from numpy.typing import NDArray

from l2l_core.trace import ALL_LANES, CATEGORIES, PLACES, Trace


@dataclass(frozen=True, eq=False)
class Columns:
    """The first events and samples of a trace, in order of arrival. Times in seconds since the step began.

    Attributes:
        start_s, stop_s, stalled_s: (events,), float64.
        lane: (events,), index into `ALL_LANES`.
        kind, layer: (events,), indices into `kinds` and `layers`.
        k, visit: (events,), -1 if none.
        nbytes: (events,), int64.
        stay, slot, piece, pieces: (events,), as events say it.
        lanes: those that the worker has.
        kinds, layers: names, in order of first appearance; layers are keys.
        sample_s: (samples,), float64.
        sample_place: (samples,), index into `PLACES`.
        sample_bytes: (samples, categories), int64, in the order of `CATEGORIES`.
    """

    start_s: NDArray[np.float64]
    stop_s: NDArray[np.float64]
    stalled_s: NDArray[np.float64]
    lane: NDArray[np.int64]
    kind: NDArray[np.int64]
    layer: NDArray[np.int64]
    k: NDArray[np.int64]
    visit: NDArray[np.int64]
    nbytes: NDArray[np.int64]
    stay: NDArray[np.int64]
    slot: NDArray[np.int64]
    piece: NDArray[np.int64]
    pieces: NDArray[np.int64]
    lanes: Sequence[str]
    kinds: Sequence[str]
    layers: Sequence[str]
    sample_s: NDArray[np.float64]
    sample_place: NDArray[np.int64]
    sample_bytes: NDArray[np.int64]

    @staticmethod
    def of(trace: Trace, events: int | None = None, samples: int | None = None) -> Columns:
        """Read what had arrived when the trace had so many events and samples; default all. Asked again, it is the same one."""
        with _readers_lock:
            reader = _readers.get(trace)
            if reader is None:
                reader = _readers[trace] = _TraceReader()
            known = trace.counts
            return reader.read(
                trace,
                known[0] if events is None else min(events, known[0]),
                known[1] if samples is None else min(samples, known[1]),
            )

    @property
    def end_s(self) -> float:
        """When the last event stops, 0.0 without events."""
        return float(self.stop_s.max()) if len(self.stop_s) else 0.0

    def events_on(self, lane: str) -> NDArray[np.intp]:
        """Return the indices of a lane's events, sorted by start."""
        indices = np.flatnonzero(self.lane == ALL_LANES.index(lane))
        start_s = self.start_s[indices]
        return indices[np.argsort(start_s, kind="stable")] if (start_s[1:] < start_s[:-1]).any() else indices

    def samples_at(self, place: str) -> NDArray[np.intp]:
        """Return the indices of a place's memory samples, in order of time."""
        return np.flatnonzero(self.sample_place == PLACES.index(place))


class _TraceReader:
    """Reads a trace once."""

    def __init__(self) -> None:
        self._times, self._numbers = _GrowingArray(3, np.float64), _GrowingArray(10, np.int64)
        self._sample_times, self._samples = _GrowingArray(1, np.float64), _GrowingArray(1 + len(CATEGORIES), np.int64)
        self._kinds: dict[str, int] = {}
        self._layers: dict[str, int] = {}
        self._columns: tuple[tuple[int, int], Columns] | None = None

    def read(self, trace: Trace, events: int, samples: int) -> Columns:
        """The same object for the same numbers, so that what is made from it can be kept."""
        if self._columns is None or self._columns[0] != (events, samples):
            self._columns = (events, samples), self._read(trace, events, samples)
        return self._columns[1]

    def _read(self, trace: Trace, events: int, samples: int) -> Columns:
        kinds, layers = self._kinds, self._layers
        new, _ = trace.events_since(
            self._times.count
        )  # all there is by now, which may be more than is asked for: read once
        if new:
            self._times.add([(e.start_s, e.stop_s, e.stalled_s) for e in new])
            self._numbers.add(
                [
                    (
                        ALL_LANES.index(e.lane),
                        kinds.setdefault(e.kind, len(kinds)),
                        layers.setdefault(e.layer, len(layers)),
                        e.k,
                        e.visit,
                        e.nbytes,
                        e.stay,
                        e.slot,
                        e.piece,
                        e.pieces,
                    )
                    for e in new
                ]
            )
        fresh = trace.samples_since(self._sample_times.count)
        if fresh:
            self._sample_times.add([(sample.t_s,) for sample in fresh])
            self._samples.add(
                [(PLACES.index(s.place), *(s.bytes_by_category.get(c, 0) for c in CATEGORIES)) for s in fresh]
            )
        times, numbers = self._times.head(events), self._numbers.head(events)
        held = self._samples.head(samples)
        return Columns(
            *(times[:, i] for i in range(3)),
            *(numbers[:, i] for i in range(10)),
            lanes=trace.lane_names,
            kinds=tuple(kinds),
            layers=tuple(layers),
            sample_s=self._sample_times.head(samples)[:, 0],
            sample_place=held[:, 0],
            sample_bytes=held[:, 1:],
        )


class _GrowingArray:
    """An array that grows at its end; what was handed out stays as it is."""

    def __init__(self, width: int, dtype: type) -> None:
        self._array, self.count = np.empty((256, width), dtype), 0

    def add(self, rows: Sequence[Sequence[float]]) -> None:
        needed = self.count + len(rows)
        if needed > len(self._array):
            # A new array, since columns that were handed out are views of the old one; twice as large, so that it is rare.
            grown = np.empty((2 * needed, self._array.shape[1]), self._array.dtype)
            grown[: self.count] = self._array[: self.count]
            self._array = grown
        self._array[self.count : needed] = rows
        self.count = needed

    def head(self, count: int) -> np.ndarray:
        return self._array[:count]


_readers: WeakKeyDictionary[Trace, _TraceReader] = WeakKeyDictionary()  # a reader goes with its trace
_readers_lock = Lock()  # panels and the session's thread may read the same trace at once
