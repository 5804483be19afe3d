"""Hidden states over depth: their size and what each layer adds; and texts shared by pictures of a look inside."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, TypeVar

import numpy as np

from l2l_core import Inside
from l2l_core.inside import LayerObservation
from l2l_core.trace import format_bytes
from workbench.pictures import svg
from workbench.pictures.colour_map import ColourScale, FigureKind, draw_colour_bar, format_figure, palette
from workbench.pictures.picture import Picture, Table
from workbench.pictures.png import write_png
from workbench.pictures.scale import Scale, format_seconds, ticks
from workbench.pictures.theme import BLUE, GREEN, ORANGE, VERMILION
from workbench.readings import LayerNumbers, full_name, short_name

WIDTH = 960
MAX_LAYERS = 24  # maximum number of layers drawn, evenly chosen
_LEFT, _TOP, _BOTTOM, _APART = 44, 26, 128, 26  # px
_ROW, _HEAT = 13, 190  # px: a row of the heat map, and its upper edge

Item = TypeVar("Item")
Decode = Callable[[Sequence[int]], str]


class StreamFigure(NamedTuple):
    """A figure of layers over depth: its name, colour, value for a layer, and axis."""

    label: str
    colour: str
    read: Callable[[LayerObservation], float | None]
    from_zero: bool = False
    logarithmic: bool = False


_FIGURES: Sequence[StreamFigure] = (
    StreamFigure("size of the stream (rms)", BLUE, lambda one: one.left and one.left.rms, from_zero=True),
    StreamFigure("added / stream", VERMILION, lambda one: one.added, logarithmic=True),
    StreamFigure("cosine of input and output", GREEN, lambda one: one.cosine),
)
_ADDED = FigureKind("added / stream", logarithmic=True, aggregate="largest")


def drawn_layers(inside: Inside) -> list[LayerObservation]:
    """Return the layers of the first micro-batch that are drawn, in order."""
    of_first = [one for one in inside.passings if one.micro_batch == inside.micro_batches[0]]
    return sample_evenly(of_first, MAX_LAYERS)


def sample_evenly(items: Sequence[Item], at_most: int) -> list[Item]:
    """Return at most `at_most` evenly spaced items, both ends included."""
    if len(items) <= at_most:
        return list(items)
    return [items[round(i * (len(items) - 1) / (at_most - 1))] for i in range(at_most)]


def describe_cost(inside: Inside) -> str:
    """Return the seconds, passes and host bytes of a look inside in words."""
    passes = f"{inside.passes} {'pass' if inside.passes == 1 else 'passes'} of a micro-batch"
    return f"took {format_seconds(inside.seconds)} for {passes}, keeps {format_bytes(inside.nbytes)} on the host"


def describe_rows(inside: Inside) -> str:
    """Return the recorded micro-batches and row in words."""
    several = len(inside.micro_batches) > 1
    numbers = ", ".join(map(str, inside.micro_batches))
    return f"micro-batch{'es' if several else ''} {numbers}, row {inside.row}"


NO_DECODE = (
    "Tokens are shown as numbers, since no tokenizer was found on the model, the batches or in a variable. For text, pass "
    "Workbench(relay, batches, decode=tokenizer.decode)."
)


def show_token(token: int, decode: Decode | None) -> str:
    """Return a token as text with visible spaces and line ends, or its number without a decoder."""
    if decode is None:
        return str(token)
    return decode([token]).replace("\n", "\\n").replace("\t", "\\t").replace(" ", "·")


def show_stream(inside: Inside, numbers: LayerNumbers) -> Picture:
    """Draw figures over depth, and below them the share that each layer adds at each position of the row."""
    title, shown = "The stream over depth", drawn_layers(inside)
    losses = {one.key: one.loss for one in inside.depths if one.micro_batch == inside.micro_batches[0]}
    figures = [*_FIGURES]
    if losses:
        figures.append(StreamFigure("loss if it ends here", ORANGE, lambda one: losses.get(one.key)))
    wide = (WIDTH - _APART * (len(figures) - 1)) / len(figures)
    parts = [
        svg.group(_curve(shown, figure, wide, numbers), transform=f"translate({i * (wide + _APART):.1f} 0)")
        for i, figure in enumerate(figures)
    ]
    heat = [one for one in shown if one.added_at is not None]
    parts += _heat_map(heat, numbers) if heat else ()
    height = _HEAT + _ROW * len(heat) + 44 if heat else _BOTTOM + 26
    words = f"{title}, {describe_rows(inside)}"
    return Picture(svg.document(WIDTH, height, title, words, parts), stream_table(inside, numbers))


def stream_table(inside: Inside, numbers: LayerNumbers) -> Table:
    """Return a table of the stream's figures for all layers and micro-batches."""
    header = ("layer", "micro-batch", "mean", "deviation", "rms", "zeros", "not finite", "added / stream", "cosine")
    rows = []
    for one in inside.passings:
        cells = ["–"] * 5
        if (left := one.left) is not None:
            cells = [
                *map(format_figure, (left.mean, left.deviation, left.rms)),
                f"{left.zeros:.1%}",
                f"{left.broken:,}",
            ]
        changes = format_figure(one.added), format_figure(one.cosine)
        rows.append((full_name(one.key, numbers), str(one.micro_batch), *cells, *changes))
    note = (
        "Figures of the layer's output, over all rows of the micro-batch. Added / stream is the norm of output minus input "
        "over the norm of the input; a cosine of 1 is no change of direction."
    )
    return Table("The stream over depth", header, rows, note)


def _curve(
    shown: Sequence[LayerObservation], figure: StreamFigure, wide: float, numbers: LayerNumbers
) -> Iterator[str]:
    """Draw the curve of one figure over the layers."""
    points = [
        (i, value) for i, one in enumerate(shown) if (value := figure.read(one)) is not None and math.isfinite(value)
    ]
    points = [(i, math.log10(value)) for i, value in points if value > 0] if figure.logarithmic else points
    yield svg.text(0, 12, f"{figure.label}{', log scale' if figure.logarithmic else ''}", style="small")
    if not points:
        yield svg.text(_LEFT, (_TOP + _BOTTOM) / 2, "no values", style="small dim")
        return
    values = [value for _, value in points]
    low, high = min(0.0, *values) if figure.from_zero else min(values), max(values)
    up = Scale(low, high, _BOTTOM, _TOP) if high > low else Scale(low - 1, low + 1, _BOTTOM, _TOP)
    across = Scale(0, max(len(shown) - 1, 1), _LEFT + 8, wide - 8)
    yield svg.rect(_LEFT, _TOP - 4, wide - _LEFT, _BOTTOM - _TOP + 8, style="well")
    for mark in _round_powers(up.low, up.high) if figure.logarithmic else ticks(up.low, up.high, 5):
        yield svg.path(f"M{_LEFT} {up(mark):.1f}H{wide:.1f}", style="rule")
        words = format_figure(10**mark if figure.logarithmic else mark)
        yield svg.text(_LEFT - 5, up(mark) + 4, words, style="small", anchor="end")
    line = svg.polyline((across(i), up(value)) for i, value in points)
    yield svg.path(line, stroke=figure.colour, fill="none", width=1.8)
    for i, value in points:
        words = format_figure(10**value if figure.logarithmic else value)
        tip = f"layer {full_name(shown[i].key, numbers)}: {figure.label} {words}"
        yield svg.rect(across(i) - 3, up(value) - 3, 6, 6, fill=figure.colour, r=3, tip=tip)
    every = math.ceil(20 * len(shown) / (wide - _LEFT))  # a label needs 20 px
    for i, one in enumerate(shown):
        if i % every == 0:
            yield svg.text(across(i), _BOTTOM + 18, short_name(one.key, numbers), style="small", anchor="middle")


def _round_powers(low: float, high: float) -> list[float]:
    """Return log10 of 1, 2 and 5 times powers of ten in [low, high]; of many, powers alone."""
    powers = range(math.floor(low), math.ceil(high) + 1)
    marks = [power + math.log10(factor) for power in powers for factor in (1, 2, 5)]
    inside = [mark for mark in marks if low <= mark <= high]
    return inside if len(inside) <= 5 else [mark for mark in inside if mark == round(mark)]


def _heat_map(shown: Sequence[LayerObservation], numbers: LayerNumbers) -> Iterator[str]:
    """Draw layers from top to bottom, positions of the row from left to right."""
    values = np.stack([one.added_at.numpy() for one in shown if one.added_at is not None])  # (layers, positions)
    shades = ColourScale.of(values, _ADDED)
    right = WIDTH - 240
    yield svg.text(0, _HEAT - 14, "added / stream at each position of the row", style="small")
    yield svg.image(_LEFT, _HEAT, right - _LEFT, _ROW * len(shown), write_png(shades.pixels(values), palette()))
    for i, one in enumerate(shown):
        y = _HEAT + _ROW * (i + 0.5) + 4
        yield svg.text(_LEFT - 6, y, short_name(one.key, numbers), style="small", anchor="end")
    bottom = _HEAT + _ROW * len(shown) + 15
    yield svg.text(_LEFT, bottom, "position 0", style="small dim")
    yield svg.text(right, bottom, str(values.shape[1] - 1), style="small dim", anchor="end")
    yield from draw_colour_bar(shades, _ADDED, right + 30, WIDTH - 14, _HEAT)
