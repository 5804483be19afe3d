"""A figure of every layer over the steps as a heat map: layers from the first on top, steps on the axis of the loss.

What a cell means beside its colour: hatched grey is a layer without a figure (it was frozen), an empty cell is one that
was not in the stack, and a cross is a figure that is not finite. The cells are one small image with a pixel per step, or
per pixel of the picture if there are more steps, so the picture stays small whatever is in it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from workbench.pictures.colour_map import ColourScale, FigureKind, draw_colour_bar, format_figure, palette
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
from workbench.pictures.scale import Scale
from workbench.pictures.step_axis import (
    LEFT,
    LETTER,
    RIGHT,
    WIDTH,
    change_lines,
    draw_steps_axis,
    locate_changes,
    name_changes,
    steps_scale,
    truncate,
)
from workbench.pictures.svg import PAGE, document, hatch, image, outlined_text, path, rect, text
from workbench.pictures.theme import GREY, VERMILION
from workbench.session import Change, LayerTrack, Statistics

TOP = 76
MAX_ROWS = 64  # of more layers several share one
ROW, HIGHEST = 22.0, 264.0  # px, of a row and of all rows at most
REMOVED_ROW, MAX_REMOVED = 9.0, 6  # px; of more layers that were dropped, those that left last
LABEL_ROWS = (57.0, 68.5)  # px, baselines of the names of changes
MAX_CROSSES = 200
_BAR = (716.0, 926.0)  # px
_GREY: Sequence[Colour] = ((0, 0, 0, 0), (*bytes.fromhex(GREY[1:]), 110))  # type: ignore[assignment]


def draw_heat(statistics: Statistics, figure: str, changes: Sequence[Change] = (), *, title: str = "") -> str:
    """Draw one figure of the layers over steps, as an SVG.

    Args:
        statistics: the record.
        figure: "grad_norm", "update_ratio" or "influence".
        changes: dashed upright lines, with names as far as there is room.
        title: instead of the figure's name.

    Raises:
        ValueError: no such figure.
    """
    kind, gone = figure_kind(figure), statistics.removed[-MAX_REMOVED:]
    rows, dropped = (
        HeatRows.join(statistics, statistics.stack, figure, MAX_ROWS),
        HeatRows.join(statistics, gone, figure, 99),
    )
    x = steps_scale(_span(statistics), changes)
    pitch = min(ROW, HIGHEST / max(len(rows.values), 1))
    bottom = TOP + max(pitch * len(rows.values), 2 * ROW)
    under = bottom + 20 if gone else bottom
    end = under + REMOVED_ROW * len(gone)
    everything = np.concatenate([rows.values, dropped.values])
    shades, places = ColourScale.of(everything, kind), locate_changes(changes, x)
    parts = [
        text(LEFT, 22, title or f"{kind.label}, layer by layer", style="strong"),
        text(LEFT, 38, _describe_cell(statistics, rows, kind), style="small dim"),
        *draw_colour_bar(shades, kind, *_BAR, 18),
        *_legend(everything, np.concatenate([rows.present, dropped.present])),
        *_draw_rows(statistics, rows, shades, x, TOP, pitch),
        *_draw_rows(statistics, dropped, shades, x, under, REMOVED_ROW),
        *_labels(statistics.stack, rows.per_row, pitch),
        text(LEFT + 1, under - 6, _name_removed(statistics.removed), style="small dim") if gone else "",
        *_draw_changes(places, end),
        *draw_steps_axis(x, TOP, end),
        *_tips(statistics, rows, kind, x, pitch),
        *_removed_tips(gone, dropped, kind, x, statistics, under),
    ]
    if np.isnan(everything).all():
        words = f"no {kind.label} is known yet" if len(statistics.first) else "no step yet"
        parts.append(
            outlined_text(text((LEFT + RIGHT) / 2, (TOP + bottom) / 2 + 4, words, style="dim", anchor="middle"), 4)
        )
    name = f"{kind.label[0].upper()}{kind.label[1:]} of layers"
    return document(WIDTH, end + 48, title or name, _describe(statistics, rows, kind, changes), parts)


def show_heat(statistics: Statistics, figure: str, changes: Sequence[Change] = ()) -> Picture:
    """Return the picture and the table behind it."""
    return Picture(draw_heat(statistics, figure, changes), heat_table(statistics, figure))


# Cells ---------------------------------------------------------------------------------------------------------------


def _draw_rows(
    statistics: Statistics, rows: HeatRows, shades: ColourScale, x: Scale, top: float, pitch: float
) -> Iterator[str]:
    """Images of the cells: grey where there is no figure, hatching over it, colours on top."""
    if not rows.values.size:
        return
    height, steps = pitch * len(rows.values), _span(statistics)
    left, right = x(steps[0] - 0.5), x(steps[1] + 0.5)
    columns = _pixel_columns(statistics)
    without = rows.present & np.isnan(rows.values)
    if without.any():
        yield image(
            left, top, right - left, height, write_png(_cells_to_pixels(without.astype(np.uint8), columns), _GREY)
        )
        yield path(hatch(left, top, right - left, height, 6), style="hatch")
    yield image(
        left, top, right - left, height, write_png(_cells_to_pixels(shades.pixels(rows.values), columns), palette())
    )
    if pitch >= 6 and len(rows.values) > 1:
        lines = "".join(f"M{left:.1f} {top + pitch * i:.1f}H{right:.1f}" for i in range(1, len(rows.values)))
        yield path(lines, stroke=PAGE, width=1)
    if crosses := _crosses(statistics, rows, x, top, pitch):
        yield path(crosses, stroke="#fff", width=1.4)


def _pixel_columns(statistics: Statistics) -> NDArray[np.intp]:
    """Which column a pixel of the image shows: a pixel is a step, or one of the picture if there are more steps.

    -1: none, the session has not seen these steps.
    """
    low, high = _span(statistics)
    span = int(high - low) + 1
    count = min(span, RIGHT - LEFT)
    columns = np.full(count, -1, np.intp)
    # starts are rounded down and stops up, so no step is without a pixel; of two in one, the later is seen
    starts = ((statistics.first - int(low)) * count // span).tolist()
    stops = (-(-(statistics.last + 1 - int(low)) * count // span)).tolist()
    for column, (start, stop) in enumerate(zip(starts, stops, strict=True)):
        columns[start:stop] = column
    return columns


def _cells_to_pixels(cells: NDArray[np.uint8], columns: NDArray[np.intp]) -> NDArray[np.uint8]:
    """(rows, pixels): cells where their steps are, 0 between them."""
    return np.hstack([cells, np.zeros((len(cells), 1), np.uint8)])[:, columns]  # -1 takes the zeros at the end


def _crosses(statistics: Statistics, rows: HeatRows, x: Scale, top: float, pitch: float) -> str:
    """Commands of a path: a cross in the middle of cells that are not finite."""
    size = min(3.0, pitch / 2 - 1)
    if size <= 0.8:
        return ""
    lines, before = [], (-1, 0.0)
    # in the record inf is a figure that was not finite, and NaN is none at all
    for row, column in np.argwhere(np.isinf(rows.values)).tolist():
        middle = x((int(statistics.first[column]) + int(statistics.last[column])) / 2)
        if before[0] == row and middle < before[1] + 3 * size:
            continue  # they would run into each other
        before = row, middle
        y, both = top + pitch * (row + 0.5), 2 * size
        lines.append(f"M{middle - size:.1f} {y - size:.1f}l{both:.2g} {both:.2g}m0 {-both:.2g}l{-both:.2g} {both:.2g}")
    return "".join(lines[:MAX_CROSSES])


def _span(statistics: Statistics) -> Sequence[float]:
    """First and last step, nothing without steps."""
    return (float(statistics.first.min()), float(statistics.last.max())) if len(statistics.first) else ()


# Words ---------------------------------------------------------------------------------------------------------------


def _labels(stack: Sequence[LayerTrack], per_row: int, pitch: float) -> Iterator[str]:
    """Numbers of layers, and their keys where rows are high enough."""
    yield text(LEFT - 8, TOP - 8, "layer", style="small dim", anchor="end")
    pace = next(number for number in round_numbers() if number % per_row == 0 and pitch * number >= 11 * per_row)
    most = int((LEFT - 12) / LETTER) - len(f"{len(stack)} · ")
    keys = [f"· {truncate(track.key, most)}" for track in stack] if pace == 1 else []
    beside = LEFT - 8 - LETTER * max((len(key) + 1 for key in keys), default=0)
    for layer in range(0, len(stack), pace):
        y = TOP + pitch * (layer // per_row + 0.5) + 3.7
        yield text(beside, y, str(layer), style="small", anchor="end")
        if keys:
            yield text(LEFT - 8, y, keys[layer], style="small dim", anchor="end")


def _describe_cell(statistics: Statistics, rows: HeatRows, kind: FigureKind) -> str:
    """What a cell is, if not one layer in one step."""
    steps = int((statistics.last - statistics.first).max(initial=0)) + 1
    said = [f"a column is the mean of {steps} steps"] if steps > 1 else []
    said += [f"a row is the {kind.aggregate} of {rows.per_row} layers"] if rows.per_row > 1 else []
    return ", ".join(said)


def _name_removed(removed: Sequence[LayerTrack]) -> str:
    names = [track.key for track in removed[-MAX_REMOVED:]]
    before = f"{len(removed) - MAX_REMOVED} before and " if len(removed) > MAX_REMOVED else ""
    return truncate(f"dropped: {before}{', '.join(names)}", int((RIGHT - LEFT) / LETTER))


def _legend(values: NDArray[np.float32], present: NDArray[np.bool_]) -> Iterator[str]:
    """Signs of cells without a colour, left of the bar."""
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


def _draw_changes(places: Sequence[tuple[float, str]], bottom: float) -> Iterator[str]:
    """As on the loss, with a seam that keeps the lines off the colours."""
    if places:
        lines = change_lines(places, TOP - 5, bottom)
        yield f'<g opacity=".6">{path(lines, stroke=PAGE, width=3)}</g>'
        yield path(lines, style="axis", dash="3 4")
    yield from name_changes(places, LABEL_ROWS)


def _tips(statistics: Statistics, rows: HeatRows, kind: FigureKind, x: Scale, pitch: float) -> Iterator[str]:
    """Words under the pointer, for every row."""
    if not rows.values.size:
        return
    for row, line in enumerate(rows.values):
        first, last = row * rows.per_row, min((row + 1) * rows.per_row, len(statistics.stack)) - 1
        track = statistics.stack[first]
        name = f"layer {track_name(statistics, first)}, {track.name}" if first == last else f"layers {first} to {last}"
        tip, key = f"{name}, {_describe_newest(statistics, line, kind)}", track.key if first == last else None
        yield rect(
            LEFT, TOP + pitch * row, x(_span(statistics)[1] + 0.5) - LEFT, pitch, fill="transparent", tip=tip, key=key
        )


def _removed_tips(
    removed: Sequence[LayerTrack], rows: HeatRows, kind: FigureKind, x: Scale, statistics: Statistics, top: float
) -> Iterator[str]:
    for row, (track, line) in enumerate(zip(removed, rows.values, strict=True)):
        tip = f"dropped: {track.key}, last {track.name}, {_describe_newest(statistics, line, kind)}"
        width = x(_span(statistics)[1] + 0.5) - LEFT
        yield rect(LEFT, top + REMOVED_ROW * row, width, REMOVED_ROW, fill="transparent", tip=tip)


def _describe_newest(statistics: Statistics, line: NDArray[np.float32], kind: FigureKind) -> str:
    known = np.flatnonzero(~np.isnan(line))
    if not len(known):
        return f"no {kind.label}"
    return f"{kind.label} {format_figure(float(line[known[-1]]))} {describe_steps(statistics, int(known[-1]))}"


def _describe(statistics: Statistics, rows: HeatRows, kind: FigureKind, changes: Sequence[Change]) -> str:
    if not len(statistics.first):
        return "No step yet."
    low, high = _span(statistics)
    said = [
        f"{len(statistics.stack)} layers from step {low:.0f} to {high:.0f}.",
        *describe_extremes(statistics, rows.layer_values, kind),
    ]
    said += [f"Layers that were {_name_removed(statistics.removed)}."] if statistics.removed else []
    said += [f"After step {change.step}: {change.what}." for change in changes[:20]]
    return " ".join(said)
