"""Level of detail: merge the events of a lane into few enough bars to draw.

Events wider than about a pixel stay. Narrower events in the same column of pixels are merged into one bar with the busy share of
the column and the kind that was busy longest. So the area of the bars is the busy time of the lane.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

_PITCHES = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0)  # px
_LEVELS = 12  # number of distinguished shares
_MIN_HATCHED_SHARE = 0.15  # smaller shares are not hatched
_SEAM = 0.02  # px; bars with a smaller gap count as touching


class Bars(NamedTuple):
    """Bars of one lane from left to right, as arrays of the same length."""

    left: NDArray[np.float64]  # px
    right: NDArray[np.float64]
    share: NDArray[np.float64]  # busy share of the bar's width, in (0, 1]
    kind: NDArray[np.int64]


def make_bars(
    left: NDArray[np.float64],
    right: NDArray[np.float64],
    kind: NDArray[np.int64],
    at_most: int = 260,
    first_pitch: float = 1.0,
    within: tuple[float, float] = (-np.inf, np.inf),
) -> Bars:
    """Merge events into at most `at_most` bars if columns of up to 32 px suffice.

    Args:
        left, right: edges of each event in px, sorted by `left`; overlapping parts belong to the first event.
        kind: kind of each event, from 0.
        at_most: wanted number of bars.
        first_pitch: smallest column width in px.
        within: range of all events and bars in px.
    """
    left = left.copy()
    left[1:] = np.maximum(left[1:], np.maximum.accumulate(right)[:-1])
    nonempty = left < right
    left, right, kind = left[nonempty], right[nonempty], kind[nonempty]
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
    """Return one bar per wide event, and one per run of narrow events in a column."""
    width = right - left
    wide, column = width >= pitch, np.floor((left + right) / (2 * pitch))
    first = np.flatnonzero(np.concatenate([[True], wide[1:] | wide[:-1] | (column[1:] != column[:-1])]))
    last = np.append(first[1:], len(left)) - 1
    # A bar of narrow events is as wide as the column, limited by its neighbours.
    before, after = np.append(within[0], right)[first], np.append(left, within[1])[last + 1]
    low = np.maximum(np.minimum(column[first] * pitch, left[first]), before)
    high = np.minimum(np.maximum((column[first] + 1) * pitch, right[last]), after)
    low, high = np.where(wide[first], left[first], low), np.where(wide[first], right[last], high)
    return Bars(
        low, high, np.minimum(1.0, np.add.reduceat(width, first) / (high - low)), _dominant_kind(kind, width, first)
    )


def _dominant_kind(kind: NDArray[np.int64], width: NDArray[np.float64], first: NDArray[np.intp]) -> NDArray[np.int64]:
    """Return the kind with the greatest total width in each group of events; `first` has the starts of the groups."""
    kinds = int(kind.max()) + 1
    group = np.repeat(np.arange(len(first)), np.diff(np.append(first, len(kind))))
    total = np.bincount(group * kinds + kind, weights=width, minlength=len(first) * kinds)
    return total.reshape(len(first), kinds).argmax(axis=1)


def _merge_touching(bars: Bars) -> Bars:
    """Merge touching bars of one kind and about the same share; the area stays."""
    left, right, share, kind = bars
    level = np.ceil(share * _LEVELS - 1e-9)
    separate = (left[1:] - right[:-1] > _SEAM) | (kind[1:] != kind[:-1]) | (level[1:] != level[:-1])
    first = np.flatnonzero(np.concatenate([[True], separate]))
    last = np.append(first[1:], len(left)) - 1
    busy = np.add.reduceat(share * (right - left), first)
    return Bars(left[first], right[last], np.minimum(1.0, busy / (right[last] - left[first])), kind[first])


def make_hatched(left: NDArray[np.float64], right: NDArray[np.float64], within: tuple[float, float]) -> Bars:
    """Return bars for sorted disjoint intervals in px, without shares too small for a stroke."""
    bars = make_bars(left, right, np.zeros(len(left), np.int64), 30, first_pitch=4.0, within=within)
    visible = bars.share >= _MIN_HATCHED_SHARE
    return Bars(bars.left[visible], bars.right[visible], bars.share[visible], bars.kind[visible])
