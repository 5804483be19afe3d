"""The cells of a heat map: layers joined to rows where they are many, the extremes among them, and the table of all that."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import count as count_up
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from workbench.pictures.colour_map import FigureKind, format_figure
from workbench.pictures.picture import Table
from workbench.pictures.stack_table import USUAL_RATIOS
from workbench.readings import full_name, number_layers, short_name
from workbench.session import LayerTrack, Statistics

FIGURE_KINDS: Mapping[str, FigureKind] = {
    "grad_norm": FigureKind("gradient norm", logarithmic=True, aggregate="largest"),
    "update_ratio": FigureKind("update / weight", logarithmic=True, aggregate="largest", usual=USUAL_RATIOS),
    "influence": FigureKind("influence", logarithmic=False, aggregate="mean"),
}
TABLE_UP_TO = 60  # layers; of more, both ends and the notable ones
ENDS, NOTABLE = 12, 6
STEPS = 6  # columns of the table

Cells = NDArray[np.float32]


def figure_kind(figure: str) -> FigureKind:
    """Return how a figure is shown.

    Raises:
        ValueError: no such figure.
    """
    if figure not in FIGURE_KINDS:
        raise ValueError(f"there is no figure {figure!r} of a layer; there are {', '.join(FIGURE_KINDS)}")
    return FIGURE_KINDS[figure]


def round_numbers() -> Iterator[int]:
    """Count up in round numbers: 1, 2, 5, 10, 20, 50, and so on."""
    return (factor * 10**power for power in count_up() for factor in (1, 2, 5))


class HeatRows(NamedTuple):
    """Holds what is drawn: (rows, columns) figures, and whether any of a row's layers was in the stack.

    Attributes:
        values: as of `Statistics.values`, the largest or the mean of a row's layers.
        there: whether one of them was there.
        per_row: layers in a row, the last row may have fewer.
        of: figures of the layers themselves, (layers, columns).
    """

    values: Cells
    present: NDArray[np.bool_]
    per_row: int
    layer_values: Cells

    @staticmethod
    def join(statistics: Statistics, tracks: Sequence[LayerTrack], figure: str, at_most: int) -> HeatRows:
        """Put neighbouring layers into one row, so that there are at most `at_most` rows."""
        values, there = statistics.values(figure, tracks), statistics.present(tracks)
        per_row = next(number for number in round_numbers() if number * at_most >= len(tracks))
        if per_row <= 1:
            return HeatRows(values, there, 1, values)
        starts = np.arange(0, len(tracks), per_row)
        joined = np.fmax.reduceat(values, starts)  # fmax passes over NaN, which is no figure
        if figure_kind(figure).aggregate == "mean":
            finite = np.isfinite(values)
            count = np.add.reduceat(finite, starts, dtype=np.int64)
            sums = np.add.reduceat(np.where(finite, values, 0), starts, dtype=np.float64)
            # a row without a finite figure keeps what it has: inf, or none
            joined = np.where(count > 0, sums / np.maximum(count, 1), joined).astype(np.float32)
        return HeatRows(joined, np.logical_or.reduceat(there, starts), per_row, values)


def describe_extremes(statistics: Statistics, values: Cells, kind: FigureKind) -> list[str]:
    """Say the largest and the smallest finite figure of the layers in the stack, and how many are not finite."""
    finite = np.isfinite(values)
    said = []
    for name, lowest in (("Largest", False), ("Smallest", True)):
        if finite.any():
            at = np.argmin(np.where(finite, values, np.inf)) if lowest else np.argmax(np.where(finite, values, -np.inf))
            layer, column = divmod(int(at), values.shape[1])
            where = f"in layer {track_name(statistics, layer)}, {describe_steps(statistics, column)}"
            said.append(f"{name} {kind.label} {format_figure(float(values[layer, column]))} {where}.")
    if broken := int(np.isinf(values).sum()):
        said.append(f"Not finite in {broken} {'place' if broken == 1 else 'places'}.")
    return said


def track_name(statistics: Statistics, layer: int) -> str:
    """Return the full name of a layer of the stack, by its place in it."""
    keys = [track.key for track in statistics.stack]
    return full_name(keys[layer], number_layers(keys))


def describe_steps(statistics: Statistics, column: int) -> str:
    """Say when a column was: "at step 7", or "in steps 9 to 12"."""
    first, last = int(statistics.first[column]), int(statistics.last[column])
    return f"at step {last}" if first == last else f"in steps {first} to {last}"


def heat_table(statistics: Statistics, figure: str) -> Table:
    """Make a table of figures at a few steps: up to 60 layers all of them, of more both ends and the notable ones.

    Raises:
        ValueError: no such figure.
    """
    kind, tracks = figure_kind(figure), (*statistics.stack, *statistics.removed)
    values, count = statistics.values(figure, tracks), len(statistics.first)
    columns = sorted({round(i * (count - 1) / (STEPS - 1)) for i in range(STEPS)}) if count > STEPS else range(count)
    rows, numbers = [], number_layers(track.key for track in statistics.stack)
    for i in _notable_layers(values, len(statistics.stack)):
        number = short_name(tracks[i].key, numbers) if i < len(statistics.stack) else "dropped"
        cells = [_format_figure(values[i, column]) for column in columns]
        rows.append((number, tracks[i].key, tracks[i].name, *cells, *_extremes(values[i])))
    header = ("layer", "key", "name", *(_column_name(statistics, column) for column in columns), "smallest", "largest")
    notes = [f"… {len(tracks) - len(rows)} more layers." if len(rows) < len(tracks) else ""]
    notes += ["Figures of several steps are means."] if (statistics.first != statistics.last).any() else []
    return Table(f"{kind.label[0].upper()}{kind.label[1:]} by layer", header, rows, " ".join(filter(None, notes)))


def _notable_layers(values: Cells, in_stack: int) -> Sequence[int]:
    if len(values) <= TABLE_UP_TO:
        return range(len(values))
    chosen = {*range(ENDS), *range(in_stack - ENDS, in_stack), *range(in_stack, len(values))[-ENDS:]}
    highest = np.fmax.reduce(values, axis=1, initial=np.nan)  # before the first step there are no columns to reduce
    known = np.flatnonzero(~np.isnan(highest))
    known = known[np.argsort(highest[known], kind="stable")]
    return sorted({i for i in chosen if i >= 0} | {*known[:NOTABLE].tolist(), *known[-NOTABLE:].tolist()})


def _column_name(statistics: Statistics, column: int) -> str:
    first, last = int(statistics.first[column]), int(statistics.last[column])
    return f"step {last}" if first == last else f"steps {first}–{last}"


def _extremes(line: Cells) -> tuple[str, str]:
    known = line[~np.isnan(line)]
    return (_format_figure(known.min()), _format_figure(known.max())) if len(known) else ("–", "–")


def _format_figure(figure: np.float32) -> str:
    return "–" if np.isnan(figure) else format_figure(float(figure))
