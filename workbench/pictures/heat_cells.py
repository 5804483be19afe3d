"""The cells of a heat map: layers joined to rows where they are many, the extremes among them, and the table of all that."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import count as count_up
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from workbench.pictures.layers import BAND
from workbench.pictures.picture import Table
from workbench.pictures.shades import Kind, show_figure
from workbench.readings import full_name, number_layers, short_name
from workbench.session import Statistics, Track

KINDS: Mapping[str, Kind] = {
    "grad_norm": Kind("gradient norm", logarithmic=True, over="largest"),
    "update_ratio": Kind("update / weight", logarithmic=True, over="largest", usual=BAND),
    "influence": Kind("influence", logarithmic=False, over="mean"),
}
TABLE_UP_TO = 60  # layers; of more, both ends and the notable ones
ENDS, NOTABLE = 12, 6
STEPS = 6  # columns of the table

Cells = NDArray[np.float32]


def kind_of(figure: str) -> Kind:
    """Return how a figure is shown.

    Raises:
        ValueError: no such figure.
    """
    if figure not in KINDS:
        raise ValueError(f"there is no figure {figure!r} of a layer; there are {', '.join(KINDS)}")
    return KINDS[figure]


def round_numbers() -> Iterator[int]:
    """Count up in round numbers: 1, 2, 5, 10, 20, 50, and so on."""
    return (factor * 10**power for power in count_up() for factor in (1, 2, 5))


class Rows(NamedTuple):
    """Holds what is drawn: (rows, columns) figures, and whether any of a row's layers was in the stack.

    Attributes:
        values: as of `Statistics.values`, the largest or the mean of a row's layers.
        there: whether one of them was there.
        per_row: layers in a row, the last row may have fewer.
        of: figures of the layers themselves, (layers, columns).
    """

    values: Cells
    there: NDArray[np.bool_]
    per_row: int
    of: Cells

    @staticmethod
    def join(statistics: Statistics, tracks: Sequence[Track], figure: str, at_most: int) -> Rows:
        """Put neighbouring layers into one row, so that there are at most `at_most` rows."""
        values, there = statistics.values(figure, tracks), statistics.there(tracks)
        per_row = next(number for number in round_numbers() if number * at_most >= len(tracks))
        if per_row <= 1:
            return Rows(values, there, 1, values)
        starts = np.arange(0, len(tracks), per_row)
        joined = np.fmax.reduceat(values, starts)  # fmax passes over NaN, which is no figure
        if kind_of(figure).over == "mean":
            finite = np.isfinite(values)
            count = np.add.reduceat(finite, starts, dtype=np.int64)
            sums = np.add.reduceat(np.where(finite, values, 0), starts, dtype=np.float64)
            # a row without a finite figure keeps what it has: inf, or none
            joined = np.where(count > 0, sums / np.maximum(count, 1), joined).astype(np.float32)
        return Rows(joined, np.logical_or.reduceat(there, starts), per_row, values)


def say_extremes(statistics: Statistics, values: Cells, kind: Kind) -> list[str]:
    """Say the largest and the smallest finite figure of the layers in the stack, and how many are not finite."""
    finite = np.isfinite(values)
    said = []
    for name, lowest in (("Largest", False), ("Smallest", True)):
        if finite.any():
            at = np.argmin(np.where(finite, values, np.inf)) if lowest else np.argmax(np.where(finite, values, -np.inf))
            layer, column = divmod(int(at), values.shape[1])
            where = f"in layer {call_track(statistics, layer)}, {say_steps(statistics, column)}"
            said.append(f"{name} {kind.words} {show_figure(float(values[layer, column]))} {where}.")
    if broken := int(np.isinf(values).sum()):
        said.append(f"Not finite in {broken} {'place' if broken == 1 else 'places'}.")
    return said


def call_track(statistics: Statistics, layer: int) -> str:
    """Return the full name of a layer of the stack, by its place in it."""
    keys = [track.key for track in statistics.stack]
    return full_name(keys[layer], number_layers(keys))


def say_steps(statistics: Statistics, column: int) -> str:
    """Say when a column was: "at step 7", or "in steps 9 to 12"."""
    first, last = int(statistics.first[column]), int(statistics.last[column])
    return f"at step {last}" if first == last else f"in steps {first} to {last}"


def heat_table(statistics: Statistics, figure: str) -> Table:
    """Make a table of figures at a few steps: up to 60 layers all of them, of more both ends and the notable ones.

    Raises:
        ValueError: no such figure.
    """
    kind, tracks = kind_of(figure), (*statistics.stack, *statistics.gone)
    values, count = statistics.values(figure, tracks), len(statistics.first)
    columns = sorted({round(i * (count - 1) / (STEPS - 1)) for i in range(STEPS)}) if count > STEPS else range(count)
    rows, numbers = [], number_layers(track.key for track in statistics.stack)
    for i in _notable(values, len(statistics.stack)):
        number = short_name(tracks[i].key, numbers) if i < len(statistics.stack) else "dropped"
        cells = [_show(values[i, column]) for column in columns]
        rows.append((number, tracks[i].key, tracks[i].name, *cells, *_ends(values[i])))
    header = ("layer", "key", "name", *(_name(statistics, column) for column in columns), "smallest", "largest")
    notes = [f"… {len(tracks) - len(rows)} more layers." if len(rows) < len(tracks) else ""]
    notes += ["Figures of several steps are means."] if (statistics.first != statistics.last).any() else []
    return Table(f"{kind.words[0].upper()}{kind.words[1:]} by layer", header, rows, " ".join(filter(None, notes)))


def _notable(values: Cells, in_stack: int) -> Sequence[int]:
    if len(values) <= TABLE_UP_TO:
        return range(len(values))
    chosen = {*range(ENDS), *range(in_stack - ENDS, in_stack), *range(in_stack, len(values))[-ENDS:]}
    highest = np.fmax.reduce(values, axis=1, initial=np.nan)  # before the first step there are no columns to reduce
    known = np.flatnonzero(~np.isnan(highest))
    known = known[np.argsort(highest[known], kind="stable")]
    return sorted({i for i in chosen if i >= 0} | {*known[:NOTABLE].tolist(), *known[-NOTABLE:].tolist()})


def _name(statistics: Statistics, column: int) -> str:
    first, last = int(statistics.first[column]), int(statistics.last[column])
    return f"step {last}" if first == last else f"steps {first}–{last}"


def _ends(line: Cells) -> tuple[str, str]:
    known = line[~np.isnan(line)]
    return (_show(known.min()), _show(known.max())) if len(known) else ("–", "–")


def _show(figure: np.float32) -> str:
    return "–" if np.isnan(figure) else show_figure(float(figure))
