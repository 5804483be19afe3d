"""A strip on the time axis that says which layer computes when: forward, then backward; depth first, by turns."""

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
_MIN_GAP = 68.0  # px, from one word under the strip to the next
EVERY = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000)


def draw_strip(
    steps: Sequence[tuple[Columns, NDArray[np.intp]]], time: Scale, cursor: float, top: float, numbers: LayerNumbers
) -> Iterator[str]:
    """Draw the strip, `HEIGHT` px high, and a line of words under it.

    Args:
        steps: columns and their compute events by start: the step up to the cursor, and the one before from there on.
        time: seconds to pixels.
        cursor: px; the right end of the axis if the step is over.
        top: px.
        numbers: of the layers.
    """
    visits = [_StripVisits.of(columns, compute, time, numbers) for columns, compute in steps]
    every = _label_interval(visits[-1])  # of the step before, if there is one: it is whole, so labels hold still
    yield rect(time.first, top, time.last - time.first, HEIGHT, style="well")
    yield text(time.first - 8, top + 12.5, "layer", style="small dim", anchor="end")
    yield from visits[0].draw(top, time.first, cursor, every)
    for before in visits[1:]:
        yield group(before.draw(top, cursor, time.last, every), style="ghost")


@dataclass(frozen=True)
class _StripVisits:
    """Visits by start.

    Attributes:
        left, right: (visits,), px.
        backward: (visits,), bool.
        layer: (visits,), index into `names`.
        number: (visits,), what decides whether a visit is labelled: the layer's number, or its place if it has none.
        keys, names: of layers; the names are short, their numbers, if they have some.
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
        # `unique` gives the first events by number of stay and visit; sorted, they are in order of time again. By both: at the
        # turn of a relay two visits take turns in one stay, and depth first all micro-batches have visits of the same numbers
        numbered = np.column_stack([columns.stay[compute[events]], columns.visit[compute[events]]])
        first = events[np.sort(np.unique(numbered, axis=0, return_index=True)[1])]
        starts_s = columns.start_s[compute[first]]
        end_s = columns.stop_s[compute[events]].max(initial=0.0)
        edges = time.first + (np.append(starts_s, end_s) - time.low) * (time.last - time.first) / (time.high - time.low)
        layer, names = columns.layer[compute[first]], [short_name(key, numbers) for key in columns.layers]
        number = np.array([numbers.get(key, i) for i, key in enumerate(columns.layers)], np.int64)[layer]
        return _StripVisits(edges[:-1], edges[1:], backward[first], layer, number, columns.layers, names)

    def continues(self) -> NDArray[np.bool_]:
        """(visits,): whether the layer is the one before, as it is where forward turns into backward, or back."""
        # cut, since of no visits `append` would still make one
        return np.append(False, self.layer[1:] == self.layer[:-1])[: len(self.layer)]

    def centres(self) -> NDArray[np.float64]:
        """(visits,), px: of a layer that goes on, the middle of both visits."""
        ends, on = self.right.copy(), np.flatnonzero(self.continues())
        ends[on - 1] = self.right[on]
        return (self.left + ends) / 2

    def labelled_visits(self, every: int) -> NDArray[np.intp]:
        """Visits that get a label."""
        return np.flatnonzero((self.number % every == 0) & ~self.continues())

    def draw(self, top: float, left: float, right: float, every: int) -> Iterator[str]:
        """What lies between two pixels."""
        starts, ends = np.clip(self.left, left, right), np.clip(self.right, left, right)
        runs = [run for run in np.split(np.arange(len(starts)), np.flatnonzero(np.diff(self.backward)) + 1) if len(run)]
        # forward and backward have their names; where they follow one another again and again, all have them or the first two
        named = len(runs) if (np.diff([self.left[run[0]] for run in runs]) >= _MIN_GAP).all() else 2
        for number, run in enumerate(runs):
            seen = run[ends[run] > starts[run]]
            if not len(seen):
                continue
            word, begin = "backward" if self.backward[run[0]] else "forward", starts[seen[0]]
            yield rect(begin, top, ends[seen[-1]] - begin, HEIGHT, fill=KIND_COLOURS[word])
            if begin < right - 60 and self.left[run[0]] >= left and number < named:
                yield text(begin, top + HEIGHT + 12, f"{word} →", style="small dim")
        borders = starts[1:][(self.left[1:] > left) & (self.left[1:] < right)]
        if len(borders) and np.median(self.right - self.left) >= 3:
            yield path("".join(f"M{x:.1f} {top:g}v4" for x in borders), style="hatch")
        if len(starts) and np.median(self.right - self.left) >= 3:
            for i in np.flatnonzero(ends > starts).tolist():
                key = self.keys[self.layer[i]]
                yield rect(starts[i], top, ends[i] - starts[i], HEIGHT, fill="transparent", key=key)
        centres = self.centres()
        for i in self.labelled_visits(every):
            if left <= centres[i] <= right:
                colour = KIND_COLOURS["backward" if self.backward[i] else "forward"]
                name = self.names[self.layer[i]]
                half = LETTER * len(name) / 2 + 1
                x = min(max(centres[i], self.left[0] + half), self.right[-1] - half)
                yield text(x, top + 14, name, style="small", anchor="middle", fill=text_colour_on(colour))


def _label_interval(visits: _StripVisits) -> int:
    """Label every so many layers, so that labels stay apart."""
    centres = visits.centres()
    widths = np.array([LETTER * len(name) for name in visits.names])
    for every in EVERY:
        at = visits.labelled_visits(every)
        wide = widths[visits.layer[at]]
        if (np.diff(centres[at]) >= (wide[1:] + wide[:-1]) / 2 + 5).all():
            return every
    return EVERY[-1]
