"""Level of detail: the events of a lane as bars that are few enough to draw.

What is wider than about a pixel stays as it is. Narrower events share a bar with their neighbours in the same column of
pixels; such a bar says for which share of its width the lane was busy, and has the kind that was busy longest. So the area
under the bars of a lane is its busy time, whatever the number of events.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

_PITCHES = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0)  # px
_LEVELS = 12  # shares that differ by less are drawn alike
_MIN_HATCHED_SHARE = 0.15  # the least share that is hatched
_SEAM = 0.02  # px between bars that count as touching


class Bars(NamedTuple):
    """Bars of one lane from left to right, as arrays of the same length."""

    left: NDArray[np.float64]  # px
    right: NDArray[np.float64]
    share: NDArray[np.float64]  # of the bar's width in which the lane was busy, in (0, 1]
    kind: NDArray[np.int64]


def make_bars(
    left: NDArray[np.float64],
    right: NDArray[np.float64],
    kind: NDArray[np.int64],
    at_most: int = 260,
    first_pitch: float = 1.0,
    within: tuple[float, float] = (-np.inf, np.inf),
) -> Bars:
    """Make bars for events that are sorted by `left`; as coarse as it takes to have `at_most` of them, 32 px at most.

    Args:
        left, right: of each event, in px; where events overlap, the first one keeps the place.
        kind: of each event, from 0.
        at_most: number of bars wanted.
        first_pitch: px; what is at least so wide may stay as it is.
        within: px; all events lie there, and so do all bars.
    """
    left = left.copy()
    left[1:] = np.maximum(left[1:], np.maximum.accumulate(right)[:-1])
    real = left < right
    left, right, kind = left[real], right[real], kind[real]
    bars = Bars(left, right, np.ones(len(left)), kind)
    if not len(left):
        return bars
    for pitch in (pitch for pitch in _PITCHES if pitch >= first_pitch):
        bars = _merge_touching(_bars_at_pitch(left, right, kind, pitch, within))
        if len(bars.left) <= at_most:
            break
    return bars


def _bars_at_pitch(
    left: NDArray[np.float64],
    right: NDArray[np.float64],
    kind: NDArray[np.int64],
    pitch: float,
    within: tuple[float, float],
) -> Bars:
    """One bar per wide event, and one for all narrow events that follow one another in a column."""
    width = right - left
    wide, column = width >= pitch, np.floor((left + right) / (2 * pitch))
    first = np.flatnonzero(np.concatenate([[True], wide[1:] | wide[:-1] | (column[1:] != column[:-1])]))
    last = np.append(first[1:], len(left)) - 1
    # a bar of narrow events takes the whole column, as far as its neighbours leave room
    before, after = np.append(within[0], right)[first], np.append(left, within[1])[last + 1]
    low = np.maximum(np.minimum(column[first] * pitch, left[first]), before)
    high = np.minimum(np.maximum((column[first] + 1) * pitch, right[last]), after)
    low, high = np.where(wide[first], left[first], low), np.where(wide[first], right[last], high)
    return Bars(
        low, high, np.minimum(1.0, np.add.reduceat(width, first) / (high - low)), _dominant_kind(kind, width, first)
    )


def _dominant_kind(kind: NDArray[np.int64], width: NDArray[np.float64], first: NDArray[np.intp]) -> NDArray[np.int64]:
    """The kind with the greatest width in each group of events; `first` says where groups begin."""
    kinds = int(kind.max()) + 1
    group = np.repeat(np.arange(len(first)), np.diff(np.append(first, len(kind))))
    total = np.bincount(group * kinds + kind, weights=width, minlength=len(first) * kinds)
    return total.reshape(len(first), kinds).argmax(axis=1)


def _merge_touching(bars: Bars) -> Bars:
    """Touching bars of one kind and about the same share become one; the area stays."""
    left, right, share, kind = bars
    level = np.ceil(share * _LEVELS - 1e-9)
    apart = (left[1:] - right[:-1] > _SEAM) | (kind[1:] != kind[:-1]) | (level[1:] != level[:-1])
    first = np.flatnonzero(np.concatenate([[True], apart]))
    last = np.append(first[1:], len(left)) - 1
    busy = np.add.reduceat(share * (right - left), first)
    return Bars(left[first], right[last], np.minimum(1.0, busy / (right[last] - left[first])), kind[first])


def make_hatched(left: NDArray[np.float64], right: NDArray[np.float64], within: tuple[float, float]) -> Bars:
    """Make bars for exposed intervals, sorted and apart, in px: wide ones stay, narrow ones are shares of columns.

    Shares too small for a stroke are left out.
    """
    bars = make_bars(left, right, np.zeros(len(left), np.int64), 30, first_pitch=4.0, within=within)
    return Bars(*(column[bars.share >= _MIN_HATCHED_SHARE] for column in bars))
