"""Heat map of one figure of every layer over the steps, on the same step axis as the loss.

Hatched grey marks a layer without a figure (it was frozen), an empty cell a layer that was not in the stack, and a cross
a figure that is not finite. The cells are one image with at most one column per pixel, so the picture stays small.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from workbench.pictures.colour_map import ColourScale, FigureKind, draw_colour_bar, format_figure, palette, rgb
from workbench.pictures.heat_cells import (
    HeatRows,
    describe_extremes,
    describe_steps,
    figure_kind,
    heat_table,
    round_numbers,
    track_name,
)
from workbench.pictures.picture import Picture
from workbench.pictures.png import Colour, write_png
from workbench.pictures.relay_drawing import shortened
from workbench.pictures.scale import Scale
from workbench.pictures.step_axis import (
    LEFT,
    LETTER,
    RIGHT,
    WIDTH,
    draw_changes,
    draw_steps_axis,
    steps_scale,
)
from workbench.pictures.svg import PAGE, document, hatch, image, outlined_text, path, rect, text
from workbench.pictures.theme import GREY, VERMILION
from workbench.session import Change, LayerTrack, Statistics

TOP = 76
MAX_ROWS = 64  # with more layers, several share a row
ROW, HIGHEST = 22.0, 264.0  # px, maximum height of a row and of all rows
REMOVED_ROW, MAX_REMOVED = 9.0, 6  # px; number of dropped layers shown, the latest ones
LABEL_ROWS = (57.0, 68.5)  # px, baselines of the labels of changes
MAX_CROSSES = 200
_BAR = (716.0, 926.0)  # px
_GREY: Sequence[Colour] = ((0, 0, 0, 0), (*rgb(GREY), 110))


def draw_heat(statistics: Statistics, figure: str, changes: Sequence[Change] = (), *, title: str = "") -> str:
    """Draw one figure of the layers over the steps, as an SVG.

    Args:
        statistics: figures of the layers by step.
        figure: "grad_norm", "update_ratio" or "influence".
        changes: drawn as dashed vertical lines, labelled where there is room.
        title: replaces the figure's name.

    Raises:
        ValueError: there is no such figure.
    """
    kind, removed = figure_kind(figure), statistics.removed[-MAX_REMOVED:]
    rows = HeatRows.join(statistics, statistics.stack, figure, MAX_ROWS)
    dropped = HeatRows.join(statistics, removed, figure, 99)
    x = steps_scale(_span(statistics), changes)
    pitch = min(ROW, HIGHEST / max(len(rows.values), 1))
    bottom = TOP + max(pitch * len(rows.values), 2 * ROW)
    removed_top = bottom + 20 if removed else bottom
    end = removed_top + REMOVED_ROW * len(removed)
    values = np.concatenate([rows.values, dropped.values])
    shades = ColourScale.of(values, kind)
    removed_names = [(f"dropped: {track.key}, last {track.name}", None) for track in removed]
    parts = [
        text(LEFT, 22, title or f"{kind.label}, layer by layer", style="strong"),
        text(LEFT, 38, _describe_cell(statistics, rows, kind), style="small dim"),
        *draw_colour_bar(shades, kind, *_BAR, 18),
        *_legend(values, np.concatenate([rows.present, dropped.present])),
        *_draw_rows(statistics, rows, shades, x, TOP, pitch),
        *_draw_rows(statistics, dropped, shades, x, removed_top, REMOVED_ROW),
        *_labels(statistics.stack, rows.per_row, pitch),
        text(LEFT + 1, removed_top - 6, _name_removed(statistics.removed), style="small dim") if removed else "",
        *draw_changes(changes, x, TOP - 5, end, LABEL_ROWS, outlined=True),
        *draw_steps_axis(x, TOP, end),
        *_tips(statistics, rows.values, _row_names(statistics, rows), kind, x, TOP, pitch),
        *_tips(statistics, dropped.values, removed_names, kind, x, removed_top, REMOVED_ROW),
    ]
    if np.isnan(values).all():
        words = f"no {kind.label} yet" if len(statistics.first) else "no step yet"
        label = text((LEFT + RIGHT) / 2, (TOP + bottom) / 2 + 4, words, style="dim", anchor="middle")
        parts.append(outlined_text(label, 4))
    name = f"{kind.label[0].upper()}{kind.label[1:]} of layers"
    return document(WIDTH, end + 48, title or name, _describe(statistics, rows, kind, changes), parts)


def show_heat(statistics: Statistics, figure: str, changes: Sequence[Change] = ()) -> Picture:
    """Return the heat map of a figure and its table."""
    return Picture(draw_heat(statistics, figure, changes), heat_table(statistics, figure))


def _draw_rows(
    statistics: Statistics, rows: HeatRows, shades: ColourScale, x: Scale, top: float, pitch: float
) -> Iterator[str]:
    """Draw the cells: hatched grey where there is no figure, colours on top."""
    if not rows.values.size:
        return
    height, steps = pitch * len(rows.values), _span(statistics)
    left, right = x(steps[0] - 0.5), x(steps[1] + 0.5)
    columns = _pixel_columns(statistics)
    missing = rows.present & np.isnan(rows.values)
    if missing.any():
        grey = write_png(_cells_to_pixels(missing.astype(np.uint8), columns), _GREY)
        yield image(left, top, right - left, height, grey)
        yield path(hatch(left, top, right - left, height, 6), style="hatch")
    coloured = write_png(_cells_to_pixels(shades.pixels(rows.values), columns), palette())
    yield image(left, top, right - left, height, coloured)
    if pitch >= 6 and len(rows.values) > 1:
        lines = "".join(f"M{left:.1f} {top + pitch * i:.1f}H{right:.1f}" for i in range(1, len(rows.values)))
        yield path(lines, stroke=PAGE, width=1)
    if crosses := _crosses(statistics, rows, x, top, pitch):
        yield path(crosses, stroke="#fff", width=1.4)


def _pixel_columns(statistics: Statistics) -> NDArray[np.intp]:
    """Return the column of each pixel of the image, at most one pixel per step; -1: steps without a record."""
    low, high = _span(statistics)
    span = int(high - low) + 1
    count = min(span, RIGHT - LEFT)
    columns = np.full(count, -1, np.intp)
    # Starts are rounded down and stops up, so that every step has a pixel; of two in one pixel, the later wins.
    starts = ((statistics.first - int(low)) * count // span).tolist()
    stops = (-(-(statistics.last + 1 - int(low)) * count // span)).tolist()
    for column, (start, stop) in enumerate(zip(starts, stops, strict=True)):
        columns[start:stop] = column
    return columns


def _cells_to_pixels(cells: NDArray[np.uint8], columns: NDArray[np.intp]) -> NDArray[np.uint8]:
    """Return (rows, pixels): the cell of each pixel, 0 for steps without a record."""
    return np.hstack([cells, np.zeros((len(cells), 1), np.uint8)])[:, columns]  # -1: the zeros at the end


def _crosses(statistics: Statistics, rows: HeatRows, x: Scale, top: float, pitch: float) -> str:
    """Return path commands of a cross in each cell that is not finite, without crosses that would overlap."""
    size = min(3.0, pitch / 2 - 1)
    if size <= 0.8:
        return ""
    lines, previous, full = [], (-1, 0.0), 2 * size
    # inf is a figure that was not finite, NaN no figure
    for row, column in np.argwhere(np.isinf(rows.values)).tolist():
        middle = x((int(statistics.first[column]) + int(statistics.last[column])) / 2)
        if previous[0] == row and middle < previous[1] + 3 * size:
            continue
        previous, y = (row, middle), top + pitch * (row + 0.5)
        lines.append(f"M{middle - size:.1f} {y - size:.1f}l{full:.2g} {full:.2g}m0 {-full:.2g}l{-full:.2g} {full:.2g}")
    return "".join(lines[:MAX_CROSSES])


def _span(statistics: Statistics) -> Sequence[float]:
    """Return the first and the last step; empty without steps."""
    return (float(statistics.first.min()), float(statistics.last.max())) if len(statistics.first) else ()


def _labels(stack: Sequence[LayerTrack], per_row: int, pitch: float) -> Iterator[str]:
    """Draw the numbers of layers, and their keys where rows are high enough."""
    yield text(LEFT - 8, TOP - 8, "layer", style="small dim", anchor="end")
    pace = next(number for number in round_numbers() if number % per_row == 0 and pitch * number >= 11 * per_row)
    most = int((LEFT - 12) / LETTER) - len(f"{len(stack)} · ")
    keys = [f"· {shortened(track.key, most)}" for track in stack] if pace == 1 else []
    number_right = LEFT - 8 - LETTER * max((len(key) + 1 for key in keys), default=0)
    for layer in range(0, len(stack), pace):
        y = TOP + pitch * (layer // per_row + 0.5) + 3.7
        yield text(number_right, y, str(layer), style="small", anchor="end")
        if keys:
            yield text(LEFT - 8, y, keys[layer], style="small dim", anchor="end")


def _describe_cell(statistics: Statistics, rows: HeatRows, kind: FigureKind) -> str:
    """Return the meaning of a cell that covers several layers or steps, else an empty string."""
    steps = int((statistics.last - statistics.first).max(initial=0)) + 1
    notes = [f"a column is the mean of {steps} steps"] if steps > 1 else []
    notes += [f"a row is the {kind.aggregate} of {rows.per_row} layers"] if rows.per_row > 1 else []
    return ", ".join(notes)


def _name_removed(removed: Sequence[LayerTrack]) -> str:
    names = [track.key for track in removed[-MAX_REMOVED:]]
    before = f"{len(removed) - MAX_REMOVED} before and " if len(removed) > MAX_REMOVED else ""
    return shortened(f"dropped: {before}{', '.join(names)}", int((RIGHT - LEFT) / LETTER))


def _legend(values: NDArray[np.float32], present: NDArray[np.bool_]) -> Iterator[str]:
    """Draw the legend of cells without a colour, left of the colour bar."""
    right = _BAR[0] - 40
    if np.isinf(values).any():
        yield text(right, 26, "not finite", style="small", anchor="end")
        yield rect(right - 70, 18, 12, 9, fill=VERMILION)
        yield path(f"M{right - 67:g} 19.5l6 6m0 -6l-6 6", stroke="#fff", width=1.4)
        right -= 92
    if (present & np.isnan(values)).any():
        yield text(right, 26, "no figure, as when frozen", style="small", anchor="end")
        yield rect(right - 152, 18, 12, 9, fill=GREY)
        yield path(hatch(right - 152, 18, 12, 9, 6), style="hatch")


def _tips(
    statistics: Statistics,
    lines: NDArray[np.float32],
    names: Iterable[tuple[str, str | None]],
    kind: FigureKind,
    x: Scale,
    top: float,
    pitch: float,
) -> Iterator[str]:
    """Draw a transparent rectangle over every row, with its name and newest figure as tooltip, and its key."""
    for row, (line, (name, key)) in enumerate(zip(lines, names, strict=True) if lines.size else ()):
        columns, width = np.flatnonzero(~np.isnan(line)), x(_span(statistics)[1] + 0.5) - LEFT
        figure = f"no {kind.label}"
        if len(columns):
            steps = describe_steps(statistics, int(columns[-1]))
            figure = f"{kind.label} {format_figure(float(line[columns[-1]]))} {steps}"
        y, tip = top + pitch * row, f"{name}, {figure}"
        yield rect(LEFT, y, width, pitch, fill="transparent", tip=tip, key=key)


def _row_names(statistics: Statistics, rows: HeatRows) -> Iterator[tuple[str, str | None]]:
    """Yield name and key of every row; a row of several layers has no key."""
    for first in range(0, len(statistics.stack), rows.per_row):
        last, track = min(first + rows.per_row, len(statistics.stack)) - 1, statistics.stack[first]
        if first == last:
            yield f"layer {track_name(statistics, first)}, {track.name}", track.key
        else:
            yield f"layers {first} to {last}", None


def _describe(statistics: Statistics, rows: HeatRows, kind: FigureKind, changes: Sequence[Change]) -> str:
    if not len(statistics.first):
        return "No step yet."
    low, high = _span(statistics)
    sentences = [
        f"{len(statistics.stack)} layers from step {low:.0f} to {high:.0f}.",
        *describe_extremes(statistics, rows.layer_values, kind),
    ]
    sentences += [f"Layers that were {_name_removed(statistics.removed)}."] if statistics.removed else []
    sentences += [f"After step {change.step}: {change.what}." for change in changes[:20]]
    return " ".join(sentences)
