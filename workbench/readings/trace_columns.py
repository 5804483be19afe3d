"""The events and memory samples of a trace as arrays, one column per field, read incrementally.

Arrays are cached per trace and extended by new events, so that 100,000 events can be redrawn ten times a second.
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
    """The first events and samples of a trace, in order of recording. Times are seconds since the step began.

    Attributes:
        start_s, stop_s, stalled_s: (events,), float64.
        lane: (events,), index into `ALL_LANES`.
        kind, layer: (events,), indices into `kinds` and `layers`.
        k, visit, nbytes, stay, slot, piece, pieces: (events,), int64, as in `Event`.
        lanes: names of the lanes of the worker.
        kinds, layers: names of kinds and keys of layers, in order of first appearance.
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
        """Return the first `events` and `samples` of a trace, by default all; equal calls return the same object."""
        with _readers_lock:
            reader = _readers.get(trace)
            if reader is None:
                reader = _readers[trace] = _TraceReader()
            counts = trace.counts
            return reader.read(
                trace,
                counts[0] if events is None else min(events, counts[0]),
                counts[1] if samples is None else min(samples, counts[1]),
            )

    @property
    def end_s(self) -> float:
        """End of the last event, 0.0 without events."""
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
    """Arrays of one trace."""

    def __init__(self) -> None:
        self._times, self._numbers = _GrowingArray(3, np.float64), _GrowingArray(10, np.int64)
        self._sample_times, self._samples = _GrowingArray(1, np.float64), _GrowingArray(1 + len(CATEGORIES), np.int64)
        self._kinds: dict[str, int] = {}
        self._layers: dict[str, int] = {}
        self._columns: tuple[tuple[int, int], Columns] | None = None

    def read(self, trace: Trace, events: int, samples: int) -> Columns:
        """Return columns; the same object for the same counts, so that results can be cached by it."""
        if self._columns is None or self._columns[0] != (events, samples):
            self._columns = (events, samples), self._read(trace, events, samples)
        return self._columns[1]

    def _read(self, trace: Trace, events: int, samples: int) -> Columns:
        kinds, layers = self._kinds, self._layers
        new_events, _ = trace.events_since(self._times.count)  # all new ones, even if fewer are requested
        if new_events:
            self._times.add([(e.start_s, e.stop_s, e.stalled_s) for e in new_events])
            # In the order of the fields of `Columns`.
            numbers = [(ALL_LANES.index(e.lane), kinds.setdefault(e.kind, len(kinds)),
                        layers.setdefault(e.layer, len(layers)), e.k, e.visit, e.nbytes, e.stay, e.slot, e.piece, e.pieces)
                       for e in new_events]  # fmt: skip
            self._numbers.add(numbers)
        new_samples = trace.samples_since(self._sample_times.count)
        if new_samples:
            self._sample_times.add([(sample.t_s,) for sample in new_samples])
            self._samples.add(
                [(PLACES.index(s.place), *(s.bytes_by_category.get(c, 0) for c in CATEGORIES)) for s in new_samples]
            )
        sampled = self._samples.head(samples)
        return Columns(
            *self._times.head(events).T,
            *self._numbers.head(events).T,
            lanes=trace.lane_names,
            kinds=tuple(kinds),
            layers=tuple(layers),
            sample_s=self._sample_times.head(samples)[:, 0],
            sample_place=sampled[:, 0],
            sample_bytes=sampled[:, 1:],
        )


class _GrowingArray:
    """An array that grows at its end; views of it stay valid."""

    def __init__(self, width: int, dtype: type) -> None:
        self._array, self.count = np.empty((256, width), dtype), 0

    def add(self, rows: Sequence[Sequence[float]]) -> None:
        needed = self.count + len(rows)
        if needed > len(self._array):
            # A new array, because `Columns` are views of the old one; of twice the size, so that this is rare.
            grown = np.empty((2 * needed, self._array.shape[1]), self._array.dtype)
            grown[: self.count] = self._array[: self.count]
            self._array = grown
        self._array[self.count : needed] = rows
        self.count = needed

    def head(self, count: int) -> np.ndarray:
        return self._array[:count]


_readers: WeakKeyDictionary[Trace, _TraceReader] = WeakKeyDictionary()
_readers_lock = Lock()  # panels and the thread of the session may read the same trace at the same time
