"""Strip on the time axis that shows the computing layer: forward, then backward; depth first, alternating."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from workbench.pictures.scale import Scale
from workbench.pictures.svg import group, path, rect, text
from workbench.pictures.theme import KIND_COLOURS, text_colour_on
from workbench.readings import Columns, LayerNumbers, short_name

HEIGHT = 17.0  # px
LETTER = 6.6  # px, of a digit
_MIN_GAP = 68.0  # px, between the labels under the strip
EVERY = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000)


def draw_strip(
    steps: Sequence[tuple[Columns, NDArray[np.intp]]], time: Scale, cursor: float, top: float, numbers: LayerNumbers
) -> Iterator[str]:
    """Draw the strip, `HEIGHT` px high, and a line of labels under it.

    Args:
        steps: columns and compute events by start, of the current step and optionally of the previous one, which is
            drawn from the cursor on.
        time: seconds to pixels.
        cursor: px; the right end of the axis if the step is over.
        top: px.
        numbers: numbers of the layers.
    """
    visits = [_StripVisits.of(columns, compute, time, numbers) for columns, compute in steps]
    every = _label_interval(visits[-1])  # the previous step is complete, so its labels do not move
    yield rect(time.first, top, time.last - time.first, HEIGHT, style="well")
    yield text(time.first - 8, top + 12.5, "layer", style="small dim", anchor="end")
    yield from visits[0].draw(top, time.first, cursor, every)
    for previous in visits[1:]:
        yield group(previous.draw(top, cursor, time.last, every), style="ghost")


@dataclass(frozen=True)
class _StripVisits:
    """Visits of a step, ordered by start.

    Attributes:
        left, right: (visits,), px.
        backward: (visits,), True for backward.
        layer: (visits,), index into `keys` and `names`.
        number: (visits,), the layer's number, or its index if it has none; selects the labelled visits.
        keys, names: keys and short names of the layers.
    """

    left: NDArray[np.float64]
    right: NDArray[np.float64]
    backward: NDArray[np.bool_]
    layer: NDArray[np.int64]
    number: NDArray[np.int64]
    keys: Sequence[str]
    names: Sequence[str]

    @staticmethod
    def of(columns: Columns, compute: NDArray[np.intp], time: Scale, numbers: LayerNumbers) -> _StripVisits:
        kinds = {kind: number for number, kind in enumerate(columns.kinds)}
        kind = columns.kind[compute]
        backward = kind == kinds.get("backward", -1)
        events = np.flatnonzero((backward | (kind == kinds.get("forward", -1))) & (columns.visit[compute] >= 0))
        # First event of each (stay, visit), sorted by time. Both numbers are needed: one stay may hold two visits, and
        # depth first all micro-batches have visits of the same numbers.
        numbered = np.column_stack([columns.stay[compute[events]], columns.visit[compute[events]]])
        first = events[np.sort(np.unique(numbered, axis=0, return_index=True)[1])]
        starts_s = columns.start_s[compute[first]]
        end_s = columns.stop_s[compute[events]].max(initial=0.0)
        edges = time.first + (np.append(starts_s, end_s) - time.low) * (time.last - time.first) / (time.high - time.low)
        layer, names = columns.layer[compute[first]], [short_name(key, numbers) for key in columns.layers]
        number = np.array([numbers.get(key, i) for i, key in enumerate(columns.layers)], np.int64)[layer]
        return _StripVisits(edges[:-1], edges[1:], backward[first], layer, number, columns.layers, names)

    def continues(self) -> NDArray[np.bool_]:
        """Return (visits,): True if the previous visit is of the same layer, as between forward and backward."""
        # sliced, because without visits `append` returns one element
        return np.append(False, self.layer[1:] == self.layer[:-1])[: len(self.layer)]

    def centres(self) -> NDArray[np.float64]:
        """Return (visits,), px: the centre of a visit together with its continuation."""
        ends, continued = self.right.copy(), np.flatnonzero(self.continues())
        ends[continued - 1] = self.right[continued]
        return (self.left + ends) / 2

    def labelled_visits(self, every: int) -> NDArray[np.intp]:
        """Return the indices of visits with a label."""
        return np.flatnonzero((self.number % every == 0) & ~self.continues())

    def draw(self, top: float, left: float, right: float, every: int) -> Iterator[str]:
        """Draw the visits between two pixels."""
        starts, ends = np.clip(self.left, left, right), np.clip(self.right, left, right)
        runs = [run for run in np.split(np.arange(len(starts)), np.flatnonzero(np.diff(self.backward)) + 1) if len(run)]
        # "forward" and "backward" label all runs if there is room, else the first two
        named = len(runs) if (np.diff([self.left[run[0]] for run in runs]) >= _MIN_GAP).all() else 2
        for number, run in enumerate(runs):
            visible = run[ends[run] > starts[run]]
            if not len(visible):
                continue
            word, begin = "backward" if self.backward[run[0]] else "forward", float(starts[visible[0]])
            yield rect(begin, top, float(ends[visible[-1]]) - begin, HEIGHT, fill=KIND_COLOURS[word])
            if begin < right - 60 and self.left[run[0]] >= left and number < named:
                yield text(begin, top + HEIGHT + 12, f"{word} →", style="small dim")
        if len(starts) and np.median(self.right - self.left) >= 3:
            borders = starts[1:][(self.left[1:] > left) & (self.left[1:] < right)]
            if len(borders):
                yield path("".join(f"M{x:.1f} {top:g}v4" for x in borders), style="hatch")
            for i in np.flatnonzero(ends > starts).tolist():
                key, width = self.keys[int(self.layer[i])], float(ends[i] - starts[i])
                yield rect(float(starts[i]), top, width, HEIGHT, fill="transparent", key=key)
        centres = self.centres().tolist()
        for i in self.labelled_visits(every).tolist():
            if left <= centres[i] <= right:
                colour = KIND_COLOURS["backward" if self.backward[i] else "forward"]
                name = self.names[int(self.layer[i])]
                half = LETTER * len(name) / 2 + 1
                x = min(max(centres[i], float(self.left[0]) + half), float(self.right[-1]) - half)
                yield text(x, top + 14, name, style="small", anchor="middle", fill=text_colour_on(colour))


def _label_interval(visits: _StripVisits) -> int:
    """Return the smallest interval between labelled layers at which labels do not overlap."""
    centres = visits.centres()
    widths = np.array([LETTER * len(name) for name in visits.names])
    for every in EVERY:
        labelled = visits.labelled_visits(every)
        wide = widths[visits.layer[labelled]]
        if (np.diff(centres[labelled]) >= (wide[1:] + wide[:-1]) / 2 + 5).all():
            return every
    return EVERY[-1]
