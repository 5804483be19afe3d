"""Cells of a heat map: layers joined into rows, extremes, and the table."""

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
TABLE_UP_TO = 60  # layers; of a larger stack, both ends and the notable layers are listed
ENDS, NOTABLE = 12, 6
STEPS = 6  # columns of the table

Cells = NDArray[np.float32]


def figure_kind(figure: str) -> FigureKind:
    """Return the display settings of a figure.

    Raises:
        ValueError: there is no such figure.
    """
    if figure not in FIGURE_KINDS:
        raise ValueError(f"there is no figure {figure!r} of a layer; give one of {', '.join(FIGURE_KINDS)}")
    return FIGURE_KINDS[figure]


def round_numbers() -> Iterator[int]:
    """Return an endless iterator over 1, 2, 5, 10, 20, 50, ..."""
    return (factor * 10**power for power in count_up() for factor in (1, 2, 5))


class HeatRows(NamedTuple):
    """Rows of a heat map, each of one or several layers.

    Attributes:
        values: largest or mean figure of a row's layers, (rows, columns), as in `Statistics.values`.
        present: True where a layer of the row was in the stack, (rows, columns).
        per_row: layers per row; the last row may have fewer.
        layer_values: figures of the layers, (layers, columns).
    """

    values: Cells
    present: NDArray[np.bool_]
    per_row: int
    layer_values: Cells

    @staticmethod
    def join(statistics: Statistics, tracks: Sequence[LayerTrack], figure: str, at_most: int) -> HeatRows:
        """Join neighbouring layers so that at most `at_most` rows result."""
        values, present = statistics.values(figure, tracks), statistics.present(tracks)
        per_row = next(number for number in round_numbers() if number * at_most >= len(tracks))
        if per_row <= 1:
            return HeatRows(values, present, 1, values)
        starts = np.arange(0, len(tracks), per_row)
        joined = np.fmax.reduceat(values, starts)  # fmax ignores NaN, which means no figure
        if figure_kind(figure).aggregate == "mean":
            finite = np.isfinite(values)
            count = np.add.reduceat(finite, starts, dtype=np.int64)
            sums = np.add.reduceat(np.where(finite, values, 0), starts, dtype=np.float64)
            # a row without a finite figure stays inf or NaN
            joined = np.where(count > 0, sums / np.maximum(count, 1), joined).astype(np.float32)
        return HeatRows(joined, np.logical_or.reduceat(present, starts), per_row, values)


def describe_extremes(statistics: Statistics, values: Cells, kind: FigureKind) -> list[str]:
    """Return sentences on the largest and the smallest finite figure, and the number that are not finite."""
    finite = np.isfinite(values)
    sentences = []
    for name, lowest in (("Largest", False), ("Smallest", True)):
        if finite.any():
            at = np.argmin(np.where(finite, values, np.inf)) if lowest else np.argmax(np.where(finite, values, -np.inf))
            layer, column = divmod(int(at), values.shape[1])
            where = f"in layer {track_name(statistics, layer)}, {describe_steps(statistics, column)}"
            sentences.append(f"{name} {kind.label} {format_figure(float(values[layer, column]))} {where}.")
    if broken := int(np.isinf(values).sum()):
        sentences.append(f"Not finite in {broken} {'place' if broken == 1 else 'places'}.")
    return sentences


def track_name(statistics: Statistics, layer: int) -> str:
    """Return the full name of the layer at a position of the stack."""
    keys = [track.key for track in statistics.stack]
    return full_name(keys[layer], number_layers(keys))


def describe_steps(statistics: Statistics, column: int) -> str:
    """Return the steps of a column: "at step 7" or "in steps 9 to 12"."""
    first, last = int(statistics.first[column]), int(statistics.last[column])
    return f"at step {last}" if first == last else f"in steps {first} to {last}"


def heat_table(statistics: Statistics, figure: str) -> Table:
    """Return a table of a figure at a few steps; of many layers, both ends and the notable ones.

    Raises:
        ValueError: there is no such figure.
    """
    kind, tracks = figure_kind(figure), (*statistics.stack, *statistics.removed)
    values, count = statistics.values(figure, tracks), len(statistics.first)
    columns = sorted({round(i * (count - 1) / (STEPS - 1)) for i in range(STEPS)}) if count > STEPS else range(count)
    rows, numbers = [], number_layers(track.key for track in statistics.stack)
    for i in _notable_layers(values, len(statistics.stack)):
        number = short_name(tracks[i].key, numbers) if i < len(statistics.stack) else "dropped"
        present = values[i][~np.isnan(values[i])]
        shown = [*values[i, list(columns)], *((present.min(), present.max()) if len(present) else (np.nan, np.nan))]
        cells = ["–" if np.isnan(value) else format_figure(float(value)) for value in shown]
        rows.append((number, tracks[i].key, tracks[i].name, *cells))
    names = (describe_steps(statistics, column).split(maxsplit=1)[1].replace(" to ", "–") for column in columns)
    header = ("layer", "key", "name", *names, "smallest", "largest")
    notes = [f"… {len(tracks) - len(rows)} more layers." if len(rows) < len(tracks) else ""]
    notes += ["Figures of several steps are means."] if (statistics.first != statistics.last).any() else []
    return Table(f"{kind.label[0].upper()}{kind.label[1:]} by layer", header, rows, " ".join(filter(None, notes)))


def _notable_layers(values: Cells, in_stack: int) -> Sequence[int]:
    if len(values) <= TABLE_UP_TO:
        return range(len(values))
    chosen = {*range(ENDS), *range(in_stack - ENDS, in_stack), *range(in_stack, len(values))[-ENDS:]}
    highest = np.fmax.reduce(values, axis=1, initial=np.nan)  # `initial`: no columns before the first step
    ranked = np.flatnonzero(~np.isnan(highest))
    ranked = ranked[np.argsort(highest[ranked], kind="stable")]
    return sorted({i for i in chosen if i >= 0} | {*ranked[:NOTABLE].tolist(), *ranked[-NOTABLE:].tolist()})
